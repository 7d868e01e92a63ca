"""Weights that are trained in fp8 and quantized once for several calls: codes beside the weight that gets the gradient.

An optimiser's step changes the weights once. The calls in between, of gradient accumulation, of a forward pass that is
done again (`jax.checkpoint`), or of chunks, multiply by the same codes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from xen_moe_jax._quantized_weight import refuse_gradient
from xen_moe_jax._spec import SCALE_BLOCK as BLOCK
from xen_moe_jax._types import export_as, pytree

DTYPE = "float8_e4m3fn"


@pytree(static=("padding",))
class Float8Weight:
    """A weight `[L, A, B]` in fp8 (e4m3) with a scale for 128 x 128 elements, from `quantize_weights`.

    `moe_mlp(..., experts="float8_e4m3fn")` takes `codes.of(weight)` in place of `weight`. The call's result is the one
    for `weight`, and `weight` gets the gradient that it has without codes (straight-through). There are two copies of
    the codes, because wgmma of a Hopper GPU reads fp8 only with the contracted dimension innermost. Both are padded
    with zeros to multiples of 128, `A'` and `B'`.

    Attributes:
      values: `[L, A', B']`, for the gradient of rows.
      scales: float32 `[L, A' / 128, B' / 128]`.
      turned: `[L, B', A']`, `values` transposed, for the product.
      turned_scales: float32 `[L, B' / 128, A' / 128]`.
      master: the weight `[L, A, B]`, which gets the gradient, and whose shape and dtype are read; its numbers are not.
        None until `of` sets it.
      padding: `(A' - A, B' - B)`, static. It is the same of a rank's part as of the whole weight where ranks hold whole
        blocks, and of one layer as of a stack of layers.
    """

    values: Any
    scales: Any
    turned: Any
    turned_scales: Any
    master: Any = None
    padding: tuple[int, int] = (0, 0)

    def of(self, master: jax.Array) -> Float8Weight:
        """Returns these codes as those of `master [L, A, B]`, the weight from which they were made.

        Raises:
          ValueError: the codes are those of a weight of another shape.
        """
        *before, a, b = self.values.shape
        expected = (*before, a - self.padding[0], b - self.padding[1])
        if master.shape != expected:
            raise ValueError(
                f"codes of a weight {list(expected)} with a weight {list(master.shape)}: give the weight from which "
                "quantize_weights made the codes, or make codes of this one"
            )
        return dataclasses.replace(self, master=master)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight, `[L, A, B]`; codes without a master do not know it."""
        return self.master.shape

    @property
    def ndim(self) -> int:
        """Number of dimensions of the weight."""
        return self.values.ndim

    @property
    def dtype(self) -> Any:
        """Dtype of the weight and of its gradient; codes without a master have none."""
        return self.master.dtype

    def with_master(self, change: Any) -> Float8Weight:
        """Returns the same codes, of `change(master)`."""
        return dataclasses.replace(self, master=change(self.master))

    def without_codes_gradient(self) -> Float8Weight:
        """Returns the weight; differentiating the result by its codes is a TypeError."""
        values, scales, turned, turned_scales = refuse_gradient(
            self.values, self.scales, self.turned, self.turned_scales
        )
        return Float8Weight(values, scales, turned, turned_scales, self.master, self.padding)

    def gradient(self, of_master: Any) -> Float8Weight:
        """Returns the cotangent of this weight, which holds `of_master` for the master and nothing for the codes."""
        return Float8Weight(None, None, None, None, of_master, self.padding)


export_as(Float8Weight)


def padding_of(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns the rows and columns that codes of a weight of `shape` have more than the weight."""
    return -shape[-2] % BLOCK, -shape[-1] % BLOCK


def without_codes(weight: Any) -> Any:
    """Returns the master of a `Float8Weight`, and other weights as they are: weights that travel to slots are quantized
    there."""
    return weight.master if isinstance(weight, Float8Weight) else weight
