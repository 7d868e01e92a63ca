"""What the TPU kernels take, and the padded path for hidden sizes that are not a multiple of 128."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._spec import SCALE_BLOCK, Spec, scale_blocks
from xen_moe_jax.backends.pallas import hardware

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
