"""Bad input: one mistake for each row of the table in docs/user/errors.md, which gives the expected error."""

import dataclasses
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import ROOT
from xen_moe_jax import cuda
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import reference

DOCUMENT = ROOT / "docs" / "user" / "errors.md"
RANKS, T, H, K, E = 4, 8, 128, 2, 8


# -- the mistakes: each runs inside shard_map on every rank, with a right x, topk_idx and topk_weights -----------------
def good(x, idx, weights=None, **changes):
    return xm.dispatch(x, idx, weights, **({"num_experts": E, "axis_name": "ep"} | changes))


def replicated(x, idx, **changes):
    return xm.dispatch_replicated(x, idx, **({"num_experts": E, "axis_name": "ep"} | changes))


def combined(x, idx, y=None, layout="grouped", **options):
    routed = good(x, idx, layout=layout)
    return xm.combine(routed.x if y is None else y, routed.handle, **options)


def with_handle(x, idx, **arrays):
    routed = good(x, idx)
    return xm.combine(routed.x, dataclasses.replace(routed.handle, **arrays))


def scaled(x, **changes):
    block_scaled = xm.quantize(x)
    return xm.BlockScaled(**({"values": block_scaled.values, "scales": block_scaled.scales} | changes))


def started(x, idx):
    return xm.dispatch_start(x, idx, num_experts=E, axis_name="ep")


def started_under_vmap(x, idx):
    """As on a GPU: the plain backend's operations are complete when they have started."""
    config = xm.KernelConfig(backend="reference")
    with mock.patch.object(reference.BACKEND, "supports_async", lambda spec, config: True):
        start = lambda x: xm.dispatch_start(x, idx, num_experts=E, axis_name="ep", config=config)  # noqa: E731
        return jax.vmap(start)(jnp.stack([x, x]))


def ragged(x, idx, weights, *, output=None, **changes):
    sizes = jnp.zeros(RANKS, jnp.int32)
    arguments = dict.fromkeys(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), sizes) | changes
    return xm.ragged_all_to_all(x, x if output is None else output, **arguments, axis_name="ep")


