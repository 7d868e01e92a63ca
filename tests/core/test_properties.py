"""Properties over drawn routings: against the oracle, and laws that need no oracle."""

import functools

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.checks import assert_bits

RANKS, T, H = 4, 5, 16

# layout, experts, slots, capacity, alignment, wire: each is compiled once for all drawn routings
SHAPES = (
    ("grouped", 8, 3, None, 1, None),
    ("grouped", 7, 2, 9, 4, None),
    ("grouped", 3, 2, 4, 1, "float8_e4m3fn"),
    ("ranked", 6, 4, 7, 1, None),
    ("padded", 5, 3, None, 1, "int8"),
)


@functools.cache
def program(shape):
    layout, experts, _, capacity, alignment, wire = shape
    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS])

    def body(x, idx, weights):
        x, idx, weights = x[0], idx[0], weights[0]
        routed = xm.dispatch(
            x,
            idx,
            weights,
            num_experts=experts,
            axis_name="ep",
            layout=layout,
            capacity=capacity,
            alignment=alignment,
            wire=wire,
        )
        out = xm.combine(routed.x, routed.handle, wire=wire)
        return jax.tree.map(lambda a: a[None], (routed, out))

    compiled = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))
    sharding = jax.NamedSharding(mesh, P("ep"))
    return lambda *arrays: jax.tree.map(np.asarray, compiled(*jax.device_put(arrays, sharding)))


@st.composite
def routings(draw, experts, top_k):
    """Slots of all ranks: any expert, duplicates, unused and out-of-range entries, whole ranks without tokens."""
    inside = st.integers(0, experts - 1)
    outside = st.sampled_from([-1, -(2**31), experts, 2**31 - 1])
    idx = draw(hnp.arrays(np.int32, (RANKS, T, top_k), elements=st.one_of(inside, inside, outside)))
    for rank in draw(st.sets(st.integers(0, RANKS - 1), max_size=2)):
        idx[rank] = -1
    return idx


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-E{s[1]}-K{s[2]}-C{s[3]}")
@given(data=st.data())
def test_any_routing_equals_the_oracle(shape, data):
    layout, experts, top_k, capacity, alignment, wire = shape
    idx = data.draw(routings(experts, top_k))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    x = rng.standard_normal((RANKS, T, H)).astype(ml_dtypes.bfloat16)
    weights = rng.standard_normal(idx.shape).astype(np.float32)
    routed, out = program(shape)(x, idx, weights)
    expected = oracle.dispatch(
        x, idx, weights, num_experts=experts, layout=layout, capacity=capacity, alignment=alignment, wire=wire
    )
    assert_bits(routed.x, expected.rows, "rows", where=expected.specified)
    assert_bits(routed.handle.positions, expected.positions, "positions")
    assert_bits(routed.num_tokens_per_expert, expected.num_tokens_per_expert, "num_tokens_per_expert")
    assert_bits(routed.num_dropped, expected.num_dropped, "num_dropped")
    if layout == "grouped":
        assert_bits(routed.group_sizes, expected.group_sizes, "group_sizes")
    combined = oracle.combine(routed.x, expected, weighted=layout != "ranked", wire=wire)
    assert_bits(out, combined, "combined")
    check_laws(routed, idx, experts, capacity)


def check_laws(routed, idx, experts, capacity):
    """Every used slot has exactly one row, and nothing else has one."""
    used = (idx >= 0) & (idx < experts)
    positions = routed.handle.positions  # [holder, source, token, slot]
    if positions.shape[-1] == idx.shape[-1]:
        assert ((positions != -1).sum(axis=0) == used).all()
    for rank in range(RANKS):
        held = positions[rank][positions[rank] >= 0]
        assert len(set(held.tolist())) == held.size, "two slots share a row"
        assert routed.num_dropped[rank] == (positions[rank] == -2).sum()
        if capacity is not None and positions.shape[-1] == idx.shape[-1]:
            assert routed.num_tokens_per_expert[rank].sum() == held.size <= capacity
    arrived = routed.handle.recv_counts.sum()
    assert arrived == (positions != -1).sum()


