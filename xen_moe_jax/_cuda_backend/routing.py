"""Dispatch, redispatch and combine as FFI calls: attributes out of the static description."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from xen_moe_jax import _primitives
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._cuda_backend import devices, module, schedule
from xen_moe_jax._quantize import Wire
from xen_moe_jax._spec import Spec

DTYPES = {"bfloat16": 0, "float16": 1, "float32": 2, "float8_e4m3fn": 3, "int8": 4, "float8_e5m2": 5}
WIRES = {None: 0, "float8_e4m3fn": 1, "int8": 2}
LAYOUTS = {"grouped": 0, "ranked": 1, "padded": 2}
STAND_INS = {1: jnp.int8, 2: jnp.bfloat16, 4: jnp.float32}
MAX_TIMEOUT_NS = 2**62


def attributes(
    spec: Spec,
    hidden: int,
    dtype: Any,
    cut: schedule.Schedule,
    config: KernelConfig,
    *,
    wire: Wire | None = None,
    scaled: bool = False,
    weighted: bool = False,
    known_positions: bool = False,
) -> dict[str, int]:
    """Integer attributes, as ffi/operation.cc decodes them."""
    check_limits(spec)
    return {
        "ranks": spec.num_ranks,
        "num_tokens": spec.num_tokens,
        "top_k": spec.top_k,
        "num_experts": spec.num_experts,
        "hidden": hidden,
        "capacity": spec.capacity,
        "alignment": spec.alignment,
        "layout": LAYOUTS[spec.layout],
        "ranks_per_node": spec.num_ranks if len(spec.axis_sizes) == 1 else spec.num_ranks // spec.axis_sizes[0],
        "dtype": DTYPES[jnp.dtype(dtype).name],
        "wire": WIRES[wire.dtype if wire else None],
        "ue8m0": int(wire is not None and wire.scale_format == "ue8m0"),
        "scaled": int(scaled),
        "weighted": int(weighted),
        "known_positions": int(known_positions),
        "blocks": cut.blocks,
        "push_blocks": cut.push_blocks,
        "layout_blocks": cut.layout_blocks,
        "parts": cut.parts,
        "segment_tokens": cut.segment_tokens,
        "solo_layout": int(cut.solo_layout),
        "timeout_ns": timeout_ns(config),
        "channel": config.channel,
    }


def timeout_ns(config: KernelConfig) -> int:
    return min(MAX_TIMEOUT_NS, max(1, round(config.timeout_s * 1e9))) if config.timeout_s else 0


def check_limits(spec: Spec) -> None:
    most = module.compiled().max_ranks
    for name, value, limit in (
        ("ranks", spec.num_ranks, most),
        ("top_k", spec.top_k, 64),
        ("num_experts", spec.num_experts, 4096),
    ):
        if value > limit:
            raise ValueError(
                f"the CUDA backend takes at most {limit} {name}, not {value}: use KernelConfig(backend='reference')"
            )


def call(
    target: str, operands: tuple, results: list[jax.ShapeDtypeStruct], keys: np.ndarray, attrs: dict[str, int], **kw
):
    """One FFI call. Returns a list of results."""
    devices.prepare(keys)
    function = jax.ffi.ffi_call(target, results, **kw)
    numbers = {name: np.int64(value) for name, value in attrs.items()}
    return list(function(*operands, devices=keys.reshape(-1), **numbers))


def _copied(x: jax.Array) -> tuple[jax.Array, Any]:
    """An array of a dtype that the kernels copy, and what to cast the results back to (None: nothing)."""
    if x.dtype.name in DTYPES:
        return x, None
    if x.dtype.itemsize not in STAND_INS or x.dtype == jnp.bool_:
        raise ValueError(f"the CUDA backend moves rows of 1, 2 or 4 bytes an element, not {x.dtype}: cast x first")
    return lax.bitcast_convert_type(x, STAND_INS[x.dtype.itemsize]), x.dtype


def dispatch(
    x: jax.Array,
    scales: jax.Array | None,
    topk_idx: jax.Array,
    topk_weights: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> tuple[jax.Array, ...]:
    """Results in the order of docs/internals.md."""
    mesh = _primitives.lowering_mesh()
    x, original = _copied(x)
    hidden = x.shape[1]
    cut = schedule.dispatch(spec, hidden, config, devices.num_sms(mesh), wire is not None)
    attrs = attributes(spec, hidden, x.dtype, cut, config, wire=wire, scaled=scales is not None)
    operands = (x, topk_idx, topk_weights) if scales is None else (x, scales, topk_idx, topk_weights)
    shapes = _primitives.dispatch_shapes(*operands, spec=spec, wire=wire, config=config)
    results = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    out = call("xen_moe_dispatch", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    if original is not None:
        out[0] = lax.bitcast_convert_type(out[0], original)
    return tuple(out)


def redispatch(
    x: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    *,
    spec: Spec,
    wire: Wire | None,
    config: KernelConfig,
) -> jax.Array:
    """A new payload on a known routing."""
    mesh = _primitives.lowering_mesh()
    x, original = _copied(x)
    hidden = x.shape[1]
    cut = schedule.dispatch(spec, hidden, config, devices.num_sms(mesh), wire is not None)
    attrs = attributes(spec, hidden, x.dtype, cut, config, wire=wire, known_positions=True)
    results = [jax.ShapeDtypeStruct(spec.rows_shape(hidden), x.dtype)]
    operands = (x, topk_idx, positions, recv_counts)
    (rows,) = call("xen_moe_redispatch", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    return rows if original is None else lax.bitcast_convert_type(rows, original)


def combine(
    y: jax.Array,
    topk_idx: jax.Array,
    positions: jax.Array,
    recv_counts: jax.Array,
    weights: jax.Array,
    *,
    spec: Spec,
    weighted: bool,
    wire: Wire | None,
    config: KernelConfig,
) -> jax.Array:
    """`y [C, H]` (padded `[L, R*T, H]`) -> `[T, H]` of `y.dtype`.

    Raises:
      ValueError: `y` is not bfloat16, float16 or float32.
    """
    if y.dtype.name not in ("bfloat16", "float16", "float32"):
        raise ValueError(f"combine on CUDA: y.dtype={y.dtype}: must be bfloat16, float16 or float32; cast y first")
    mesh = _primitives.lowering_mesh()
    hidden = y.shape[-1]
    cut = schedule.combine(spec, hidden, config, devices.num_sms(mesh))
    attrs = attributes(spec, hidden, y.dtype, cut, config, wire=wire, weighted=weighted)
    results = [jax.ShapeDtypeStruct((spec.num_tokens, hidden), y.dtype)]
    operands = (y, topk_idx, positions, recv_counts, weights)
    (out,) = call("xen_moe_combine", operands, results, devices.groups(mesh, spec.axis_name), attrs)
    return out
