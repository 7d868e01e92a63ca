"""Sums of a combine: of a token's rows on the rank of their experts, and of these partial sums on the token's rank."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from xen_moe_jax._config import RowsInHalves
from xen_moe_jax.backends.base import Call
from xen_moe_jax.backends.pallas import hardware, plan, records
from xen_moe_jax.backends.rounding import runtime_zero
from xen_moe_jax.pallas_kernels import reduce_ranks as ranks_kernel
from xen_moe_jax.pallas_kernels import reduce_slots as slots_kernel
from xen_moe_jax.pallas_kernels.launch import Launch, tile_rows
from xen_moe_jax.pallas_kernels.order_pairs import Ordered
from xen_moe_jax.pallas_kernels.peers import Axes
from xen_moe_jax.pallas_kernels.record import LANES, Record


@dataclasses.dataclass(frozen=True)
class Sums:
    """Static half of the sums of a combine.

    Attributes:
      hidden, dtype: size and dtype of the rows as they are given and returned.
      record: a partial sum on the wire.
    """

    call: Call
    hidden: int
    dtype: Any
    record: Record

    @classmethod
    def of(cls, call: Call, y: Any) -> Sums:
        """Returns the sums of rows `y [..., H]`, an array or its aval."""
        hidden = y.shape[-1]
        return cls(call, hidden, y.dtype, records.record_of(hidden, y.dtype, False, call.wire))

    def prepared(self, y: jax.Array, recv_counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns `y` as rows that the kernels take, and `zero [1]` for additions."""
        rows = records.pad_rows(records.pad_hidden(y.reshape(-1, self.hidden)))
        return rows, lax.bitcast_convert_type(runtime_zero(recv_counts), jnp.int32).reshape(1)

    def reads_halves(self, rows: jax.Array) -> bool:
        """Returns True if `reduce_slots` reads `rows [C, H]` in halves: the config allows the experts' kernel to make
        them in this form, and on the chip being compiled for it does so."""
        made = isinstance(self.call.config, RowsInHalves) and hardware.makes_halves()
        return made and rows.dtype == jnp.bfloat16 and rows.shape[1] % (2 * LANES) == 0

    def slots_launch(self, *, halved: bool = False) -> Launch:
        """Returns the launch of `reduce_slots`, which reads rows in halves with `halved`."""
        spec = self.call.spec
        return hardware.launch(
            "reduce_slots",
            functools.partial(slots_kernel.vmem_bytes, self.record, spec.slots, halved=halved),
            preferred=32,  # half of the cost of a group of 16 is the same for a group of 32
            smallest=8,
            available=spec.num_ranks * spec.num_tokens,
            config=self.call.config,
            axes=plan.kernel_axes(spec),
            budget=max(hardware.BLOCK_BUDGET, hardware.generation().vmem_bytes // 3),
        )

    def ranks_launch(self, entries: int, tokens: int) -> Launch:
        """Returns the launch of `reduce_ranks` for `entries` partial sums of each of `tokens` tokens."""
        return hardware.launch(
            "reduce_ranks",
            functools.partial(ranks_kernel.vmem_bytes, self.record, self.dtype, entries),
            preferred=32,
            smallest=tile_rows(self.dtype),
            available=tokens,
            config=self.call.config,
        )

    def of_slots(
        self,
        rows: jax.Array,
        pairs: slots_kernel.Pairs | Ordered,
        weights: jax.Array,
        zero: jax.Array,
        launch: Launch,
        *,
        axes: Axes | None,
        cores: int = 1,
        halved: bool = False,
        into: jax.Array | None = None,
    ) -> jax.Array:
        """Adds up the rows of each pair, times `weights` if the combine is weighted, by the kernel `reduce_slots`."""
        return slots_kernel.reduce_slots(
            rows,
            pairs,
            weights.reshape(-1) if self.call.weighted else None,
            zero,
            record=self.record,
            quantize=records.quantization(self.call.wire),
            axes=axes,
            launch=launch,
            cores=cores,
            halved=halved,
            into=into,
        )

    def of_ranks(
        self,
        staged: jax.Array,
        source: jax.Array | ranks_kernel.Summands,
        zero: jax.Array,
        launch: Launch,
        *,
        tokens: int | None = None,
    ) -> jax.Array:
        """Adds up each token's partial sums, by the kernel `reduce_ranks`: `[T, H]` of the rows' dtype."""
        out = ranks_kernel.reduce_ranks(
            staged, source, zero, record=self.record, out_dtype=self.dtype, launch=launch, tokens=tokens
        )
        return out[:, : self.hidden]
