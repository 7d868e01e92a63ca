"""Rows that quantized experts take from a wire of their dtype as they arrived, without a second quantization."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from xen_moe_jax._api import dispatch_for, redispatch
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._jax_internals import varying_axes
from xen_moe_jax._mesh import vary, whole
from xen_moe_jax._quantize import Wire, quantize
from xen_moe_jax._types import BlockScaled, Handle, Routed, pytree
from xen_moe_jax.experts import hopper
from xen_moe_jax.pallas_kernels.hopper import float8_quantize


@pytree()
class ArrivedRows:
    """Quantized rows `[C, H]` with a scale for every 128 elements, which the experts multiply as they are.

    Attributes:
      x: `[C, H]` in the tokens' dtype. Its values are not read. Its cotangent is that of the rows, which
        `scaled` cannot hold.
      scaled: values `[C, H]` in fp8 (e4m3) or int8, and float32 scales `[C, ceil(H/128)]`: powers of two from a wire
        with ":ue8m0", any numbers from a wire without it.
    """

    x: Any
    scaled: BlockScaled

    @property
    def shape(self) -> tuple[int, ...]:
        """`(C, H)`."""
        return self.x.shape

    @property
    def dtype(self) -> Any:
        """Dtype of the tokens, and of what is computed from the rows."""
        return self.x.dtype


@dataclasses.dataclass(frozen=True)
class Way:
    """How rows travel to the experts, and how their cotangents travel home: arguments of `dispatch`."""

    wire: Wire
    gradient_wire: Any
    config: KernelConfig | None

    def home(self, cotangent: jax.Array, handle: Handle, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Returns the cotangent of the tokens, of `shape` and `dtype`, for a cotangent `[C, H]` of the rows, as a
        dispatch does."""

        def sent(x: jax.Array) -> jax.Array:
            options = {"wire": self.gradient_wire, "gradient_wire": self.gradient_wire, "config": self.config}
            return redispatch(x, handle, **options)

        _, pull = jax.vjp(sent, vary(jnp.zeros(shape, dtype), varying_axes(cotangent)))
        return pull(cotangent)[0]


def dispatch_quantized(
    caller: str, x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array | None, way: Way, **options: Any
) -> Routed:
    """Dispatches tokens `[..., H]` that are quantized first and stay quantized: `routed.x` is an `ArrivedRows`.

    Values, counts, and gradients are those of `dispatch(x, ...)` with `wire=way.wire` and
    `gradient_wire=way.gradient_wire`, except that no row is dequantized and rounded to the tokens' dtype. Messages name
    `caller`; `options` are all others of a dispatch, whose wires are None.
    """
    x = whole(x)
    scaled = _quantized(jax.lax.stop_gradient(x), way.wire)
    routed = dispatch_for(caller, scaled, topk_idx, topk_weights, config=way.config, **options)
    scaled = BlockScaled(routed.x.values, jax.lax.stop_gradient(routed.x.scales))
    carrier = _carrier((way, x.shape, x.dtype), x, jax.lax.stop_gradient(routed.handle), scaled.values)
    return dataclasses.replace(routed, x=ArrivedRows(carrier, scaled))


def _quantized(x: jax.Array, wire: Wire) -> BlockScaled:
    """Returns `quantize` of tokens `[..., H]`. On a Hopper GPU one kernel does it in fp8 with the same bits, for
    bfloat16 and float16, float32 scales, a multiple of 8 tokens, and an `H` that is a multiple of 128."""
    *tokens, hidden = x.shape
    rows = x.reshape(-1, hidden)
    fits = rows.size > 0 and rows.shape[0] % hopper.ROW_ALIGNMENT == 0 and hidden % float8_quantize.BLOCK == 0
    in_fp8 = x.dtype.name in hopper.DTYPES and wire == Wire("float8_e4m3fn")
    by_kernel = fits and in_fp8 and hopper.on_hopper()
    if not by_kernel:
        return quantize(x, wire.dtype, wire.scale_format)
    found = float8_quantize.rows(rows, by_row=True)
    values, scales = (vary(a, varying_axes(x)).reshape(*tokens, -1) for a in (found.values, found.scales))
    return BlockScaled(values, scales)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _carrier(static: tuple[Way, Any, Any], x: jax.Array, handle: Handle, rows: jax.Array) -> jax.Array:
    """Returns zeros in the shape of `rows` and the dtype of `x`. Their cotangent goes home to the tokens `x`."""
    return vary(jnp.zeros(rows.shape, x.dtype), varying_axes(rows))


def _forward(static: Any, x: jax.Array, handle: Handle, rows: jax.Array) -> tuple[jax.Array, Handle]:
    return _carrier(static, x, handle, rows), handle


def _backward(static: tuple[Way, Any, Any], handle: Handle, cotangent: jax.Array) -> tuple[Any, ...]:
    way, shape, dtype = static
    return way.home(cotangent, handle, shape, dtype), None, None


_carrier.defvjp(_forward, _backward)
