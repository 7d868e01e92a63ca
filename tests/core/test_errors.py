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
    """Starts a dispatch as a GPU does; the plain backend's operations are complete when they have started."""
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
    "`x` is a single token": lambda x, i, w: good(x[0], i),
    "`x` is not a float array": lambda x, i, w: good(x.astype(jnp.int32), i),
    "`x` is not an array": lambda x, i, w: good("tokens", i),
    "no tokens at all": lambda x, i, w: good(x[:0], i[:0]),
    "scales of a `BlockScaled` do not match its values": lambda x, i, w: good(scaled(x, scales=jnp.ones((T, 3))), i),
    "values of a `BlockScaled` are not quantized": lambda x, i, w: good(scaled(x, values=x), i),
    "`topk_idx` is not `[T, K]`": lambda x, i, w: good(x, i[:, 0]),
    "`topk_idx` holds floats": lambda x, i, w: good(x, i.astype(jnp.float32)),
    "`topk_idx` has another number of tokens than `x`": lambda x, i, w: good(x, i[:3]),
    "`topk_idx` has the same tokens in other dimensions": lambda x, i, w: good(x.reshape(2, 4, H), i),
    "no slots": lambda x, i, w: good(x, i[:, :0]),
    "`topk_weights` has another shape than `topk_idx`": lambda x, i, w: good(x, i, w[:, :1]),
    "`topk_weights` holds integers": lambda x, i, w: good(x, i, i),
    "the dtype of `topk_idx` has no number for the last expert": lambda x, i, w: good(
        x, i.astype(jnp.uint8), num_experts=257
    ),
    "a signed dtype of `topk_idx` has none for it": lambda x, i, w: good(x, i.astype(jnp.int8), num_experts=129),
    "`dispatch_start` gets such a `topk_idx`": lambda x, i, w: xm.dispatch_start(
        x, i.astype(jnp.uint8), num_experts=300, axis_name="ep"
    ),
    "no experts": lambda x, i, w: good(x, i, num_experts=0),
    "a negative number of experts": lambda x, i, w: good(x, i, num_experts=-8),
    "`num_experts` that only the run time knows": lambda x, i, w: good(x, i, num_experts=i[0, 0]),
    "`num_experts` is not an int": lambda x, i, w: good(x, i, num_experts=8.0),
    "a negative capacity": lambda x, i, w: good(x, i, capacity=-1),
    "a capacity in the padded layout": lambda x, i, w: good(x, i, capacity=16, layout="padded"),
    "more rows than int32 can count": lambda x, i, w: good(x, i, capacity=2**31),
    "alignment below one": lambda x, i, w: good(x, i, alignment=0),
    "alignment in a layout without groups": lambda x, i, w: good(x, i, alignment=8, layout="ranked"),
    "unknown drop rule": lambda x, i, w: good(x, i, w, drop="random"),
    "a drop by weight without weights": lambda x, i, w: good(x, i, capacity=4, drop="weight"),
    "unknown layout": lambda x, i, w: good(x, i, layout="sorted"),
    "a layout that is not a name": lambda x, i, w: good(x, i, layout=np.arange(2)),
    "`active` does not have one entry for each rank": lambda x, i, w: good(x, i, active=jnp.ones(3, bool)),
    "`placement` is not a `Placement`": lambda x, i, w: good(x, i, placement=np.zeros((RANKS, 2), int)),
    "a placement of another number of experts": lambda x, i, w: good(x, i, placement=xm.balance.home(E + 1, RANKS)),
    "another balance than the one there is": lambda x, i, w: good(x, i, balance="even"),
    "balance in a layout without a capacity": lambda x, i, w: good(x, i, balance="exact", layout="padded"),
    "balance and a capacity": lambda x, i, w: good(x, i, balance="exact", capacity=8),
    "balance and a placement": lambda x, i, w: good(x, i, balance="exact", placement=xm.balance.home(E, RANKS)),
    "balance without a slot for a borrowed expert": lambda x, i, w: good(x, i, balance="exact", slots_per_rank=2),
    "slots without balance": lambda x, i, w: good(x, i, slots_per_rank=3),
    "a placement for another number of ranks": lambda x, i, w: good(x, i, placement=xm.balance.home(E, 2)),
    "`active` is not bool": lambda x, i, w: good(x, i, active=jnp.ones(RANKS)),
    "unknown wire dtype": lambda x, i, w: good(x, i, wire="float4"),
    "unknown scale format of a wire": lambda x, i, w: good(x, i, wire="int8:bf16"),
    "a `Wire` of unknown dtype": lambda x, i, w: good(x, i, wire=xm.Wire("int4")),
    "a `Wire` of unknown scale format": lambda x, i, w: good(x, i, wire=xm.Wire("int8", "bf16")),
    "a wire for quantized input": lambda x, i, w: good(scaled(x), i, wire="int8"),
    "the mesh does not have the axis": lambda x, i, w: good(x, i, axis_name="expert"),
    "more than two axes": lambda x, i, w: good(x, i, axis_name=("a", "b", "c")),
    "not a `KernelConfig`": lambda x, i, w: good(x, i, config={"num_sms": 8}),
    "unknown wire for gradients": lambda x, i, w: good(x, i, gradient_wire="bf8"),
    "the CUDA backend on another platform": lambda x, i, w: good(x, i, config=xm.KernelConfig(backend="cuda")),
    "the TPU backend on another platform": lambda x, i, w: good(x, i, config=xm.KernelConfig(backend="pallas")),
    "nodes of unequal size": lambda x, i, w: good(x, i, config=xm.KernelConfig(ranks_per_node=3)),
    # combine and redispatch
    "a placement for `combine` alone": lambda x, i, w: combined(x, i, placement=xm.balance.home(E, RANKS)),
    "a placement for `combine` of another number of slots": lambda x, i, w: xm.combine(
        (r := good(x, i, placement=xm.balance.home(E, RANKS))).x,
        r.handle,
        placement=xm.balance.plan(np.ones(E), RANKS, 3),
    ),
    "`y` has another number of rows than `routed.x`": lambda x, i, w: combined(x, i, y=x),
    "`y` comes from another layout": lambda x, i, w: combined(x, i, y=jnp.ones((2, RANKS * T, H))),
    "`y` is not a float array": lambda x, i, w: combined(x, i, y=jnp.ones((RANKS * T * K, H), jnp.int32)),
    "`y` is quantized": lambda x, i, w: combined(x, i, y=scaled(jnp.ones((RANKS * T * K, H)))),
    "weights in the ranked layout": lambda x, i, w: combined(x, i, layout="ranked", weighted=True),
    "`weighted` is not a bool": lambda x, i, w: combined(x, i, weighted="yes"),
    "`weighted` is an array of bools": lambda x, i, w: combined(x, i, weighted=np.ones(2, bool)),
    "`handle` is not a handle": lambda x, i, w: xm.combine(x, good(x, i)),
    "an array of a handle in another shape": lambda x, i, w: with_handle(
        x, i, positions=jnp.zeros((RANKS, T), jnp.int32)
    ),
    "an array of a handle of another dtype": lambda x, i, w: with_handle(
        x, i, recv_counts=jnp.zeros((RANKS, E // RANKS))
    ),
    "a handle with weights for another number of rows": lambda x, i, w: with_handle(x, i, weights=jnp.ones(3)),
    "a handle that lost an array": lambda x, i, w: with_handle(x, i, topk_idx=None),
    "a payload of another number of tokens": lambda x, i, w: xm.redispatch(x[:3], good(x, i).handle),
    "a payload in other dimensions": lambda x, i, w: xm.redispatch(
        x.reshape(4, 2, H), good(x.reshape(2, 4, H), i.reshape(2, 4, K)).handle
    ),
    "a quantized payload": lambda x, i, w: xm.redispatch(scaled(x), good(x, i).handle),
    "`combine_done` of a dispatch": lambda x, i, w: xm.combine_done(started(x, i)),
    "`dispatch_done` of something that is no flight": lambda x, i, w: xm.dispatch_done(good(x, i)),
    "a flight that is finished a second time": lambda x, i, w: [
        xm.dispatch_done(flight) for flight in [started(x, i)] * 2
    ],
    "`overlap` of something that is no flight": lambda x, i, w: xm.overlap(x, jnp.sin, x),
    "work that nothing holds back": lambda x, i, w: xm.overlap(started(x, i), lambda: x),
    "work that is no function": lambda x, i, w: xm.overlap(started(x, i), x, x),
    # tokens that every rank has
    "a layout that only a dispatch has": lambda x, i, w: replicated(x, i, layout="ranked"),
    "alignment in the padded layout": lambda x, i, w: replicated(x, i, layout="padded", alignment=8),
    "`topk_idx` does not have the tokens of `x`": lambda x, i, w: replicated(x, i[:3]),
    "`combine_replicated` gets the handle of a dispatch": lambda x, i, w: xm.combine_replicated(
        good(x, i).x, good(x, i).handle
    ),
    "`combine` gets the handle of a `dispatch_replicated`": lambda x, i, w: xm.combine(
        replicated(x, i).x, replicated(x, i).handle
    ),
    "`y` does not have the rows of `routed.x`": lambda x, i, w: xm.combine_replicated(x, replicated(x, i).handle),
    "`weighted` of `combine_replicated` is not a bool": lambda x, i, w: xm.combine_replicated(
        replicated(x, i).x, replicated(x, i).handle, weighted="yes"
    ),
    # transformations
    "a flight that leaves the `vmap` that started it, on a backend where it is pending": lambda x, i, w: (
        started_under_vmap(x, i)
    ),
    "a gradient through quantized input": lambda x, i, w: jax.grad(
        lambda s: good(xm.BlockScaled(scaled(x).values, s), i).x.scales.sum()
    )(scaled(x).scales),
    # drop-ins
    "`tiled`, and the ranks do not divide the axis": lambda x, i, w: xm.all_to_all(x[:6], "ep", 0, 0, tiled=True),
    "not `tiled`, and the axis is not the ranks": lambda x, i, w: xm.all_to_all(x, "ep", 0, 0),
    "an axis that `x` does not have": lambda x, i, w: xm.all_to_all(x, "ep", 2, 0, tiled=True),
    "groups that do not cover the ranks": lambda x, i, w: xm.all_to_all(
        x, "ep", 0, 0, axis_index_groups=[[0, 1], [2]], tiled=True
    ),
    "a group that does not hold rank numbers": lambda x, i, w: xm.all_to_all(
        x, "ep", 0, 0, axis_index_groups=[[0.5]], tiled=True
    ),
    "an exchange over the axis of a `vmap`": lambda x, i, w: jax.vmap(
        lambda x: xm.ragged_all_to_all(x, x, *[jnp.zeros(2, jnp.int32)] * 4, axis_name="batch"), axis_name="batch"
    )(jnp.stack([x, x])),
    "rows of different shape": lambda x, i, w: ragged(x, i, w, output=x[:, :5]),
    "rows of different dtype": lambda x, i, w: ragged(x, i, w, output=x.astype(jnp.bfloat16)),
    "the number of sizes is no multiple of the ranks": lambda x, i, w: ragged(
        x, i, w, send_sizes=jnp.zeros(3, jnp.int32)
    ),
    "the four arrays of sizes and offsets differ in length": lambda x, i, w: ragged(
        x, i, w, send_sizes=jnp.zeros(2 * RANKS, jnp.int32)
    ),
    "sizes that are floats": lambda x, i, w: ragged(x, i, w, recv_sizes=jnp.zeros(RANKS)),
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
    "`jax.export` for more than one platform": lambda mesh: exported_for(mesh, "cpu", "tpu"),
    "called outside `jax.shard_map`": lambda mesh: good(tokens(), slots()),
    "called in `jit` outside `jax.shard_map`": lambda mesh: jax.jit(lambda x: good(x, slots()))(tokens()),
    "`dispatch_replicated` outside `jax.shard_map`": lambda mesh: replicated(tokens(), slots()),
    "a handle made over another axis": lambda mesh: combine_with_a_handle_over(("data",), (RANKS,), mesh),
    "a handle made over another number of ranks": lambda mesh: combine_with_a_handle_over(("ep",), (2,), mesh),
    "unknown backend": lambda mesh: xm.KernelConfig(backend="triton"),
    "unknown mode": lambda mesh: xm.KernelConfig(mode="fast"),
    "`num_sms` is not positive": lambda mesh: xm.KernelConfig(num_sms=0),
    "`num_sms` is not an integer": lambda mesh: xm.KernelConfig(num_sms=8.0),
    "a word for interpret mode": lambda mesh: xm.KernelConfig(interpret="yes"),
    "a negative barrier id": lambda mesh: xm.KernelConfig(collective_id=-1),
    "a channel that does not exist": lambda mesh: xm.KernelConfig(channel=99),
    "nodes of no ranks": lambda mesh: xm.KernelConfig(ranks_per_node=0),
    "memory for nodes of unequal size": lambda mesh: xm.buffer_size_hint(
        num_tokens=T, hidden=H, num_ranks=4, ranks_per_node=3
    ),
    "a negative timeout": lambda mesh: xm.KernelConfig(timeout_s=-1.0),
    "quantizing integers": lambda mesh: xm.quantize(jnp.ones((4, 128), jnp.int32)),
    "quantizing something that is no array": lambda mesh: xm.quantize("tokens"),
    "quantizing to an unknown dtype": lambda mesh: xm.quantize(tokens(), dtype="float4"),
    "quantizing with an unknown scale format": lambda mesh: xm.quantize(tokens(), scale_format="e5m2"),
    "quantizing a scalar": lambda mesh: xm.quantize(jnp.float32(1)),
    "dequantizing something that is no `BlockScaled`": lambda mesh: xm.dequantize(tokens()),
    "a `BlockScaled` without arrays": lambda mesh: xm.dequantize(xm.BlockScaled(1, 2)),
    "a `BlockScaled` whose values are not quantized": lambda mesh: xm.dequantize(
        xm.BlockScaled(tokens(), jnp.ones((T, 1)))
    ),
    "dequantizing to a dtype that is not a float": lambda mesh: xm.dequantize(xm.quantize(tokens()), "int32"),
    "scales of another number of blocks": lambda mesh: xm.dequantize(
        xm.BlockScaled(jnp.zeros((T, 256), jnp.int8), jnp.ones((T, 1)))
    ),
    "counting for nodes of unequal size": lambda mesh: xm.get_dispatch_layout(
        slots(), num_experts=E, num_ranks=4, ranks_per_node=3
    ),
    "more experts per token than there are": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 9),
    "unknown score": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2, score="tanh"),
    "a bias of another length": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2, bias=jnp.ones(3)),
    "`k` is not an int": lambda mesh: xm.routing.top_k(jnp.ones((T, E)), 2.0),
    "`num_groups` is not an int": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, num_groups=4.0),
    "groups that do not divide the experts": lambda mesh: xm.routing.group_limited_top_k(
        jnp.ones((T, E)), 2, num_groups=3
    ),
    "such a dtype for `get_dispatch_layout`": lambda mesh: xm.get_dispatch_layout(
        slots(jnp.uint8), num_experts=257, num_ranks=4
    ),
    "a dtype of the indices that cannot name every expert": lambda mesh: xm.routing.chosen_weights(
        jnp.ones((T, 257)), slots(jnp.uint8)
    ),
    "indices of other tokens than the logits": lambda mesh: xm.routing.chosen_weights(jnp.ones((T + 1, E)), slots()),
    "unknown score of chosen experts": lambda mesh: xm.routing.chosen_weights(jnp.ones((T, E)), slots(), score="tanh"),
    "groups scored by no expert": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, group_best=0),
    "a negative least sum": lambda mesh: xm.routing.chosen_weights(
        jnp.ones((T, E)), slots(), normalize=True, min_sum=-1.0
    ),
    "a least sum where nothing is divided by a sum": lambda mesh: xm.routing.chosen_weights(
        jnp.ones((T, E)), slots(), min_sum=1e-12
    ),
    "`eps` is not a number": lambda mesh: xm.routing.sparsemixer_weights(jnp.ones((T, E)), slots(), float("nan")),
    "unknown score of groups": lambda mesh: xm.routing.group_limited_top_k(jnp.ones((T, E)), 2, score="tanh"),
    "groups too small for `k`": lambda mesh: xm.routing.group_limited_top_k(
        jnp.ones((T, E)), 3, num_groups=4, topk_groups=1
    ),
    "a `Buffer` over an axis that the mesh does not have": lambda mesh: xm.Buffer(
        mesh, "expert", num_tokens=T, hidden=H
    ),
    "a `Buffer` without a mesh, or whose mesh has no devices": lambda mesh: xm.Buffer(
        None, "ep", num_tokens=T, hidden=H
    ),
    "a `Buffer` smaller than the shapes need": lambda mesh: xm.Buffer(
        mesh, "ep", num_tokens=T, hidden=H, size_bytes=-1
    ),
    "a `Buffer` of a channel that does not exist": lambda mesh: xm.Buffer(
        mesh, "ep", num_tokens=T, hidden=H, channel=16
    ),
    "a `Buffer` of an unknown dtype": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, dtype="float7"),
    "a `Buffer` of an unknown backend": lambda mesh: xm.Buffer(mesh, "ep", num_tokens=T, hidden=H, backend="nccl"),
    "`buffer_size_hint` for a dtype that cannot travel": lambda mesh: xm.buffer_size_hint(
        num_tokens=T, hidden=H, num_ranks=4, dtype="complex64"
    ),
    "`buffer_size_hint` for an unknown backend": lambda mesh: xm.buffer_size_hint(
        num_tokens=T, hidden=H, num_ranks=4, backend="triton"
    ),
    "`buffer_size_hint` for a size that is not positive": lambda mesh: xm.buffer_size_hint(
        num_tokens=0, hidden=H, num_ranks=4
    ),
    "`reset` without time": lambda mesh: cuda.reset(timeout_s=0),
}