INSIDE = {
    # dispatch
    "x-rank": lambda x, i, w: good(x[0], i),
    "x-dtype": lambda x, i, w: good(x.astype(jnp.int32), i),
    "x-not-an-array": lambda x, i, w: good("tokens", i),
    "x-no-tokens": lambda x, i, w: good(x[:0], i[:0]),
    "x-scales-shape": lambda x, i, w: good(scaled(x, scales=jnp.ones((T, 3))), i),
    "x-values-dtype": lambda x, i, w: good(scaled(x, values=x), i),
    "topk-idx-rank": lambda x, i, w: good(x, i[:, 0]),
    "topk-idx-dtype": lambda x, i, w: good(x, i.astype(jnp.float32)),
    "topk-idx-tokens": lambda x, i, w: good(x, i[:3]),
    "topk-idx-dimensions": lambda x, i, w: good(x.reshape(2, 4, H), i),
    "top-k-zero": lambda x, i, w: good(x, i[:, :0]),
    "topk-weights-shape": lambda x, i, w: good(x, i, w[:, :1]),
    "topk-weights-dtype": lambda x, i, w: good(x, i, i),
    "topk-idx-cannot-name-expert-256": lambda x, i, w: good(x, i.astype(jnp.uint8), num_experts=257),
    "topk-idx-cannot-name-expert-128": lambda x, i, w: good(x, i.astype(jnp.int8), num_experts=129),
    "topk-idx-cannot-name-expert-start": lambda x, i, w: xm.dispatch_start(
        x, i.astype(jnp.uint8), num_experts=300, axis_name="ep"
    ),
    "num-experts-zero": lambda x, i, w: good(x, i, num_experts=0),
    "num-experts-negative": lambda x, i, w: good(x, i, num_experts=-8),
    "num-experts-traced": lambda x, i, w: good(x, i, num_experts=i[0, 0]),
    "num-experts-float": lambda x, i, w: good(x, i, num_experts=8.0),
    "capacity-negative": lambda x, i, w: good(x, i, capacity=-1),
    "capacity-padded": lambda x, i, w: good(x, i, capacity=16, layout="padded"),
    "capacity-too-many-rows": lambda x, i, w: good(x, i, capacity=2**31),
    "alignment-zero": lambda x, i, w: good(x, i, alignment=0),
    "alignment-ranked": lambda x, i, w: good(x, i, alignment=8, layout="ranked"),
    "drop-unknown": lambda x, i, w: good(x, i, w, drop="random"),
    "drop-weight-without-weights": lambda x, i, w: good(x, i, capacity=4, drop="weight"),
    "layout-unknown": lambda x, i, w: good(x, i, layout="sorted"),
    "layout-type": lambda x, i, w: good(x, i, layout=np.arange(2)),
    "active-shape": lambda x, i, w: good(x, i, active=jnp.ones(3, bool)),
    "placement-type": lambda x, i, w: good(x, i, placement=np.zeros((RANKS, 2), int)),
    "placement-experts": lambda x, i, w: good(x, i, placement=xm.balance.home(E + 1, RANKS)),
    "placement-ranks": lambda x, i, w: good(x, i, placement=xm.balance.home(E, 2)),
    "active-dtype": lambda x, i, w: good(x, i, active=jnp.ones(RANKS)),
    "wire-unknown": lambda x, i, w: good(x, i, wire="float4"),
    "wire-scale-format": lambda x, i, w: good(x, i, wire="int8:bf16"),
    "wire-object": lambda x, i, w: good(x, i, wire=xm.Wire("int4")),
    "wire-object-scale-format": lambda x, i, w: good(x, i, wire=xm.Wire("int8", "bf16")),
    "wire-of-block-scaled": lambda x, i, w: good(scaled(x), i, wire="int8"),
    "axis-unknown": lambda x, i, w: good(x, i, axis_name="expert"),
    "axis-three": lambda x, i, w: good(x, i, axis_name=("a", "b", "c")),
    "config-type": lambda x, i, w: good(x, i, config={"num_sms": 8}),
    "gradient-wire": lambda x, i, w: good(x, i, gradient_wire="bf8"),
    "backend-not-here-cuda": lambda x, i, w: good(x, i, config=xm.KernelConfig(backend="cuda")),
    "backend-not-here-pallas": lambda x, i, w: good(x, i, config=xm.KernelConfig(backend="pallas")),
    "ranks-per-node": lambda x, i, w: good(x, i, config=xm.KernelConfig(ranks_per_node=3)),
    # combine and redispatch
    "placement-of-combine-alone": lambda x, i, w: combined(x, i, placement=xm.balance.home(E, RANKS)),
    "placement-of-combine-slots": lambda x, i, w: xm.combine(
        (r := good(x, i, placement=xm.balance.home(E, RANKS))).x,
        r.handle,
        placement=xm.balance.plan(np.ones(E), RANKS, 3),
    ),
    "y-rows": lambda x, i, w: combined(x, i, y=x),
    "y-layout": lambda x, i, w: combined(x, i, y=jnp.ones((2, RANKS * T, H))),
    "y-dtype": lambda x, i, w: combined(x, i, y=jnp.ones((RANKS * T * K, H), jnp.int32)),
    "y-block-scaled": lambda x, i, w: combined(x, i, y=scaled(jnp.ones((RANKS * T * K, H)))),
    "weighted-ranked": lambda x, i, w: combined(x, i, layout="ranked", weighted=True),
    "weighted-type": lambda x, i, w: combined(x, i, weighted="yes"),
    "weighted-array": lambda x, i, w: combined(x, i, weighted=np.ones(2, bool)),
    "handle-type": lambda x, i, w: xm.combine(x, good(x, i)),
    "handle-shape": lambda x, i, w: with_handle(x, i, positions=jnp.zeros((RANKS, T), jnp.int32)),
    "handle-dtype": lambda x, i, w: with_handle(x, i, recv_counts=jnp.zeros((RANKS, E // RANKS))),
    "handle-weights": lambda x, i, w: with_handle(x, i, weights=jnp.ones(3)),
    "handle-not-an-array": lambda x, i, w: with_handle(x, i, topk_idx=None),
    "redispatch-tokens": lambda x, i, w: xm.redispatch(x[:3], good(x, i).handle),
    "redispatch-dimensions": lambda x, i, w: xm.redispatch(
        x.reshape(4, 2, H), good(x.reshape(2, 4, H), i.reshape(2, 4, K)).handle
    ),
    "redispatch-block-scaled": lambda x, i, w: xm.redispatch(scaled(x), good(x, i).handle),
    "done-of-another-flight": lambda x, i, w: xm.combine_done(started(x, i)),
    "done-of-no-flight": lambda x, i, w: xm.dispatch_done(good(x, i)),
    "done-twice": lambda x, i, w: [xm.dispatch_done(flight) for flight in [started(x, i)] * 2],
    "overlap-no-flight": lambda x, i, w: xm.overlap(x, jnp.sin, x),
    "overlap-no-array": lambda x, i, w: xm.overlap(started(x, i), lambda: x),
    "overlap-no-work": lambda x, i, w: xm.overlap(started(x, i), x, x),
    # tokens that every rank has
    "replicated-layout": lambda x, i, w: replicated(x, i, layout="ranked"),
    "replicated-alignment": lambda x, i, w: replicated(x, i, layout="padded", alignment=8),
    "replicated-topk-idx-tokens": lambda x, i, w: replicated(x, i[:3]),
    "replicated-handle": lambda x, i, w: xm.combine_replicated(good(x, i).x, good(x, i).handle),
    "replicated-handle-of-combine": lambda x, i, w: xm.combine(replicated(x, i).x, replicated(x, i).handle),
    "replicated-y": lambda x, i, w: xm.combine_replicated(x, replicated(x, i).handle),
    "replicated-weighted": lambda x, i, w: xm.combine_replicated(
        replicated(x, i).x, replicated(x, i).handle, weighted="yes"
    ),
    # transformations
    "vmap-flight": lambda x, i, w: started_under_vmap(x, i),
    "gradient-of-block-scaled": lambda x, i, w: jax.grad(
        lambda s: good(xm.BlockScaled(scaled(x).values, s), i).x.scales.sum()
    )(scaled(x).scales),
    # drop-ins
    "all-to-all-not-divisible": lambda x, i, w: xm.all_to_all(x[:6], "ep", 0, 0, tiled=True),
    "all-to-all-not-ranks": lambda x, i, w: xm.all_to_all(x, "ep", 0, 0),
    "all-to-all-axis": lambda x, i, w: xm.all_to_all(x, "ep", 2, 0, tiled=True),
    "all-to-all-groups": lambda x, i, w: xm.all_to_all(x, "ep", 0, 0, axis_index_groups=[[0, 1], [2]], tiled=True),
    "all-to-all-group-entry": lambda x, i, w: xm.all_to_all(x, "ep", 0, 0, axis_index_groups=[[0.5]], tiled=True),
    "ragged-over-vmap": lambda x, i, w: jax.vmap(
        lambda x: xm.ragged_all_to_all(x, x, *[jnp.zeros(2, jnp.int32)] * 4, axis_name="batch"), axis_name="batch"
    )(jnp.stack([x, x])),
    "ragged-trailing-shape": lambda x, i, w: ragged(x, i, w, output=x[:, :5]),
    "ragged-dtype": lambda x, i, w: ragged(x, i, w, output=x.astype(jnp.bfloat16)),
    "ragged-sizes-shape": lambda x, i, w: ragged(x, i, w, send_sizes=jnp.zeros(3, jnp.int32)),
    "ragged-sizes-differ": lambda x, i, w: ragged(x, i, w, send_sizes=jnp.zeros(2 * RANKS, jnp.int32)),
    "ragged-sizes-dtype": lambda x, i, w: ragged(x, i, w, recv_sizes=jnp.zeros(RANKS)),
}


# -- the mistakes that need no shard_map -------------------------------------------------------------------------------
def tokens():
    return jnp.ones((T, H))


def slots(dtype=jnp.int32):
    return jnp.zeros((T, K), dtype)


def lowered(f, mesh, axis, *arrays):
    specs = P(mesh.axis_names)
    return jax.jit(jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=specs)).lower(*arrays)


def combine_with_a_handle_over(axis_name, axis_sizes, mesh):
    """Combine on `mesh` with a handle that was made over another axis or another number of ranks."""
    spec = Spec(axis_name, axis_sizes, num_experts=E, num_tokens=T, top_k=K, layout="ranked", capacity=6)
    ranks = axis_sizes[0]

    def body(y, idx):
        counts, weights = jnp.zeros((ranks, spec.local_experts), jnp.int32), jnp.ones((6, K))
        return xm.combine(y, xm.Handle(idx, jnp.zeros((ranks, T, 1), jnp.int32), counts, weights, spec))

    (name,) = mesh.axis_names
    arrays = jnp.ones((6 * RANKS, H)), jnp.zeros((T * RANKS, K), jnp.int32)
    lowered(body, mesh, name, *jax.device_put(arrays, jax.NamedSharding(mesh, P(name))))


def exported_for(mesh, *platforms):
    specs = P("ep")
    program = jax.jit(jax.shard_map(lambda x, i: good(x, i).x, mesh=mesh, in_specs=specs, out_specs=specs))
    arrays = jnp.ones((RANKS * T, H)), jnp.zeros((RANKS * T, K), jnp.int32)
    jax.export.export(program, platforms=platforms)(*jax.device_put(arrays, jax.NamedSharding(mesh, specs)))


OUTSIDE = {
    "several-platforms": lambda mesh: exported_for(mesh, "cpu", "tpu"),
    "outside-shard-map": lambda mesh: good(tokens(), slots()),
    "outside-shard-map-jit": lambda mesh: jax.jit(lambda x: good(x, slots()))(tokens()),
    "replicated-outside": lambda mesh: replicated(tokens(), slots()),
    "handle-other-axis": lambda mesh: combine_with_a_handle_over(("data",), (RANKS,), mesh),
    "handle-other-size": lambda mesh: combine_with_a_handle_over(("ep",), (2,), mesh),
    "backend-unknown": lambda mesh: xm.KernelConfig(backend="triton"),
    "mode-unknown": lambda mesh: xm.KernelConfig(mode="fast"),
    "num-sms": lambda mesh: xm.KernelConfig(num_sms=0),
    "num-sms-float": lambda mesh: xm.KernelConfig(num_sms=8.0),
    "interpret": lambda mesh: xm.KernelConfig(interpret="yes"),
    "collective-id": lambda mesh: xm.KernelConfig(collective_id=-1),
    "channel": lambda mesh: xm.KernelConfig(channel=99),
    "ranks-per-node-zero": lambda mesh: xm.KernelConfig(ranks_per_node=0),
    "hint-ranks-per-node": lambda mesh: xm.buffer_size_hint(num_tokens=T, hidden=H, num_ranks=4, ranks_per_node=3),
    "timeout": lambda mesh: xm.KernelConfig(timeout_s=-1.0),
    "quantize-dtype": lambda mesh: xm.quantize(jnp.ones((4, 128), jnp.int32)),
    "quantize-not-an-array": lambda mesh: xm.quantize("tokens"),
    "quantize-wire": lambda mesh: xm.quantize(tokens(), dtype="float4"),
    "quantize-scale-format": lambda mesh: xm.quantize(tokens(), scale_format="e5m2"),
    "quantize-scalar": lambda mesh: xm.quantize(jnp.float32(1)),
    "dequantize-type": lambda mesh: xm.dequantize(tokens()),
    "dequantize-not-arrays": lambda mesh: xm.dequantize(xm.BlockScaled(1, 2)),
    "dequantize-values": lambda mesh: xm.dequantize(xm.BlockScaled(tokens(), jnp.ones((T, 1)))),
    "dequantize-dtype": lambda mesh: xm.dequantize(xm.quantize(tokens()), "int32"),
    "dequantize-scales": lambda mesh: xm.dequantize(xm.BlockScaled(jnp.zeros((T, 256), jnp.int8), jnp.ones((T, 1)))),
    "layout-ranks-per-node": lambda mesh: xm.get_dispatch_layout(slots(), num_experts=E, num_ranks=4, ranks_per_node=3),
    "router-k": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 9),
    "router-score": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2, score="tanh"),
    "router-bias": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2, bias=jnp.ones(3)),
    "router-k-float": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2.0),
    "router-groups-float": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, num_groups=4.0),
    "router-groups": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, num_groups=3),
    "layout-narrow-indices": lambda mesh: xm.get_dispatch_layout(slots(jnp.uint8), num_experts=257, num_ranks=4),
    "router-narrow-indices": lambda mesh: xm.routing.chosen_weights(jnp.ones((T, 257)), slots(jnp.uint8)),
    "router-weights-tokens": lambda mesh: xm.routing.chosen_weights(jnp.ones((T + 1, E)), slots()),
    "router-weights-score": lambda mesh: xm.routing.chosen_weights(jnp.ones((T, E)), slots(), score="tanh"),
    "router-group-best": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, group_best=0),
    "router-min-sum": lambda mesh: xm.routing.chosen_weights(jnp.ones((T, E)), slots(), normalize=True, min_sum=-1.0),
    "router-min-sum-score": lambda mesh: xm.routing.chosen_weights(jnp.ones((T, E)), slots(), min_sum=1e-12),
    "router-eps": lambda mesh: xm.routing.sparsemixer_weights(jnp.ones((T, E)), slots(), float("nan")),
    "router-group-score": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, score="tanh"),
    "router-group-size": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 3, num_groups=4, topk_groups=1),
    "buffer-axis": lambda mesh: xm.Buffer(mesh, "expert", num_tokens=T, hidden=H),
    "buffer-mesh": lambda mesh: xm.Buffer(None, "ep", num_tokens=T, hidden=H),
    "buffer-size": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, size_bytes=-1),
    "buffer-channel": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, channel=16),
    "buffer-dtype": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, dtype="float7"),
    "buffer-backend": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, backend="nccl"),
    "hint-dtype": lambda mesh: xm.buffer_size_hint(num_tokens=T, hidden=H, num_ranks=4, dtype="complex64"),
    "hint-backend": lambda mesh: xm.buffer_size_hint(num_tokens=T, hidden=H, num_ranks=4, backend="triton"),
    "buffer-size-hint": lambda mesh: xm.buffer_size_hint(num_tokens=0, hidden=H, num_ranks=4),
    "reset-timeout": lambda mesh: cuda.reset(timeout_s=0),
}