@given(
    idx=hnp.arrays(np.int32, (6, 3), elements=st.integers(-2, 14)),
    experts=st.integers(1, 13),
    nodes=st.sampled_from([(4, None), (4, 2), (6, 3), (1, 1), (5, None)]),
)
def test_dispatch_layout_equals_the_oracle(idx, experts, nodes):
    ranks, per_node = nodes
    actual = xm.get_dispatch_layout(idx, num_experts=experts, num_ranks=ranks, ranks_per_node=per_node)
    expected = oracle.dispatch_layout(idx, experts, ranks, per_node)
    assert_bits(actual.num_tokens_per_rank, expected.num_tokens_per_rank, "num_tokens_per_rank")
    assert_bits(actual.num_tokens_per_expert, expected.num_tokens_per_expert, "num_tokens_per_expert")
    assert_bits(actual.is_token_in_rank, expected.is_token_in_rank, "is_token_in_rank")
    if per_node is None:
        assert actual.num_tokens_per_node is None
    else:
        assert_bits(actual.num_tokens_per_node, expected.num_tokens_per_node, "num_tokens_per_node")


# Subnormals are left out: XLA flushes them to zero on CPU.
NUMBERS = st.floats(width=32, allow_subnormal=False, allow_nan=True, allow_infinity=True)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8"])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
@given(
    x=hnp.arrays(np.float32, st.sampled_from([(2, 130), (1, 128)]), elements=NUMBERS, fill=st.floats(-2, 2, width=32))
)
def test_quantize_equals_the_oracle(jit, wire, scale_format, x):
    x = np.where(np.abs(x) < 2.0**-120, 0, x).astype(np.float32)
    quantize = functools.partial(xm.quantize, dtype=wire, scale_format=scale_format)
    scaled = jax.tree.map(np.asarray, (quantize_jit(wire, scale_format) if jit else quantize)(x))
    values, scales = oracle.quantize(x, wire, scale_format)
    assert_bits(scaled.scales, scales, "scales", any_nan=True)
    assert_bits(scaled.values, values, "values")
    back = np.asarray(xm.dequantize(scaled, jnp.float32))
    assert_bits(back, oracle.dequantize(values, scales), "dequantized", any_nan=True)


@functools.cache
def quantize_jit(wire, scale_format):
    return jax.jit(functools.partial(xm.quantize, dtype=wire, scale_format=scale_format))


@given(x=hnp.arrays(np.float32, (3, 200), elements=st.floats(-(2.0**20), 2.0**20, width=32)))
def test_quantization_error_is_bounded(x):
    """Half a step of int8; of fp8 2**-4 relative (three mantissa bits) or half its smallest step."""
    x = np.where(np.abs(x) < 2.0**-60, 0, x).astype(np.float32)
    for wire, relative, steps in (("int8", 0, 0.5001), ("float8_e4m3fn", 2.0**-4, 2.0**-10)):
        scaled = xm.quantize(x, wire)
        scales = np.repeat(np.asarray(scaled.scales), 128, axis=-1)[:, :200]
        error = np.abs(np.asarray(xm.dequantize(scaled, jnp.float32)) - x)
        assert (error <= np.abs(x) * relative * 1.001 + scales * steps + 2.0**-100).all()


@pytest.mark.parametrize(("wire", "qmax"), [("float8_e4m3fn", 448.0), ("int8", 127.0)])
def test_power_of_two_scales_at_the_edge(wire, qmax):
    """`2**ceil(log2(amax / qmax))`: exact where the ratio is a power of two, the next one right above it."""
    amax = np.array([qmax * 4, np.nextafter(np.float32(qmax * 4), np.float32(np.inf)), qmax / 2], np.float32)
    scales = np.asarray(xm.quantize(amax[:, None], wire, "ue8m0").scales)[:, 0]
    assert scales.tolist() == [4.0, 8.0, 0.5]
