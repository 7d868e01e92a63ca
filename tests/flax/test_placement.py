"""Flax layers with a placement: values, gradients, weights that stay in their slots, one program for all plans."""

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

import xen_moe_jax as xm
from tests.support import plain_hopper
from tests.support.layers import (
    CONFIG,
    DEEPSEEK,
    GPT_OSS,
    assert_same_gradients,
    biased,
    layer,
    make_mesh,
    run,
    run_with_gradients,
    tokens,
    weights_of,
)
from xen_moe_jax.experts import lent
from xen_moe_jax.flax import linen
from xen_moe_jax.flax.linen import variables_of
from xen_moe_jax.flax.nnx import MoE

RANKS = 4
E = CONFIG.num_experts


def plan(seed, slots=3):
    return xm.balance.plan(np.random.default_rng(seed).integers(1, 99, E) ** 2, RANKS, slots)


def mesh(*more):
    return make_mesh((RANKS, *[2] * len(more)), ("ep", *more))


@pytest.mark.parametrize(
    ("config", "sums"),
    [
        (CONFIG, "home"),
        (dataclasses.replace(CONFIG, apply_weights_to="rows"), "rank"),
        (dataclasses.replace(DEEPSEEK, layout="padded"), "home"),
        (dataclasses.replace(GPT_OSS, num_chunks=2, remat="experts"), "home"),
        (dataclasses.replace(CONFIG, capacity_factor=float(RANKS), alignment=8, apply_weights_to="activation"), "home"),
    ],
    ids=["plain", "sums-by-rank", "deepseek-padded", "biases-chunks-remat", "capacity-aligned"],
)
def test_values_and_gradients_are_those_without_a_placement(config, sums):
    moe = biased(layer(config))
    x, target = tokens(16), tokens(16, seed=5)
    y, metrics, gradients = run_with_gradients(moe, x, target, mesh())
    placed_y, placed_metrics, placed = run_with_gradients(
        moe, x, target, mesh(), placement=dataclasses.replace(plan(1), sums=sums)
    )
    np.testing.assert_allclose(placed_y, y, rtol=1e-5, atol=1e-6)
    assert (placed_metrics.tokens_per_expert == metrics.tokens_per_expert).all()
    assert placed_metrics.num_dropped == 0
    assert_same_gradients(placed, {n: g for n, g in gradients.items() if np.abs(g).max() > 1e-3}, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"slots_per_rank": 3, "num_chunks": 2, "remat": "experts", "alignment": 4},
        {"tensor_axis": "tp", "apply_weights_to": "activation", "remat": "all"},
    ],
    ids=["plain", "chunks-remat-aligned", "tensor-axis-remat-all"],
)
def test_an_exact_balance_changes_no_value_and_drops_nothing(changes):
    """All tokens are alike, so that two experts get every row."""
    config = dataclasses.replace(CONFIG, **changes, balance="exact")
    unbalanced = dataclasses.replace(config, balance=None, slots_per_rank=None)
    moe, over = layer(unbalanced), mesh(*(["tp"] if config.tensor_axis else []))
    x, target = np.repeat(tokens(1), 16, axis=0) + 0.01 * tokens(16, seed=3), tokens(16, seed=5)
    y, metrics, gradients = run_with_gradients(moe, x, target, over)
    assert (metrics.tokens_per_expert > 0).sum() == 2
    moe.config = config
    exact_y, exact_metrics, exact = run_with_gradients(moe, x, target, over)
    np.testing.assert_allclose(exact_y, y, rtol=1e-5, atol=1e-6)
    assert exact_metrics.num_dropped == 0
    assert (exact_metrics.tokens_per_expert == metrics.tokens_per_expert).all()
    assert_same_gradients(exact, {n: g for n, g in gradients.items() if np.abs(g).max() > 1e-3}, rtol=1e-5, atol=1e-5)