# -- the table ---------------------------------------------------------------------------------------------------------
def read_table() -> dict[str, tuple[type, list[str]]]:
    """Rows `| id | mistake | error | the message says |` of docs/user/errors.md."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 4 and (match := re.fullmatch(r"`([\w-]+)`", cells[0])):
            name, says = match[1], re.findall(r"`([^`]+)`", cells[3])
            assert name not in rows and says, line
            error = {"ValueError": ValueError, "TypeError": TypeError, "NotImplementedError": NotImplementedError}
            rows[name] = error[cells[2].strip("`")], says
    return rows


TABLE = read_table()


def test_every_row_of_the_table_has_a_test_and_every_test_a_row():
    assert set(TABLE) == INSIDE.keys() | OUTSIDE.keys()
    assert not INSIDE.keys() & OUTSIDE.keys()


def check(name, error):
    wanted, says = TABLE[name]
    assert type(error.value) is wanted, f"{type(error.value).__name__}: {error.value}"
    for fragment in says:
        assert fragment in str(error.value), f"{fragment!r} is not in: {error.value}"


@pytest.mark.parametrize("name", INSIDE)
def test_mistake(mesh4, name):
    def body(x, idx, weights):
        return jnp.zeros(1) + sum(jnp.sum(leaf) * 0 for leaf in jax.tree.leaves(INSIDE[name](x, idx, weights)))

    arrays = jnp.ones((RANKS * T, H)), jnp.zeros((RANKS * T, K), jnp.int32), jnp.ones((RANKS * T, K))
    with pytest.raises(Exception) as error:
        lowered(body, mesh4, "ep", *jax.device_put(arrays, jax.NamedSharding(mesh4, P("ep"))))
    check(name, error)


@pytest.mark.parametrize("name", OUTSIDE)
def test_mistake_outside(mesh4, name):
    with pytest.raises(Exception) as error:
        OUTSIDE[name](mesh4)
    check(name, error)


def test_right_arguments_raise_nothing(mesh4):
    """The frame that the mistakes share is itself right: otherwise any row could pass for the wrong reason."""
    arrays = jnp.ones((RANKS * T, H)), jnp.zeros((RANKS * T, K), jnp.int32), jnp.ones((RANKS * T, K))
    arrays = jax.device_put(arrays, jax.NamedSharding(mesh4, P("ep")))
    for body in (
        lambda x, i, w: combined(x, i),
        lambda x, i, w: good(scaled(x), i, w).x.scales,
        lambda x, i, w: ragged(x, i, w),
        lambda x, i, w: xm.redispatch(x, good(x, i).handle),
        lambda x, i, w: xm.all_to_all(x, "ep", 0, 0, axis_index_groups=[[0, 1], [2, 3]], tiled=True),
    ):
        lowered(body, mesh4, "ep", *arrays)


# -- inputs that are no mistakes ---------------------------------------------------------------------------------------
def test_inputs_that_are_not_mistakes(mesh4):
    """Hidden size 0, capacity 0, slots out of range, integer widths, NumPy arrays, weights of another float type."""
    x = np.ones((RANKS * T, H), np.float32)
    idx = np.full((RANKS * T, K), 2**31 - 1, np.int32)
    idx[::2] = -(2**31)

    def body(x, idx, weights, empty):
        routed = good(x, idx.astype(jnp.int16), weights.astype(jnp.bfloat16), capacity=0)
        out = xm.combine(routed.x, routed.handle)
        routed = good(empty, idx, weights)
        return out, xm.combine(routed.x, routed.handle)

    specs = P("ep")
    program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=specs, out_specs=specs))
    arrays = (x, idx, np.ones((RANKS * T, K), np.float32), np.ones((RANKS * T, 0), np.float32))
    out, empty = program(*jax.device_put(arrays, jax.NamedSharding(mesh4, specs)))
    assert not np.asarray(out).any() and empty.shape == (RANKS * T, 0)
