"""How a kernel is launched: the knobs that policy sets, and the one place that calls `pallas_call`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
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
    interpret: False, or what `pallas_call(interpret=)` takes.
    varying: mesh axes that the results vary over.
    """

    block: int
    vmem_limit_bytes: int | None = None
    collective_id: int = 0
    interpret: Any = False
    varying: frozenset[str] = frozenset()

    def call(
        self,
        body: Callable,
        *,
        name: str,
        remote: bool,
        grid_spec: Any,
        out_shape: Any,
        aliases: dict[int, int] | None = None,
    ) -> Callable:
        """`pallas_call` with results in HBM.

        Args:
          remote: the kernel reaches other ranks: it takes part in the entry barrier and is never removed or duplicated.
          out_shape: (shape, dtype), or a list of them.
        """
        many = isinstance(out_shape, list)
        shapes = [self.hbm(*s) for s in (out_shape if many else [out_shape])]
        rank = len(grid_spec.grid)
        return pl.pallas_call(
            body,
            grid_spec=grid_spec,
            out_shape=shapes if many else shapes[0],
            input_output_aliases=aliases or {},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("arbitrary",) * rank if rank else None,
                collective_id=self.collective_id if remote else None,
                has_side_effects=remote,
                vmem_limit_bytes=self.vmem_limit_bytes,
            ),
            interpret=self.interpret,
            name=name,
        )

    def hbm(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """An HBM result: `ANY` would let the compiler keep it in VMEM, where no peer may write."""
        if self.varying:
            return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), vma=self.varying)
        return pltpu.HBM(shape, jnp.dtype(dtype))
