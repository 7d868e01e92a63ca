"""`Backend`: the functions that run the operations on one kind of device, and their capabilities beyond the minimum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import WIRES, Wire
from xen_moe_jax._shapes import ShapeDtype
from xen_moe_jax._spec import Spec


class BackendUnavailable(RuntimeError):
    """A backend cannot run here; the message has the reason and the package to install."""


@dataclasses.dataclass(frozen=True)
class Call:
    """Static half of one operation on routed rows: every function of a backend that moves rows takes it first.

    Attributes:
      spec: sizes and layout of the routing.
      config: tuning; its unset fields may come from a profile.
      wire: dtype that travels; None is the dtype of the operand.
      weighted: a combine multiplies rows by their router weights.
    """

    spec: Spec
    config: KernelConfig
    wire: Wire | None = None
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Exchange:
    """Static half of an `all_to_all`, a `ragged_all_to_all` or an `all_gather`.

    Attributes:
      axis_name, axis_sizes: mesh axes whose ranks exchange, the slow one first.
      axis_index_groups: groups of ranks that exchange among themselves, or None for one group of all ranks.
      config: tuning.
      split_axis, concat_axis, tiled: as in `jax.lax.all_to_all`; a `ragged_all_to_all` does not read them, and in an
        `all_gather` `concat_axis` is the argument `axis`.
      wire: format that an `all_gather` travels in; None is the dtype of the operand.
    """

    axis_name: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    axis_index_groups: Any
    config: KernelConfig
    split_axis: int = 0
    concat_axis: int = 0
    tiled: bool = False
    wire: Wire | None = None

    @property
    def groups(self) -> list[list[int]] | None:
        """`axis_index_groups` as `jax.lax` takes them."""
        return None if self.axis_index_groups is None else [list(group) for group in self.axis_index_groups]


@dataclasses.dataclass(frozen=True)
class Move:
    """Static half of moved weights and of gradients that are added up at home.

    Attributes:
      axis_name, axis_sizes: mesh axes over which a placement's ranks are numbered.
      old_slots, new_slots: slots of a rank, in the old and in the new placement.
      config: tuning.
    """

    axis_name: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    old_slots: int
    new_slots: int
    config: KernelConfig


type Operation = Callable[..., Any]
"""`operation(call, *operands)`: the static half, then the operands of the primitive (docs/design/internals.md)."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Backend:
    """Functions that run the operations. A field without a default is required; a field with a default is a capability.

    Attributes:
      name: "reference", "pallas" or "cuda".
      dispatch, combine, redispatch: take a `Call` and operands. all_to_all, ragged_all_to_all: take an `Exchange`.
      weights_to_rows, weights_from_rows: move one number for each slot of a token to its rows, and back. None: an
        all-to-all of all slots for all ranks does it.
      combine_at_home: a combine whose rows are added as at their homes (`_home_sums.py`). None: rows travel in combines
        of one slot for each token.
      move_weights, reduce_gradients: take a `Move`, arrays, and `source int32 [R, S_new]` (`_placement.py`). None: an
        exchange for each slot does it.
      all_gather, all_gather_matmul: take an `Exchange`. None: XLA's own gathers, and a matmul follows.
      gather_words: takes `words int32 [N]` and `active`, returns `[R, N]`. None: an all-gather of XLA does it.
      runs: `runs(operation, avals, static)` returns False for operands with which one of these operations does not run:
        then it is done as where there is None.
      check_available: raises `BackendUnavailable` where the backend cannot run.
      register: makes the operations known to programs that another process compiled or exported.
      takes_active: operations take `active` as an operand and wait for no inactive rank. Otherwise the operands are
        masked before the backend gets them.
      in_32_bits: operations are traced and lowered as if `jax_enable_x64` were not set. Operands keep their dtypes.
      wires: formats in which rows can travel.
      takes_nodes: a combine adds inside each node first where `KernelConfig.ranks_per_node` divides a single axis.
        Otherwise a node of the backend is an axis of the mesh.
      supports_async: `supports_async(spec, config)` returns True if start and done of an operation can be two programs.
        The functions `*_start` and `*_done` then run them.
      move_weights_start, move_weights_done: as `move_weights`, in two programs. None: the start is all of it.
      dispatch_pending, combine_pending: return the shapes and dtypes of the arrays that a start returns and its done
        takes. None: they are the buffers of the results themselves.
      received_by_xla: `received_by_xla(spec)` returns the places of pending arrays that a collective of XLA receives.
        `overlap` leaves them out of its order, because XLA would complete the collective first.
      operand_avals: `operand_avals(operation, avals, call)` returns the avals under which an operation is traced, if
        they differ from those of its operands.
      open_buffer, buffer_size_hint: make symmetric memory, and return its size in bytes. None: there is no such memory.
      ranks_per_node: `ranks_per_node(num_ranks)` returns how many consecutive ranks of an axis share a fast link; None
        if all of them do.
      failure: returns why an operation of this process gave up, or "".
    """

    name: str
    dispatch: Operation
    combine: Operation
    redispatch: Operation
    all_to_all: Operation
    ragged_all_to_all: Operation
    all_gather: Operation | None = None
    all_gather_matmul: Operation | None = None
    weights_to_rows: Operation | None = None
    weights_from_rows: Operation | None = None
    combine_at_home: Operation | None = None
    move_weights: Operation | None = None
    reduce_gradients: Operation | None = None
    gather_words: Operation | None = None
    runs: Callable[[str, Sequence[Any], Any], bool] = lambda operation, avals, static: True
    check_available: Callable[[], object] = lambda: None
    register: Callable[[], object] = lambda: None
    takes_active: bool = False
    in_32_bits: bool = False
    takes_nodes: bool = False
    wires: tuple[str, ...] = tuple(WIRES)

    supports_async: Callable[[Spec, KernelConfig], bool] = lambda spec, config: False
    dispatch_start: Operation | None = None
    dispatch_done: Operation | None = None
    combine_start: Operation | None = None
    combine_done: Operation | None = None
    move_weights_start: Operation | None = None
    move_weights_done: Operation | None = None
    dispatch_pending: Callable[..., list[ShapeDtype]] | None = None
    combine_pending: Callable[..., list[ShapeDtype]] | None = None
    received_by_xla: Callable[[Spec], tuple[int, ...]] = lambda spec: ()
    operand_avals: Callable[[str, Sequence[Any], Any], Sequence[Any]] = lambda operation, avals, call: avals

    open_buffer: Callable[..., Any] | None = None
    buffer_size_hint: Callable[..., int] | None = None
    ranks_per_node: Callable[[int], int | None] = lambda num_ranks: None
    failure: Callable[[], str] = lambda: ""

    def check_wire(self, wire: Wire | None) -> None:
        """Raises ValueError where rows cannot travel in this format."""
        if wire is not None and wire.dtype not in self.wires:
            raise ValueError(
                f"wire={wire.dtype!r}: the {self.name} backend has no kernels for it, only for {self.wires}; use one "
                "of them, or KernelConfig(backend='reference')"
            )

    def operation(self, name: str) -> Operation | None:
        """The function that runs the operation `name`, or None."""
        return getattr(self, name)
