"""Records of rows on the wire: which payloads the kernels take, how a row becomes a record, how records become rows."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from xen_moe_jax import _layout
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import MIN_AMAX, QMAX, Wire
from xen_moe_jax._spec import SCALE_BLOCK, Spec, scale_blocks
from xen_moe_jax.backends.pallas import hardware, headers, plan
from xen_moe_jax.pallas_kernels import place as place_kernel
from xen_moe_jax.pallas_kernels import push as push_kernel
from xen_moe_jax.pallas_kernels.launch import tile_rows
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import LANES, Header, Quantization, Record

FLOAT_DTYPES = ("float32", "bfloat16")
QUANTIZED_DTYPES = ("float8_e4m3fn", "int8")


def check(operation: str, dtype: Any, spec: Spec, *, quantized: bool = False) -> None:
    """Raises TypeError for a dtype that the kernels do not take, ValueError for a mesh that they cannot span."""
    hardware.check_one_slice(
        spec.axis_name[-1:],
        "give the slices a mesh axis of their own and pass axis_name=(slow, fast), or use "
        "KernelConfig(backend='reference')",
    )
    allowed = QUANTIZED_DTYPES if quantized else FLOAT_DTYPES
    if jnp.dtype(dtype).name not in allowed:
        raise TypeError(
            f"{operation} on TPU: dtype {jnp.dtype(dtype).name} is not supported by the Pallas kernels, "
            f"which take {allowed}: cast the input, or use KernelConfig(backend='reference')"
        )


def pad_hidden(x: jax.Array) -> jax.Array:
    """`[..., H]` -> H rounded up to a multiple of 128 with zeros: one extra pass over `x`, only where H is not a
    multiple.
    """
    pad = -x.shape[-1] % SCALE_BLOCK
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, pad)]) if pad else x


def empty_rows(x: jax.Array, scales: jax.Array | None, spec: Spec) -> tuple[jax.Array, ...]:
    """Rows where there is nothing to send or no room for anything."""
    like = (x.reshape(-1)[:1] * 0).sum() if x.size else jnp.zeros((), x.dtype)
    rows = (jnp.zeros(spec.rows_shape(x.shape[1]), x.dtype) + like).astype(x.dtype)
    if scales is None:
        return (rows,)
    return rows, jnp.zeros(spec.rows_shape(scale_blocks(x.shape[1])), jnp.float32)


def pad_rows(rows: jax.Array) -> jax.Array:
    """`[C, H]` with an even C for bfloat16: `reduce_slots` reads pairs of rows that share 32-bit words."""
    pad = -rows.shape[0] % (4 // rows.dtype.itemsize)
    return jnp.pad(rows, ((0, pad), (0, 0))) if pad else rows


def is_quantized(x: Any) -> bool:
    """Returns True if the payload is the values of a `BlockScaled`."""
    return x.dtype.itemsize == 1


def given_scales(x: jax.Array, scales: jax.Array) -> jax.Array | None:
    """The payload's scales; None where it has none (the operand then has no columns)."""
    return scales if is_quantized(x) else None


