"""The pytrees that pass between calls: arrays plus static integers, nothing hidden."""

from __future__ import annotations

import dataclasses
import json
import weakref
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax import export

from xen_moe_jax import _jax_internals
from xen_moe_jax._spec import Spec

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def pytree(*, static: tuple[str, ...] = ()) -> Callable[[type[T]], type[T]]:
    """Frozen dataclass + pytree registration, in one decorator."""

    def decorate(cls: type[T]) -> type[T]:
        cls = dataclasses.dataclass(frozen=True)(cls)
        names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
        data = [n for n in names if n not in static]
        return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=list(static))

    return decorate


@pytree()
class BlockScaled:
    """Quantized rows: `values [..., H]` (float8_e4m3fn or int8) and `scales float32 [..., ceil(H/128)]`."""

    values: Any
    scales: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `values`; the scales have one entry for every 128 of its last dimension."""
        return self.values.shape

    @property
    def dtype(self) -> Any:
        """Dtype of `values`: float8_e4m3fn or int8."""
        return self.values.dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions of `values`."""
        return self.values.ndim


@pytree(static=("spec",))
class Handle:
    """The routing of a dispatch: where each row went. Plain arrays: safe under jit, scan, remat, donation and export.

    Attributes:
      topk_idx: int32 `[T, K]`, this rank's routing, unused slots `-1`, and so are slots whose rows were not sent.
      positions: int32 `[R, T, slots]`, row of `routed.x` of each (source rank, token, slot); `-1` none, `-2` dropped.
      recv_counts: int32 `[R, L]`, real rows per source rank and local expert before those at positions beyond the
        capacity are dropped; rows that `drop="source"` or `"weight"` dropped were not sent.
      weights: float32, router weight of each row of `routed.x` (ranked: per row and slot).
      spec: static description.
      active: bool `[R]`, the ranks that took part; None where the dispatch was given none.
      placement: the `Placement` of the dispatch, whose slots `topk_idx`, `recv_counts` and `spec` number as experts;
        None where it was given none, or one whose `sums` are "rank".
      topk_weights: float32 `[T, K]`, router weights of this rank's tokens; None where `placement` is None.
    """

    topk_idx: Any
    positions: Any
    recv_counts: Any
    weights: Any
    spec: Spec
    active: Any = None
    placement: Any = None
    topk_weights: Any = None


@pytree(static=("spec",))
class ReplicatedHandle:
    """The places of `dispatch_replicated` for the rows of this rank's experts. Plain arrays, as a `Handle`.

    Attributes:
      positions: int32 `[T, K]`, row of `routed.x` of each slot; negative where this rank has none.
      weights: float32 `[T, K]`, the router weights.
      spec: static description of the rows, as of a dispatch on one rank that owns this rank's experts.
    """

    positions: Any
    weights: Any
    spec: Spec


@pytree()
class Routed:
    """Result of `dispatch` on one rank. Fields that a layout does not have are None.

    Attributes:
      x: rows. grouped `[C, H]`, ranked `[C, H]`, padded `[L, R*T, H]`; `BlockScaled` if the input was.
      group_sizes: grouped: int32 `[L]`, rows of each local expert, alignment padding included.
      num_tokens_per_expert: int32 `[L]`, real rows of each local expert.
      num_dropped: int32 `[]`, rows that did not fit under `capacity` on this rank, and rows of this rank's tokens that
        stayed at home because `active` leaves out their expert's rank, or this one.
      weights: float32 `[C]` (padded `[L, R*T]`), router weight of each row; None in the ranked layout.
      topk_idx: ranked: int32 `[C, K]`, local expert ids, `-1` elsewhere and past the last row.
      topk_weights: ranked: float32 `[C, K]`, zero where `topk_idx` is `-1`.
      handle: pass it to `combine` and `redispatch`; a `ReplicatedHandle` for `combine_replicated`.
    """

    x: Any
    group_sizes: Any
    num_tokens_per_expert: Any
    num_dropped: Any
    weights: Any
    topk_idx: Any
    topk_weights: Any
    handle: Any

    def expert_ids(self) -> jax.Array:
        """Grouped layout: int32 `[C]`, local expert of each row, `L` for the unspecified rows past the last group.

        Alignment padding belongs to its group. Use it to add values per expert: `bias[ids]` with `ids < L` as a mask.

        Raises ValueError in the other layouts: ranked rows have `topk_idx`, padded ones their first dimension.
        """
        if self.group_sizes is None:
            raise ValueError(
                f"expert_ids: layout={self.handle.spec.layout!r} has no groups of rows: the ranked layout's experts "
                "are in routed.topk_idx, the padded layout's are the first dimension of routed.x"
            )
        return experts_of_rows(self.group_sizes, self.handle.spec.capacity)


