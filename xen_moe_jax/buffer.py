"""Symmetric memory that a caller wants to own: how much an operation needs, and an object that holds it.

Only the CUDA backend has such memory; it is made on first use unless a `Buffer` made it before. TPU and reference
operations keep their communication buffers inside the compiled program, and need none.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from xen_moe_jax import _home_sums, _mesh, _validate, backends
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._quantize import Wire


def buffer_size_hint(
    *,
    num_tokens: int,
    hidden: int,
    num_ranks: int,
    top_k: int = 8,
    num_experts: int | None = None,
    dtype: Any = "bfloat16",
    wire: Any = None,
    ranks_per_node: int | None = None,
    slots_per_rank: int | None = None,
    backend: str | None = None,
) -> int:
    """Bytes of symmetric memory per rank that dispatch and combine of these shapes need, before anything is allocated.

    Args:
      num_tokens, hidden, num_ranks, top_k: `T`, `H`, `R`, `K`.
      num_experts: `E`; None assumes 256 experts or one per rank, whichever is more.
      dtype: dtype of `x` and `y`; the values' dtype for a `BlockScaled` x.
      wire: as in `dispatch`.
      ranks_per_node: the `KernelConfig.ranks_per_node` of the operations.
      slots_per_rank: `S` of a placement, with which a combine moves rows by themselves; None: experts are at home.
      backend: None asks for the one of the current mesh's platform; without a mesh, of `jax.default_backend()`.

    Returns:
      bytes; 0 for backends without symmetric memory.

    Raises:
      ValueError: an argument is out of range, or `ranks_per_node` does not divide `num_ranks`. TypeError: a size is no
        int. BackendUnavailable: `backend` cannot run here.
    """
    caller = "buffer_size_hint"
    sizes = {"num_tokens": num_tokens, "hidden": hidden, "num_ranks": num_ranks, "top_k": top_k}
    checked = {name: _validate.integer(value, name, caller, minimum=1) for name, value in sizes.items()}
    experts = max(256, num_ranks) if num_experts is None else num_experts
    checked["num_experts"] = _validate.integer(experts, "num_experts", caller, minimum=1)
    per_node = _validate.ranks_per_node(ranks_per_node, checked["num_ranks"], caller)
    parsed: Wire | None = _validate.wire(wire, caller)
    name = _validate.backend(backend, caller) or backends.for_platform(_mesh.platform())
    checked_dtype = _validate.dtype(dtype, caller)
    slots = slots_per_rank
    if slots is not None:
        slots = _validate.integer(slots, "slots_per_rank", caller, minimum=1)
    size = backends.load(name).buffer_size_hint
    if size is None:
        return 0
    backends.load(name).check_wire(parsed)
    common = {"dtype": checked_dtype, "ranks_per_node": per_node}
    if slots is None:
        return size(**checked, wire=parsed, **common)
    checked["num_experts"] = checked["num_ranks"] * slots
    rows_at_once = checked["num_tokens"] * _home_sums.slots_at_once(checked["num_tokens"], checked["top_k"])
    return size(**checked, wire=parsed, rows_at_once=rows_at_once, **common)


class Buffer:
    """Owns the symmetric memory of one mesh axis on one channel; a context manager.

    Operations over `axis_name` whose config has the same `channel` use it while it is open, and fail with a clear
    error instead of growing it if it is too small. Without a `Buffer` the library allocates on first use and keeps
    the memory.
    """

    def __init__(
        self,
        mesh: jax.sharding.Mesh,
        axis_name: str | tuple[str, str],
        *,
        num_tokens: int,
        hidden: int,
        top_k: int = 8,
        num_experts: int | None = None,
        dtype: Any = "bfloat16",
        wire: Any = None,
        size_bytes: int | None = None,
        channel: int = 0,
        ranks_per_node: int | None = None,
        slots_per_rank: int | None = None,
        backend: str | None = None,
    ) -> None:
        """Allocates at once, on every rank of the axis.

        Args:
          mesh: a mesh with devices. axis_name: its expert-parallel axis, or (slow, fast) pair.
          num_tokens, hidden, top_k, num_experts, dtype, wire, slots_per_rank: as in `buffer_size_hint`.
          size_bytes: more than the hint, for operations of other shapes on the same channel; None takes the hint.
          channel, ranks_per_node, backend: fields of the `KernelConfig`s that it serves.

        Raises:
          TypeError: `mesh` has no devices. ValueError: an axis is not in the mesh, a size is not positive,
            `ranks_per_node` does not divide the ranks, or `size_bytes` is less than the hint. BackendUnavailable: the
            backend cannot run here.
        """
        if not isinstance(mesh, jax.sharding.Mesh):
            raise TypeError(f"Buffer: mesh is a {type(mesh).__name__}: must be a jax.sharding.Mesh, which has devices")
        names = _validate.axis_names(axis_name, "Buffer")
        for name in names:
            if name not in mesh.axis_names:
                raise ValueError(f"Buffer: axis_name={axis_name!r}: the mesh has axes {mesh.axis_names}")
        ranks = math.prod(mesh.shape[name] for name in names)
        platform = mesh.devices.flat[0].platform
        self.mesh, self.axis_name = mesh, names
        self.channel = KernelConfig(channel=channel).channel
        asked = _validate.backend(backend, "Buffer")
        self.backend = asked or backends.for_platform("cuda" if platform == "gpu" else platform)
        if ranks_per_node is None:
            ranks_per_node = backends.ranks_per_node(tuple(mesh.shape[name] for name in names), self.backend)
        hint = buffer_size_hint(
            num_tokens=num_tokens,
            hidden=hidden,
            num_ranks=ranks,
            top_k=top_k,
            num_experts=num_experts,
            dtype=dtype,
            wire=wire,
            ranks_per_node=ranks_per_node,
            slots_per_rank=slots_per_rank,
            backend=self.backend,
        )
        self.size_bytes = (
            hint
            if size_bytes is None
            else _validate.integer(size_bytes, "size_bytes", "Buffer", minimum=1, maximum=None)
        )
        if self.size_bytes < hint:
            raise ValueError(
                f"Buffer: size_bytes={self.size_bytes}: operations of these shapes need {hint} bytes on every rank; "
                "pass None or more"
            )
        open_buffer = backends.load(self.backend).open_buffer
        per_node = _validate.ranks_per_node(ranks_per_node, ranks, "Buffer")
        self._closed = False
        self._memory = (
            None if open_buffer is None else open_buffer(mesh, names, self.size_bytes, self.channel, per_node)
        )

    def close(self) -> None:
        """Frees the memory on every rank. Nothing may be running on it. Closing twice is harmless.

        Where the axis spans processes, all of them must close; a process that waits in vain for another one still
        returns.
        """
        memory, self._memory = self._memory, None
        self._closed = True
        if memory is not None:
            memory.close()

    def __enter__(self) -> Buffer:
        """Raises RuntimeError if the buffer is closed."""
        if self._closed:
            raise RuntimeError(
                f"Buffer: axis_name={self.axis_name} channel={self.channel} is closed, and its memory is gone; make a "
                "new Buffer"
            )
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
