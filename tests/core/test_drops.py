"""Rules for dropped rows: drawn routings against the oracle, gradients against a dense model that lacks the same rows,
and the results that no rule may change. The tables of `tests/support` run the rules on every backend."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits
from tests.support.gradient_model import (
    EXPERTS,
    RANKS,
    TOKENS,
    assert_close,
    assert_gradients_close,
    dense_moe,
    ep_moe,
    model,
    place,
    sharded,
)
from xen_moe_jax import _drops
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.cuda.gather import gather_by
from xen_moe_jax.backends.reference.dispatch import dispatch as reference_dispatch

R, T, H = 4, 5, 8

# layout, experts, slots, capacity, alignment, drop: each is compiled once for all drawn routings
SHAPES = (
    ("grouped", 8, 3, 6, 1, "source"),
    ("grouped", 11, 2, 9, 4, "source"),
    ("grouped", 11, 2, 9, 4, "weight"),
    ("grouped", 3, 2, 4, 1, "weight"),
    ("ranked", 6, 4, 7, 1, "weight"),
    ("padded", 2, 3, None, 1, "weight"),
    ("grouped", 5, 3, None, 3, "source"),  # only tokens that name an expert twice overflow
)


@functools.cache
def program(shape):
    layout, experts, _, capacity, alignment, drop = shape
    options = {"num_experts": experts, "axis_name": "ep", "layout": layout, "capacity": capacity}
    mesh = jax.make_mesh((R,), ("ep",), devices=jax.devices()[:R])

    def body(x, idx, weights):
        routed = xm.dispatch(x[0], idx[0], weights[0], alignment=alignment, drop=drop, **options)
        return jax.tree.map(lambda a: a[None], (routed, xm.combine(routed.x, routed.handle)))

    compiled = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    sharding = jax.NamedSharding(mesh, P("ep"))
    return lambda *arrays: jax.tree.map(np.asarray, compiled(*jax.device_put(arrays, sharding)))


AWKWARD = (0.0, -0.0, np.nan, -np.nan, np.inf, -np.inf, 1e-42, -1e-42, 0.5, 0.5, 0.25, -0.25)
"""Router weights: both zeros, NaNs, infinities, denormal numbers, equal and negative ones."""


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "-".join(map(str, s)))
@given(data=st.data())
def test_any_routing_equals_the_oracle(shape, data):
    layout, experts, top_k, capacity, alignment, drop = shape
    idx = data.draw(hnp.arrays(np.int32, (R, T, top_k), elements=st.integers(-1, experts)))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    x = rng.standard_normal((R, T, H)).astype(np.float32)
    weights = rng.standard_normal(idx.shape).astype(np.float32)
    if layout != "ranked" and data.draw(st.booleans()):  # a sum of awkward numbers is another matter
        weights = rng.choice(np.array(AWKWARD, np.float32), idx.shape)
    routed, out = program(shape)(x, idx, weights)
    sizes = {"num_experts": experts, "layout": layout, "capacity": capacity, "alignment": alignment}
    expected = oracle.dispatch(x, idx, weights, drop=drop, **sizes)
    assert_bits(routed.handle.topk_idx, expected.topk_idx, "handle.topk_idx")
    assert_bits(routed.num_dropped, expected.num_dropped, "num_dropped")
    assert_bits(routed.num_tokens_per_expert, expected.num_tokens_per_expert, "num_tokens_per_expert")
    assert_bits(routed.x, expected.rows, "rows", where=expected.specified)
    if np.isfinite(weights).all():
        assert_bits(out, oracle.combine(routed.x, expected, weighted=layout != "ranked"), "combined")
    # laws that need no oracle: every row that was sent has a place, and every other one is counted
    if layout != "ranked":
        sent = ((idx >= 0) & (idx < experts)).sum()
        assert sent == (routed.handle.positions >= 0).sum() + routed.num_dropped.sum()
    assert not (routed.handle.positions == -2).any()


@pytest.mark.parametrize("alignment", [1, 4])
def test_source_takes_what_a_clamped_cumulative_sum_takes(alignment):
    """The rule that MaxText's all-to-all follows with a `ragged_buffer_factor`: the rows that all ranks up to a source
    send to a receiver are clamped at its buffer. An alignment can only take less, and fills the buffer up to its
    padding."""
    rng = np.random.default_rng(0)
    spec = Spec(("ep",), (6,), 6 * 5, 8, 4, "grouped", 25, alignment)
    for _ in range(20):
        counts = rng.integers(0, 4, (6, 6, 5)) * (rng.random((6, 6, 5)) < 0.7)
        taken = np.asarray(_drops.rows_taken(jnp.asarray(counts, jnp.int32), spec))
        by_source = np.diff(np.minimum(np.cumsum(counts.sum(2), axis=0), 25), axis=0, prepend=0)
        assert (taken.sum(2) == by_source).all() if alignment == 1 else (taken.sum(2) <= by_source).all()
        groups = -(-taken.sum(0) // alignment) * alignment
        assert (groups.sum(1) < 25 + alignment).all()
        assert taken.sum() < counts.sum()


LAYOUT_RULES = (("grouped", "source", 1), ("grouped", "weight", 8), ("ranked", "weight", 1))


@pytest.mark.parametrize(("layout", "drop", "alignment"), LAYOUT_RULES)
def test_gradients_are_those_of_the_dense_model_without_the_rows(mesh4, layout, drop, alignment):
    x, idx, weights, w_in, w_out = model()
    capacity = 20
    stacked = idx.reshape(RANKS, TOKENS, -1)
    kept, lost = oracle.keep_rows(
        oracle.sanitize(stacked, EXPERTS), weights.reshape(stacked.shape), EXPERTS, layout, capacity, alignment, drop
    )
    assert (lost > 0).sum() >= 2
    kept = kept.reshape(idx.shape)
    options = {"capacity": capacity, "drop": drop} | ({"alignment": alignment} if alignment > 1 else {})
    ep = sharded(functools.partial(ep_moe, layout, **options), mesh4)

    def ep_loss(x, weights, w_in, w_out, idx):
        return jnp.sum(jnp.sin(ep(x, idx, weights, w_in, w_out)))

    def dense_loss(x, weights, w_in, w_out):
        return jnp.sum(jnp.sin(dense_moe(x, kept, weights, w_in, w_out)))

    with jax.default_matmul_precision("highest"):
        actual = jax.jit(jax.grad(ep_loss, (0, 1, 2, 3)))(*place(mesh4, x, weights, w_in, w_out, idx))
        expected = jax.grad(dense_loss, (0, 1, 2, 3))(x, weights, w_in, w_out)
        assert_close(ep(*place(mesh4, x, idx, weights, w_in, w_out)), dense_moe(x, kept, weights, w_in, w_out), "out")
    assert_gradients_close(actual, expected)
    assert (np.asarray(actual[1])[kept < 0] == 0).all()


def traced(mesh, f, *arrays):
    return str(jax.make_jaxpr(jax.shard_map(f, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(*arrays))


def test_nothing_is_added_where_positions_decide(mesh4):
    """The program of the default rule is that of a call without `drop`, and so is a program in which nothing can
    overflow."""
    x, idx, weights = place(mesh4, *model()[:3])

    def program(**options):
        def body(x, idx, weights):
            return xm.dispatch(x, idx, weights, num_experts=EXPERTS, axis_name="ep", **options).x

        return traced(mesh4, body, x, idx, weights)

    assert program(capacity=9) == program(capacity=9, drop="position")
    assert "keep_rows" in program(capacity=9, drop="source") and "keep_rows" in program(capacity=9, drop="weight")
    for drop in ("source", "weight"):
        assert program(drop=drop) == program()  # K <= L: the worst case holds every row
        assert program(drop=drop, alignment=8) == program(alignment=8)
        assert program(layout="ranked", drop=drop) == program(layout="ranked")
    assert program(layout="ranked", capacity=9, drop="source") == program(layout="ranked", capacity=9)


@pytest.mark.parametrize("drop", ["source", "weight"])
def test_start_done_and_remat_choose_once(mesh4, drop):
    """Start and done drop the same rows; and a remat policy that keeps the handle does not gather again."""
    placed = place(mesh4, *model()[:3])
    options = {"num_experts": EXPERTS, "axis_name": "ep", "capacity": 20, "drop": drop, "alignment": 2}

    def whole(x, idx, weights):
        routed = xm.dispatch(x, idx, weights, **options)
        return xm.combine(jnp.sin(routed.x), routed.handle), routed.num_dropped[None]

    def halves(x, idx, weights):
        routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, **options))
        out = xm.combine_done(xm.combine_start(jnp.sin(routed.x), routed.handle))
        return out, routed.num_dropped[None]

    for one, other in zip(sharded(whole, mesh4)(*placed), sharded(halves, mesh4)(*placed), strict=True):
        assert_bits(one, other, "halves")
    policy = jax.checkpoint_policies.save_only_these_names("xen_moe_rows", "xen_moe_handle")

    def loss(x, idx, weights):
        out = jax.checkpoint(lambda x, weights: whole(x, idx, weights)[0], policy=policy)(x, weights)
        return jax.lax.psum(jnp.sum(out**2), "ep")

    mapped = jax.shard_map(loss, mesh=mesh4, in_specs=P("ep"), out_specs=P())
    program = str(jax.make_jaxpr(jax.grad(mapped, (0, 2)))(*placed))
    assert program.count("xen_moe_keep_rows[") == 1


@pytest.mark.parametrize("active", [None, (True, False, True, True)], ids=["every rank", "one is inactive"])
@pytest.mark.parametrize("size", [3, 2500])
def test_words_gathered_by_a_dispatch(mesh4, active, size):
    """Gathers words by a dispatch, as a backend does that must not wait for inactive ranks; here with the reference's
    dispatch."""
    spec = Spec(("ep",), (RANKS,), EXPERTS, TOKENS, 2, "grouped", 8)
    words = np.random.default_rng(3).integers(-(2**31), 2**31, (RANKS, size), np.int64).astype(np.int32)
    mask = np.ones(RANKS, bool) if active is None else np.array(active)

    def dispatch(call, *operands):
        *operands, given = operands
        assert given.ndim == (active is not None)
        return reference_dispatch(call, *operands)

    def body(words):
        operand = np.True_ if active is None else jnp.asarray(mask)
        return gather_by(dispatch, Call(spec, xm.KernelConfig()), words[0], operand)[None]

    mapped = jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    found = np.asarray(jax.jit(mapped)(*place(mesh4, words)))
    assert_bits(found[mask], np.broadcast_to(np.where(mask[:, None], words, 0), found.shape)[mask], "gathered")
    assert not found[~mask].any()
