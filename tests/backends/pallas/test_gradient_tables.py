"""Exchanges of gradients on TPU beside rows, tested on CPU: numbers of slots in runs, and flags as bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import plan
from xen_moe_jax.backends.pallas.weights import weights_from_rows

RANKS, TOP_K = 4, 3
AUTO = jax.sharding.AxisType.Auto


def mesh_of(*axes: tuple[str, int]) -> jax.sharding.Mesh:
    names, sizes = zip(*axes, strict=True)
    return jax.make_mesh(sizes, names, devices=jax.devices()[:RANKS], axis_types=(AUTO,) * len(names))


ONE, TWO = (("ep", 4),), (("dcn", 2), ("ici", 2))


@pytest.mark.parametrize(
    ("axes", "layout", "tokens", "experts", "capacity", "alignment"),
    [
        (ONE, "grouped", 40, 10, None, 8),
        (ONE, "grouped", 40, 3, 50, 1),  # a rank without experts, and rows dropped on all other ranks
        (TWO, "grouped", 17, 8, 60, 1),
        (TWO, "padded", 9, 6, None, 1),
        (ONE, "padded", 5, 40, None, 1),  # more experts than slots: one number of each a round
    ],
)
def test_numbers_return_to_their_slots(axes, layout, tokens, experts, capacity, alignment):
    """Skewed routing with duplicates and unused slots: several rounds."""
    rng = np.random.default_rng(tokens)
    idx = np.minimum(rng.geometric(0.4, (RANKS, tokens, TOP_K)) - 2, experts - 1).astype(np.int32)
    names = tuple(name for name, _ in axes)
    options = {"num_experts": experts, "layout": layout, "alignment": alignment}
    expected = oracle.dispatch(np.zeros((RANKS, tokens, 1), np.float32), idx, None, capacity=capacity, **options)
    values = rng.standard_normal(expected.weights.shape).astype(np.float32)
    values[~expected.specified] = np.nan

    def body(idx, values):
        x = jnp.zeros((tokens, 1), jnp.float32)
        config = xm.KernelConfig(backend="reference")
        name = names if len(names) > 1 else names[0]
        handle = xm.dispatch(x, idx[0], axis_name=name, capacity=capacity, config=config, **options).handle
        call = Call(handle.spec, config)
        return weights_from_rows(call, values[0], handle.topk_idx, handle.positions, handle.recv_counts)[None]

    mapped = jax.shard_map(body, mesh=mesh_of(*axes), in_specs=P(names), out_specs=P(names), check_vma=False)
    assert_bits(jax.jit(mapped)(idx, values), oracle.weights_from_rows(values, expected), "numbers")
    assert capacity is None or expected.num_dropped.sum() > 0


@pytest.mark.parametrize("tokens", [1, 32, 71])
def test_flags_come_from_peers(tokens):
    given = np.random.default_rng(tokens).random((RANKS, RANKS, tokens, 3)) < 0.5  # [source, destination, ...]
    theirs = given.swapaxes(0, 1).astype(np.int32)

    def body(given, wanted):
        otherwise = jnp.full(given[0].shape, 7, jnp.int32)
        found = plan.flags_to_peers(given[0], ("ep",)), plan.flags_to_peers_if(wanted, given[0], otherwise, ("ep",))
        return tuple(a[None] for a in found)

    program = jax.jit(
        jax.shard_map(body, mesh=mesh_of(*ONE), in_specs=(P("ep"), P()), out_specs=P("ep"), check_vma=False)
    )
    for wanted in (True, False):
        always, asked = program(given, wanted)
        assert_bits(always, theirs, "always")
        assert_bits(asked, theirs if wanted else np.full_like(theirs, 7), "where asked")


def test_several_rounds_of_flags(monkeypatch):
    monkeypatch.setattr(plan, "FLAG_WORDS_AT_ONCE", 8)
    test_flags_come_from_peers(200)