def test_on_hopper():
    """The backward pass of the Hopper kernels, which keeps no rows of the experts, with rows of slots."""
    moe, x, target = biased(layer(GPT_OSS)), tokens(16), tokens(16, seed=5)
    y, _, gradients = run_with_gradients(moe, x, target, mesh())
    with plain_hopper.in_the_kernels_place():
        placed_y, _, placed = run_with_gradients(moe, x, target, mesh(), placement=plan(1))
    np.testing.assert_allclose(placed_y, y, rtol=1e-5, atol=1e-5)
    assert_same_gradients(placed, gradients)


@pytest.mark.parametrize(
    ("config", "at_once", "experts"),
    [
        (dataclasses.replace(GPT_OSS, num_experts=12), 1, [0, 1, 2]),
        (dataclasses.replace(CONFIG, num_experts=12, remat="experts", alignment=8), 2, [0, 1, 2]),
        (dataclasses.replace(CONFIG, num_experts=12, apply_weights_to="activation"), 3, [7, 8]),
    ],
    ids=["biases-one at once", "aligned-two at once", "weights in front-three at once"],
)
def test_weights_are_lent_on_hopper(config, at_once, experts, monkeypatch):
    """Ranks without rows borrow: two experts, or all of one rank (`_exact._pack`), in more rounds than one."""
    moe, x, target = biased(layer(config)), tokens(16), tokens(16, seed=5)
    chosen = np.resize(experts, 16)
    chosen = np.stack([chosen, np.roll(chosen, 1)], axis=1).astype(np.int32)
    y, _, gradients = run_with_gradients(moe, x, target, mesh(), topk_idx=chosen)
    moe.config = dataclasses.replace(config, balance="exact")
    monkeypatch.setattr(lent, "AT_ONCE", at_once)
    with plain_hopper.in_the_kernels_place():
        lent_y, metrics, lent_gradients = run_with_gradients(moe, x, target, mesh(), topk_idx=chosen)
    np.testing.assert_allclose(lent_y, y, rtol=1e-5, atol=1e-5)
    assert_same_gradients(lent_gradients, {name: g for name, g in gradients.items() if np.abs(g).max() > 1e-3})
    assert metrics.num_dropped == 0


def test_lent_weights_travel_beside_kernels():
    """The kernel of a round stands between barriers, behind the starts of the next round's fetches and in front of
    their ends."""
    moe, x = layer(dataclasses.replace(CONFIG, num_experts=12, balance="exact")), tokens(16)
    graph, state = nnx.split(moe)
    with plain_hopper.in_the_kernels_place(), jax.set_mesh(mesh()):
        program = str(jax.make_jaxpr(lambda state, x: nnx.merge(graph, state)(x)[0])(state, x))
    short = {"move_weights_start": "s", "optimization_barrier": "|", "rows_into": "k", "move_weights_done": "d"}
    order = "".join(short[name] for name in re.findall("|".join(short), program))
    assert order.count("k") == 2 and "ss|k|dd" in order and re.search(r"(?<!s)s\|k\|d(?!d)", order), order


@pytest.mark.parametrize("place", ["rows", "activation"])
def test_frozen_experts_send_no_gradients_home(place):
    """The order of a backward pass keeps no gradient that is not asked for: each of three has two starts."""
    moe = layer(dataclasses.replace(CONFIG, num_experts=12, balance="exact", apply_weights_to=place))
    graph, state = nnx.split(moe)

    def starts(argnums):
        def loss(x, state):
            return nnx.merge(graph, state)(x)[0].sum()

        program = jax.make_jaxpr(jax.grad(loss, argnums))(tokens(16), state).jaxpr
        used, _ = dce_jaxpr(program, [True] * len(program.outvars))  # as jit does
        return str(used).count("xen_moe_move_weights_start[")

    with plain_hopper.in_the_kernels_place(), jax.set_mesh(mesh()):
        assert starts((0, 1)) - starts(0) == 6