def experts_of_rows(group_sizes: jax.Array, num_rows: int) -> jax.Array:
    """int32 `[num_rows]`: the group of each row by int32 `group_sizes [L]`, `L` past the last one."""
    ends = jnp.cumsum(group_sizes, dtype=jnp.int32)
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    return jnp.sum(rows[:, None] >= ends[None, :], axis=1, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Flight:
    """A pending operation, between its `*_start` and its `*_done`. Finish it exactly once.

    A pytree, to be passed on until it is used: a `ValueError` where a finished one is returned from the body of a loop.
    """

    state: Any
    kind: str


_used_flights: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""One array of each used flight, by its identity. A copy of a flight shares the array."""


def use_flight(flight: Flight, caller: str) -> None:
    """Marks a flight as finished, or as replaced by another one.

    Raises:
      ValueError: it was used before.
    """
    if _is_used(flight):
        raise ValueError(
            f"{caller}: flight was finished before: a flight is used once, and xm.overlap returns another one in its "
            f"place. Keep the result of the first {flight.kind}_done, or call {flight.kind}_start again"
        )
    for ticket in _ticket(flight):
        _used_flights[id(ticket)] = ticket


def _ticket(flight: Flight) -> list[Any]:
    """The array that identifies a flight; an empty list where its state holds no arrays, as inside of JAX."""
    return jax.tree.leaves(getattr(flight.state, "pending", flight.state))[:1]


def _is_used(flight: Flight) -> bool:
    return any(_used_flights.get(id(ticket)) is ticket for ticket in _ticket(flight))


def _children(flight: Flight) -> tuple[Any]:
    """Raises ValueError for a flight that was used: the next turn of a loop would use it again. Raises
    NotImplementedError for a pending one of a `vmap`, whose start did nothing: a done outside would wait for ever."""
    if _is_used(flight):
        raise ValueError(
            f"Flight: a {flight.kind} flight is passed on (returned from the body of a loop, say) that was finished or "
            f"given to xm.overlap before: a flight is used once. Pass on what {flight.kind}_done or xm.overlap "
            f"returned, or the flight of another {flight.kind}_start"
        )
    if hasattr(flight.state, "pending") and any(map(_jax_internals.is_mapped, jax.tree.leaves(flight.state))):
        raise NotImplementedError(
            f"vmap of {flight.kind}_start: its flight is passed on (returned from the mapped function, say): call "
            f"{flight.kind}_done in the function that called {flight.kind}_start, or loop with jax.lax.map"
        )
    return (flight.state,)


jax.tree_util.register_pytree_with_keys(
    Flight,
    lambda flight: ([(jax.tree_util.GetAttrKey("state"), child) for child in _children(flight)], flight.kind),
    lambda kind, children: Flight(next(iter(children)), kind),
    lambda flight: (_children(flight), flight.kind),
)


@pytree()
class DispatchLayout:
    """Row counts of one rank's routing, before anything is sent.

    Attributes:
      num_tokens_per_rank: int32 `[R]`, tokens that go to each rank (each counted once a rank).
      num_tokens_per_node: int32 `[R / ranks_per_node]`, or None.
      num_tokens_per_expert: int32 `[E]`, slots that name each expert.
      is_token_in_rank: bool `[T, R]`.
    """

    num_tokens_per_rank: Any
    num_tokens_per_node: Any
    num_tokens_per_expert: Any
    is_token_in_rank: Any


@pytree()
class MoEMLPInfo:
    """Counts of one `moe_mlp` on one rank.

    Attributes:
      num_tokens_per_expert: int32 `[L]`, rows of each local expert, or of each slot. With balance="exact" on Hopper
        GPUs these are `2 L + 1`: the rank's own experts, then those that it borrowed.
      num_dropped: int32 `[]`, as in `Routed`.
    """

    num_tokens_per_expert: Any
    num_dropped: Any


def _tuples(fields: list[Any]) -> tuple[Any, ...]:
    """Static fields as they were before JSON, which has lists in place of tuples."""
    return tuple(tuple(field) if isinstance(field, list) else field for field in fields)


def export_as(cls: type, to_json: Callable[[Any], Any] = list, from_json: Callable[[Any], Any] = _tuples) -> None:
    """Makes `jax.export` serialize programs with a pytree `cls` among their arguments or results."""
    export.register_pytree_node_serialization(
        cls,
        serialized_name=f"xen_moe_jax.{cls.__name__}",
        serialize_auxdata=lambda aux: json.dumps(to_json(aux)).encode(),
        deserialize_auxdata=lambda data: from_json(json.loads(data.decode())),
    )


def _spec_from_json(fields: list[dict[str, Any]]) -> tuple[Spec]:
    (spec,) = fields
    return (Spec(**dict(zip(spec, _tuples(list(spec.values())), strict=True))),)


for _handle in (Handle, ReplicatedHandle):
    export_as(_handle, lambda aux: [dataclasses.asdict(spec) for spec in aux], _spec_from_json)
for _cls in (BlockScaled, Routed, MoEMLPInfo, Flight, DispatchLayout):
    export_as(_cls)
