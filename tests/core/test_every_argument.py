"""Every argument that is given is checked, whatever the other arguments are: a value of no use is an error that names
the argument, also where the call would not read it."""

import dataclasses
import inspect

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

RANKS, TOKENS, HIDDEN, TOP_K, EXPERTS, WIDTH = 4, 8, 8, 2, 8, 4


class Useless:
    """No array, number, name, function or object of this library."""


USELESS = (Useless(), np.ones(3))
ELSEWHERE = {
    "axis_name": ("manual axes", "name of a mesh axis"),
    "home": ("must be a Placement",),
    "old": ("must be a Placement",),
    "new": ("must be a Placement",),
    "weights": ("array",),
    "gradients": ("array",),
}
"""A message may have these words instead of the argument's name."""


def ones(*shape):
    return np.ones(shape, np.float32)


def calls():
    """Returns operation and arguments by name."""
    home = xm.balance.home(EXPERTS, RANKS)
    by_rank = dataclasses.replace(home, sums="rank")
    sent = {
        "x": ones(TOKENS, HIDDEN),
        "topk_idx": np.zeros((TOKENS, TOP_K), np.int32),
        "topk_weights": ones(TOKENS, TOP_K),
        "num_experts": EXPERTS,
        "axis_name": "ep",
    }
    local = EXPERTS // RANKS
    weights = {name: ones(local, HIDDEN, WIDTH) for name in ("gate", "up")} | {"down": ones(local, WIDTH, HIDDEN)}

    shapes = {"num_tokens": TOKENS, "hidden": HIDDEN, "num_ranks": RANKS, "num_experts": EXPERTS, "top_k": TOP_K}
    routing = np.zeros((RANKS, TOKENS, TOP_K), np.int32)
    predicted = {
        "a combine": {"operation": "combine"},
        "a routing": {"operation": "dispatch", "topk_idx": routing},
        "a balance": {"operation": "balance", "topk_idx": routing, "intermediate": WIDTH},
    }

    def combine(dispatched, **options):
        def run(y=None, handle=None, **given):
            routed = xm.dispatch(**sent, **dispatched)
            y, handle = routed.x if y is None else y, routed.handle if handle is None else handle
            return xm.combine(y, handle, **options | given)

        return run, {}, ("y", "handle", *names_of(xm.combine)[2:])

    return {
        "dispatch": (xm.dispatch, sent),
        "dispatch of a placement": (xm.dispatch, sent | {"placement": by_rank}),
        "dispatch in balance": (xm.dispatch, sent | {"balance": "exact"}),
        "combine": combine({}),
        "combine by home": combine({"placement": home}),
        "combine by rank": combine({"placement": by_rank}),
        "combine by rank after home": combine({"placement": home}, placement=by_rank),
        "moe_mlp": (xm.moe_mlp, sent | weights),
        "moe_mlp of replicated tokens": (xm.moe_mlp, sent | weights | {"replicated": True}),
        "all_gather": (
            xm.all_gather,
            {"x": ones(8, 4), "axis_name": "ep", "axis": 1},
            ("axis_name", "axis", "to", "wire"),
        ),
        "move": (xm.balance.Placement.move, {"weights": ones(local, 3), "old": None, "new": home}),
        "reduce": (lambda **given: home.reduce(**given), {"gradients": ones(local, 3)}, names_of(home.reduce)),
        **{f"perf_model of {name}": (xm.perf_model, given | shapes) for name, given in predicted.items()},
        "top_k": (xm.routing.top_k, {"logits": ones(4, 8), "k": 2}),
        "chosen_weights": (xm.routing.chosen_weights, {"logits": ones(4, 8), "topk_idx": np.zeros((4, 2), np.int32)}),
        "quantize_weights": (xm.quantize_weights, {"weights": ones(2, 4, 8)}),
    }


def names_of(function):
    return tuple(inspect.signature(function).parameters)


@pytest.mark.parametrize("case", calls())
def test_a_useless_argument_is_named(mesh4, case):
    function, arguments, *names = calls()[case]

    def traced(given):
        body = lambda: (function(**given), np.zeros(()))[1]  # noqa: E731
        jax.eval_shape(jax.shard_map(body, mesh=mesh4, in_specs=P(), out_specs=P(), check_vma=False))

    traced(arguments)
    for name in names[0] if names else names_of(function):
        for value in USELESS:
            with pytest.raises((TypeError, ValueError)) as error:
                traced(arguments | {name: value})
            said = str(error.value)
            assert any(part in said for part in (name, *ELSEWHERE.get(name, ()))), f"{name}={value!r}: {said}"
