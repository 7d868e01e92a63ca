"""Launch of a kernel: the parameters that the policy sets, and the one call of `pallas_call`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclasses.dataclass(frozen=True)
class Launch:
    """Attributes:
    block: rows or tokens per grid step.
    vmem_limit_bytes: VMEM that the compiler may use; None is its default.
    collective_id: number of the barrier semaphore of kernels that reach other ranks.
    interpret: False, or the argument of `pallas_call(interpret=)`.
    cores: TensorCores that share a device (v4 and v5p: two); kernels that reach other ranks use one,
      but for `reduce_slots` and `decode_layer`.
    """

    block: int
    vmem_limit_bytes: int | None = None
    collective_id: int = 0
    interpret: Any = False
    cores: int = 1

    def call(
        self,
        body: Callable[[Any], None],
        refs: Callable[..., Any],
        names: Sequence[str],
        *,
        name: str,
        remote: bool,
        by_dma: bool,
        grid_spec: Any,
        out_shape: Any,
        aliases: dict[int, int] | None = None,
        pending: bool = False,
        shared: bool = False,
    ) -> Callable:
        """`pallas_call` of a body that takes its references as one structure.

        Args:
          refs: makes the structure, out of the references `names` (scalars, inputs, outputs, scratch) as keywords.
          remote: the kernel reaches other ranks: it takes part in the entry barrier and is never removed or duplicated.
          by_dma: the results are written by DMAs that the kernel starts.
          out_shape: (shape, dtype), or a list of them and of semaphore types.
          shared: the steps of the first dimension of the grid are independent: cores divide them among each other.
          pending: DMAs outlive the kernel: it is ordered by its operands and results, and otherwise left alone.
        """
        many = isinstance(out_shape, list)
        # an output that DMAs write, a peer's too, must lie in HBM; XLA may place an output of the pipeline anywhere
        kind = pltpu.HBM if by_dma else jax.ShapeDtypeStruct
        shapes = [
            kind(s[0], jnp.dtype(s[1])) if isinstance(s, tuple) else s for s in (out_shape if many else [out_shape])
        ]
        rank = len(grid_spec.grid)
        semantics = ["parallel" if shared and i == 0 else "arbitrary" for i in range(rank)]
        call = pl.pallas_call(
            lambda *given: body(refs(**dict(zip(names, given, strict=True)))),
            grid_spec=grid_spec,
            out_shape=shapes if many else shapes[0],
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=tuple(semantics) or None,  # type: ignore[arg-type]
                collective_id=self.collective_id if remote else None,
                has_side_effects=pltpu.SideEffectType.DATAFLOW_SIDE_EFFECTING if pending else remote,
                vmem_limit_bytes=self.vmem_limit_bytes,
                # every row number comes from a table that routing arithmetic made and checked; a check costs more
                # scalar work than the DMA that it guards
                disable_bounds_checks=True,
            ),
            interpret=self.interpret,
            name=name,
        )

        def with_32_bits(*operands: jax.Array) -> Any:
            # a TPU computes row numbers in 32 bits: a number in a body is no int64 where jax_enable_x64 is set
            with jax.enable_x64(False):
                return call(*operands)

        return with_32_bits


def precision(dtype: Any) -> jax.lax.Precision | None:
    """Returns the precision of a matmul of operands of `dtype` in a kernel.

    Products of operands of less than 32 bits are exact in float32, and Mosaic refuses any other precision for them:
    `jax_default_matmul_precision` holds for float32 operands alone.
    """
    return None if jnp.dtype(dtype).itemsize >= 4 else jax.lax.Precision.DEFAULT


def divided(steps: Any, cores: int) -> Any:
    """Steps of each core."""
    return (steps + (cores - 1)) // cores


def block_rows(wanted: int, available: int, group: int) -> int:
    """Rows per grid step: a multiple of `group`, or all there are if that is less than one group."""
    if available < group:
        return available
    return max(group, min(wanted, available) // group * group)


def for_row_groups(rows: int, group: int, work: Callable[[Any], None]) -> None:
    """Calls `work(slice of rows)` for each group of a block: a loop, so that the program does not grow with the
    block.
    """
    if rows <= group:
        work(pl.ds(0, rows))
        return

    @pl.loop(0, rows // group)
    def _(i: Any) -> None:
        work(pl.ds(pl.multiple_of(i * group, group), group))


def tile_rows(*dtypes: Any) -> int:
    """Smallest number of rows that is whole tiles for every dtype: 8 of 32 bits, 16 of 16, 32 of 8."""
    return max(32 // jnp.dtype(d).itemsize for d in dtypes)