def test_vmap_moves_lent_weights_in_whole_operations():
    """A start of each entry of a batch would write the buffers of all: no start may stand apart from its done."""
    moe, x = layer(dataclasses.replace(CONFIG, num_experts=12, balance="exact")), tokens(3, 16)
    graph, state = nnx.split(moe)

    def loss(state, x):
        return jax.vmap(lambda x: nnx.merge(graph, state)(x)[0])(x).sum()

    with plain_hopper.in_the_kernels_place(), jax.set_mesh(mesh()):
        program = str(jax.make_jaxpr(jax.grad(loss))(state, x))
    assert "xen_moe_move_weights[" in program and "xen_moe_rows_into" in program
    assert not re.search("xen_moe_move_weights_(start|done)", program)


def test_vmap_of_lent_weights_is_a_loop():
    borrowed = np.array([[[1, -1], [0, 1]], [[-1, -1], [1, -1]], [[1, 0], [-1, -1]]], np.int32)  # of each entry
    own = np.arange(3 * 2 * 4, dtype=np.float32).reshape(3, 2, 2, 2)  # [entry, expert, A, B]

    def fetched(own, borrowed):
        moving = lent.Lent(own, borrowed, None, ("ep",), 2, xm.KernelConfig()).fetch(0)
        (moving,), doubled = lent.beside([moving], lambda a: 2 * a, own)
        return moving.done(), doubled

    over = make_mesh((2,), ("ep",))
    ways = {"own": ((0, None), own, borrowed[0]), "borrowed": ((None, 0), own[0], borrowed), "both": (0, own, borrowed)}
    for name, (axes, weights, experts) in ways.items():
        entries = jax.P(*[None] * (weights.ndim - 3), "ep")
        specs = {"in_specs": (entries, jax.P()), "out_specs": jax.P(None, "ep")}
        found, doubled = jax.jit(jax.shard_map(jax.vmap(fetched, axes), mesh=over, **specs))(weights, experts)
        weights, experts = np.broadcast_to(weights, own.shape), np.broadcast_to(experts, borrowed.shape)
        expected = np.stack([w[np.maximum(e.reshape(-1), 0)] for w, e in zip(weights, experts, strict=True)])
        used = experts.reshape(3, 4) >= 0
        np.testing.assert_array_equal(np.asarray(found)[used], expected[used], name)
        np.testing.assert_array_equal(doubled, 2 * weights, name)


def test_an_exact_balance_among_the_active_ranks():
    moe, x, active = layer(CONFIG), tokens(16), np.arange(RANKS) != 1
    y, metrics = run(moe, x, mesh(), active=active)
    moe.config = dataclasses.replace(CONFIG, balance="exact")
    exact_y, exact_metrics = run(moe, x, mesh(), active=active)
    np.testing.assert_allclose(exact_y, y, rtol=1e-5, atol=1e-6)
    assert exact_metrics.num_dropped == metrics.num_dropped > 0


def test_experts_at_home_on_an_inactive_rank_have_no_rows():
    """Their slots on active ranks held NaN, which every token of theirs got, and every gradient."""
    moe, x, target = layer(CONFIG), tokens(16), tokens(16, seed=5)
    active = np.arange(RANKS) != 1
    y, metrics, gradients = run_with_gradients(moe, x, target, mesh(), active=active)
    placement = xm.balance.plan(np.arange(1, E + 1), RANKS, 3, alive=active)
    placed_y, placed_metrics, placed = run_with_gradients(moe, x, target, mesh(), active=active, placement=placement)
    np.testing.assert_allclose(placed_y, y, rtol=1e-5, atol=1e-6)
    assert placed_metrics.num_dropped == metrics.num_dropped > 0
    assert_same_gradients(placed, gradients)
    with pytest.raises(ValueError, match=r"active is bool\[2\]: must be bool\[4\]"):
        run(moe, x, mesh(), active=active[:2], placement=placement)


