"""`MoEConfig`: everything that defines an MoE layer, checked once for both Flax front ends.

Each group of fields is one module of this package, which holds the fields, their documentation and their checks.
"""

from __future__ import annotations

import dataclasses
import inspect
import math

import jax.numpy as jnp

from xen_moe_jax._numbers import plain
from xen_moe_jax._spec import worst_case_capacity
from xen_moe_jax.experts import float8
from xen_moe_jax.flax._config.balance import BalanceFields, check_balance
from xen_moe_jax.flax._config.communication import CommunicationFields, check_communication
from xen_moe_jax.flax._config.experts import ExpertFields, check_experts
from xen_moe_jax.flax._config.memory import MemoryFields, check_memory
from xen_moe_jax.flax._config.placement import PlacementFields, check_placement
from xen_moe_jax.flax._config.router import RouterFields, check_router

GROUPS = (ExpertFields, RouterFields, BalanceFields, PlacementFields, CommunicationFields, MemoryFields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig(MemoryFields, CommunicationFields, PlacementFields, BalanceFields, RouterFields, ExpertFields):
    """Sizes, routing and communication of one MoE layer. Frozen and hashable.

    All fields are keywords of one flat constructor; the groups below only document them. A wrong value raises a
    ValueError or TypeError that names the field, its value and the remedy.
    """

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # a NumPy number is a number, and narrow ones would overflow
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_experts(self)
        object.__setattr__(self, "expert_dtype", float8.dtype_name(self.expert_dtype))
        asked = self.expert_dtype, self.grouped_matmul, self.experts, self.layout
        object.__setattr__(self, "grouped_matmul", float8.choose(*asked, "MoEConfig.expert_dtype"))
        check_router(self)
        check_balance(self)
        check_placement(self)
        check_communication(self)
        check_memory(self)
        for name in ("dtype", "param_dtype"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, jnp.dtype(getattr(self, name)))

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """`axis_name` as a tuple."""
        return (self.axis_name,) if isinstance(self.axis_name, str) else tuple(self.axis_name)

    @property
    def shared_features(self) -> int:
        """Features inside the shared expert; 0 without one."""
        return self.shared_intermediate_size or self.num_shared_experts * self.intermediate_size

    @property
    def layer_axes(self) -> tuple[str, ...]:
        """Mesh axes that the layer cannot do without: the experts' and the tensor axis."""
        return self.expert_axes + ((self.tensor_axis,) if self.tensor_axis else ())

    @property
    def replicated_tokens(self) -> bool:
        """True where every rank of the expert axes has the same tokens."""
        return self.token_axes is not None and not set(self.expert_axes) & set(self.token_axes)

    @property
    def expert_entries(self) -> int:
        """Entries of the experts' parameters: experts, or slots of a placement."""
        return self.num_slots or self.num_experts

    def chunk_capacity(self, num_tokens: int, num_ranks: int, entries: int | None = None) -> int | None:
        """Rows to ask `xm.dispatch` for, one chunk of `num_tokens` tokens a rank; None is the exact worst case.
        `entries`: slots of all ranks; None is all experts."""
        entries = entries or self.num_experts
        if self.capacity_factor is None:
            return None if self.capacity is None else -(-self.capacity // self.num_chunks)
        worst = worst_case_capacity(
            layout=self.layout,
            num_ranks=num_ranks,
            num_tokens=num_tokens,
            top_k=self.top_k,
            num_experts=entries,
            alignment=self.alignment,
        )
        padding = -(-entries // num_ranks) * (self.alignment - 1)
        return min(worst, math.ceil(self.capacity_factor * num_tokens * self.top_k) + padding)


# `help(MoEConfig)` shows every field; the site's API page shows the same docstrings (tools/docs_site.py).
MoEConfig.__doc__ = "\n\n".join(inspect.cleandoc(part.__doc__ or "") for part in (MoEConfig, *GROUPS))