# -- the table ---------------------------------------------------------------------------------------------------------
ERRORS = {"ValueError": ValueError, "TypeError": TypeError, "NotImplementedError": NotImplementedError}


VARIANTS = {  # of mistakes that the page lists: error, parts of the message
    "balance and a placement": (ValueError, ["balance='exact' with placement", "pass placement=None"]),
    "a placement for another number of ranks": (ValueError, ["placement is for 2 ranks, and axis_name has 4"]),
    "a placement for `combine` of another number of slots": (
        ValueError,
        ["placement has 3 slots on a rank, and the dispatch had 2"],
    ),
    "balance in a layout without a capacity": (ValueError, ["balance='exact' with layout='padded'"]),
    "balance without a slot for a borrowed expert": (ValueError, ["slots_per_rank=2: must be >= 3"]),
    "slots without balance": (ValueError, ["slots_per_rank=3 without balance='exact'"]),
    "`topk_idx` has the same tokens in other dimensions": (ValueError, ["topk_idx has 8 tokens and x has 2x4"]),
    "a signed dtype of `topk_idx` has none for it": (ValueError, ["int8", "127", "expert 128", "int32"]),
    "`dispatch_start` gets such a `topk_idx`": (ValueError, ["dispatch_start", "uint8", "expert 299"]),
    "a negative number of experts": (ValueError, ["num_experts=-8: must be >= 1"]),
    "`num_experts` is not an int": (TypeError, ["num_experts=8.0: must be an int"]),
    "a layout that is not a name": (
        ValueError,
        ["layout=array([0, 1]): must be one of ('grouped', 'ranked', 'padded')"],
    ),
    "a `Wire` of unknown dtype": (ValueError, ["Wire.dtype='int4': must be one of ('float8_e4m3fn', 'int8', 'mxfp4')"]),
    "a `Wire` of unknown scale format": (ValueError, ["Wire.scale_format='bf16': must be one of ('float32', 'ue8m0')"]),
    "called in `jit` outside `jax.shard_map`": (
        ValueError,
        ["axis_name='ep': there is no manual axis here", "Call it inside jax.shard_map"],
    ),
    "`weighted` is an array of bools": (TypeError, ["weighted=array([ True,  True]): must be True, False or None"]),
    "an array of a handle of another dtype": (ValueError, ["handle.recv_counts is float32[4, 2]: must be int32[4, 2]"]),
    "a payload in other dimensions": (ValueError, ["redispatch: x has 4x2 tokens: the handle was made for 2x4"]),
    "`dispatch_done` of something that is no flight": (
        TypeError,
        ["dispatch_done: flight is Routed", "what dispatch_start returned"],
    ),
    "alignment in the padded layout": (
        ValueError,
        ["dispatch_replicated: alignment=8 with layout='padded'", "only 'grouped'"],
    ),
    "`topk_idx` does not have the tokens of `x`": (
        ValueError,
        ["dispatch_replicated: topk_idx has 3 tokens and x has 8"],
    ),
    "`weighted` of `combine_replicated` is not a bool": (
        TypeError,
        ["combine_replicated: weighted='yes': must be True, False or None"],
    ),
    "`dispatch_replicated` outside `jax.shard_map`": (
        ValueError,
        ["dispatch_replicated: axis_name='ep': there is no manual axis here"],
    ),
    "`num_sms` is not an integer": (ValueError, ["KernelConfig.num_sms=8.0: must be None or a positive int"]),
    "nodes of no ranks": (ValueError, ["KernelConfig.ranks_per_node=0: must be None or a positive int"]),
    "memory for nodes of unequal size": (ValueError, ["buffer_size_hint: ranks_per_node=3: must divide num_ranks=4"]),
    "quantizing something that is no array": (TypeError, ["quantize: x is a str: must be an array"]),
    "`k` is not an int": (ValueError, ["k=2.0: must be an int in [1, E=8]"]),
    "`num_groups` is not an int": (ValueError, ["num_groups=4.0: must be an int in [1, E=8]"]),
    "unknown score of chosen experts": (ValueError, ["score='tanh'", "'sigmoid'"]),
    "such a dtype for `get_dispatch_layout`": (ValueError, ["uint8", "num_experts=257", "int32"]),
    "a `Buffer` of a channel that does not exist": (ValueError, ["channel=16", "[0, 16)"]),
    "a `Buffer` of an unknown backend": (
        ValueError,
        ["backend='nccl': must be one of (None, 'reference', 'pallas', 'cuda')"],
    ),
    "`buffer_size_hint` for an unknown backend": (ValueError, ["backend='triton': must be one of"]),
    "quantizing to an unknown dtype": (ValueError, ["dtype='float4': must be one of ('float8_e4m3fn', 'int8')"]),
    "quantizing with an unknown scale format": (
        ValueError,
        ["scale_format='e5m2': must be one of ('float32', 'ue8m0')"],
    ),
    "dequantizing to a dtype that is not a float": (TypeError, ["dtype='int32': must be a float dtype"]),
    "counting for nodes of unequal size": (ValueError, ["ranks_per_node=3: must divide num_ranks=4"]),
    "unknown score of groups": (ValueError, ["score='tanh'", "'sigmoid'"]),
    "a `Buffer` over an axis that the mesh does not have": (
        ValueError,
        ["axis_name='expert': the mesh has axes ('ep',)"],
    ),
    "a `Buffer` of an unknown dtype": (
        ValueError,
        ["dtype='float7': must be one of ('float32', 'bfloat16', 'float16'"],
    ),
    "`buffer_size_hint` for a dtype that cannot travel": (ValueError, ["dtype='complex64': must be one of"]),
    "`buffer_size_hint` for a size that is not positive": (ValueError, ["num_tokens=0: must be >= 1"]),
}