def test_a_tensor_axis_and_linen_take_it():
    config = dataclasses.replace(CONFIG, tensor_axis="tp")
    moe, x = layer(config), tokens(16)
    over = mesh("tp")
    y, _ = run(moe, x, over)
    np.testing.assert_allclose(run(moe, x, over, placement=plan(2))[0], y, rtol=1e-5, atol=1e-6)
    with jax.set_mesh(over):
        variables = variables_of(weights_of(moe))
        out, _ = jax.jit(lambda v, x, p: linen.MoE(config).apply(v, x, placement=p))(variables, x, plan(3))
    np.testing.assert_allclose(out, y, rtol=1e-5, atol=1e-6)


def test_weights_stay_in_their_slots_and_another_plan_is_no_other_program():
    """Serving: weights are moved once for each plan, and the step has no exchange of weights."""
    moe, x = layer(CONFIG), tokens(16)
    in_slots = dataclasses.replace(CONFIG, num_slots=RANKS * 3)
    weights = weights_of(moe)
    held = {name: weights.pop(name) for name in ("gate", "up", "down")}
    expected, _ = run(moe, x, mesh())
    with jax.set_mesh(mesh()):
        graph, _ = nnx.split(MoE.from_weights(in_slots, weights | plan(0).move(held, None, plan(0))))
        step = jax.jit(lambda state, x, placement: nnx.merge(graph, state)(x, placement=placement)[0])
        old = None
        for seed in range(3):
            new = plan(seed)
            held, old = new.move(held, old, new), new
            state = nnx.split(MoE.from_weights(in_slots, weights | held))[1]
            state = jax.device_put(state, nnx.get_named_sharding(state, mesh()))
            np.testing.assert_allclose(step(state, x, new), expected, rtol=1e-5, atol=1e-6)
        assert step._cache_size() == 1
        assert "move_weights" not in str(jax.make_jaxpr(step)(state, x, new))


@pytest.mark.parametrize(
    ("config", "placement", "error", "text"),
    [
        ({}, np.zeros((RANKS, 2), int), TypeError, "placement is a ndarray"),
        ({}, xm.balance.home(E + 1, RANKS), ValueError, "placement has 9 experts, and num_experts=8"),
        ({}, xm.balance.home(E, 2), ValueError, "placement is for 2 ranks"),
        ({}, dataclasses.replace(xm.balance.home(E, RANKS), sums="node"), ValueError, "sums='node': must be one of"),
        ({"num_slots": 12}, None, ValueError, "placement is None with MoEConfig.num_slots=12"),
        ({"num_slots": 12}, xm.balance.home(E, RANKS), ValueError, "placement has 8 slots"),
        ({"token_axes": ()}, xm.balance.home(E, RANKS), ValueError, "tokens are replicated"),
        ({"balance": "exact"}, xm.balance.home(E, RANKS), ValueError, "balance='exact' with placement"),
        ({"balance": "exact", "slots_per_rank": 2}, None, ValueError, "slots_per_rank=2: must be >= 3"),
    ],
)  # fmt: skip
def test_errors(config, placement, error, text):
    moe = layer(dataclasses.replace(CONFIG, **config))
    with pytest.raises(error, match=text):
        run(moe, tokens(16), mesh(), placement=placement)


@pytest.mark.parametrize(
    "fields",
    [
        {"balance": "even"},
        {"balance": "exact", "layout": "padded"},
        {"balance": "exact", "capacity": 8},
        {"balance": "exact", "num_slots": 8},
        {"balance": "exact", "token_axes": ()},
    ],
)
def test_balance_is_checked(fields):
    with pytest.raises(ValueError, match="MoEConfig.balance"):
        dataclasses.replace(CONFIG, **fields)


@pytest.mark.parametrize("slots", [0, 2.5, 3])
def test_slots_per_rank_is_checked(slots):
    with pytest.raises(ValueError, match="MoEConfig.slots_per_rank"):
        dataclasses.replace(CONFIG, slots_per_rank=slots)


@pytest.mark.parametrize("fields", [{"num_slots": 7}, {"num_slots": 8.5}, {"num_slots": 12, "token_axes": ()}])
def test_num_slots_is_checked(fields):
    with pytest.raises(ValueError, match="MoEConfig.num_slots"):
        dataclasses.replace(CONFIG, **fields)