def with_scales(rows: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Rows and their scales: an array without columns where there are none."""
    return rows if len(rows) == 2 else (*rows, jnp.zeros((*rows[0].shape[:-1], 0), jnp.float32))


def record_of(hidden: int, dtype, scaled: bool, wire: Wire | None, header: int = 0) -> Record:
    """The record of a row of `hidden` elements, rounded up to whole blocks, with `header` words of routing."""
    hidden = -(-hidden // LANES) * LANES
    if wire is not None:
        return Record(hidden, wire.dtype, scaled=True, header=header)
    return Record(hidden, jnp.dtype(dtype).name, scaled=scaled, header=header)


def header_words(spec: Spec) -> int:
    """Words of routing that travel in each record of a dispatch."""
    return Header(spec.top_k).words if headers.used(spec) else 0


class Rows(NamedTuple):
    """Rows of a dispatch: as given and returned, and as records on the wire.

    Attributes:
      hidden, dtype: size and dtype of the given rows. scaled: scales travel with the rows, and arrive.
      record: a row on the wire. quantize: how to quantize, or None.
    """

    hidden: int
    dtype: Any
    scaled: bool
    record: Record
    quantize: Quantization | None


def rows_of(x: Any, wire: Wire | None, header: int = 0) -> Rows:
    """Returns the `Rows` of `x [T, H]`, an array or its aval; each record carries `header` words."""
    scaled = is_quantized(x)
    return Rows(x.shape[1], x.dtype, scaled, record_of(x.shape[1], x.dtype, scaled, wire, header), quantization(wire))


def quantization(wire: Wire | None) -> Quantization | None:
    """Returns the kernels' `Quantization` for `wire`; None where values travel as they are."""
    return None if wire is None else Quantization(wire.dtype, wire.scale_format, QMAX[wire.dtype], MIN_AMAX)


def push_records(
    x: jax.Array,
    scales: jax.Array | None,
    routes: push_kernel.Routes,
    rows: Rows,
    *,
    axes: Axes | None,
    spec: Spec,
    config: KernelConfig,
    header: jax.Array | None = None,
) -> jax.Array:
    """Makes the records of `x [T, H]` and sends them along `routes`, by the kernel `push`. With `axes=None` they stay
    in a buffer of this rank."""
    smallest = tile_rows(rows.dtype)
    launch = hardware.launch(
        "push",
        functools.partial(push_kernel.vmem_bytes, rows.record, rows.dtype, rows.scaled),
        preferred=smallest if hardware.low_latency(spec, config) else 64,
        smallest=smallest,
        available=spec.num_tokens,
        config=config,
        axes=plan.kernel_axes(spec),
    )
    return push_kernel.push(
        pad_hidden(x),
        scales,
        routes,
        record=rows.record,
        quantize=rows.quantize,
        axes=axes,
        launch=launch,
        header=header,
    )


def place_rows(
    staged: jax.Array,
    source: jax.Array,
    recv_counts: jax.Array,
    like: Rows,
    *,
    spec: Spec,
    config: KernelConfig,
    keep_header: bool = False,
    window: slice | None = None,
    into: jax.Array | None = None,
    whole: bool = False,
) -> tuple[jax.Array, ...]:
    """Staged records -> rows of `routed.x`, in its shape; then their scales, and their headers, where asked.

    Args:
      window: rows of the grouped layout that are made. They are the result, or with `whole` a part of an array of all
        rows: of `into`, whose other rows stay, or of a fresh one, whose other rows are unspecified.
    """
    live, shape = _layout.used_rows(recv_counts, spec).reshape(-1), spec.row_dims
    if window is not None and whole:
        row = jnp.arange(live.shape[0], dtype=jnp.int32)
        live &= (row >= window.start) & (row < window.stop)
    elif window is not None:
        source, live, shape = source[window], live[window], (window.stop - window.start,)
    launch = hardware.launch(
        "place",
        functools.partial(place_kernel.vmem_bytes, like.record, like.dtype, like.scaled, keep_header),
        preferred=16
        if hardware.low_latency(spec, config)
        else 128,  # an expert's few rows are decoded with their whole block
        smallest=tile_rows(like.dtype),
        available=source.shape[0],
        config=config,
    )
    blocks = -(-source.shape[0] // launch.block)
    hardware.check_smem("place", place_kernel.smem_bytes(blocks, launch.block), "pass a smaller capacity")
    rows = place_kernel.place(
        staged,
        source,
        live,
        record=like.record,
        out_dtype=like.dtype,
        keep_scales=like.scaled,
        padding_rows=spec.alignment > 1,
        launch=launch,
        keep_header=keep_header,
        into=into,
    )
    return tuple(r[:, : like.hidden if i == 0 else None].reshape(*shape, -1) for i, r in enumerate(rows))