def read_table() -> dict[str, tuple[type, list[str]]]:
    """Rows `| mistake | error | the message says |` of docs/user/errors.md."""
    rows = {}
    for line in DOCUMENT.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (error := ERRORS.get(cells[1].strip("`"))):
            name, says = cells[0], re.findall(r"`([^`]+)`", cells[2])
            assert name not in rows and says, line
            rows[name] = error, says
    return rows


TABLE = read_table() | VARIANTS


def test_every_row_of_the_table_has_a_test_and_every_test_a_row():
    assert not read_table().keys() & VARIANTS.keys()
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
        with pytest.warns(UserWarning, match="^dispatch: capacity=0: every row is dropped") as found:
            routed = good(x, idx.astype(jnp.int16), weights.astype(jnp.bfloat16), capacity=0)
        assert found[0].filename == __file__
        out = xm.combine(routed.x, routed.handle)
        routed = good(empty, idx, weights)
        return out, xm.combine(routed.x, routed.handle)

    specs = P("ep")
    program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=specs, out_specs=specs))
    arrays = (x, idx, np.ones((RANKS * T, K), np.float32), np.ones((RANKS * T, 0), np.float32))
    out, empty = program(*jax.device_put(arrays, jax.NamedSharding(mesh4, specs)))
    assert not np.asarray(out).any() and empty.shape == (RANKS * T, 0)
