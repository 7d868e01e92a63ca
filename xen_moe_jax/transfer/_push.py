"""Pushes weights from a trainer's mesh into the windows of a serving side, as a plan says; the receivers only count."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import optional_deadline
from xen_moe_jax.transfer._errors import about
from xen_moe_jax.transfer._jobs import parts_job
from xen_moe_jax.transfer._layout import box_of, leaves_by_path
from xen_moe_jax.transfer._messages import check_peer
from xen_moe_jax.transfer._plan import Piece, Plan
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteTree
from xen_moe_jax.transfer._transfer import Transfer
from xen_moe_jax.transfer._window import push_number


class Push:
    """A pending push. `wait` returns when every receiver has all that this process sends."""

    def __init__(self, transfers: list[Transfer], nbytes: int):
        self.transfers = transfers
        self.nbytes = nbytes

    def wait(self, timeout: float | None = None) -> None:
        """Waits for all transfers. Raises the error of the first that failed; the other transfers go on."""
        deadline = optional_deadline(timeout, "push")
        for transfer in self.transfers:
            transfer.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def cancel(self, timeout: float | None = None) -> bool:
        """Cancels all transfers; returns whether a part had not arrived. See `Transfer.cancel`."""
        return True in [transfer.cancel(timeout) for transfer in self.transfers]


def push(
    params,
    plan: Plan,
    peers: Iterable[Peer] | Mapping[str, Peer],
    *,
    name: str | None = None,
    staging: int = 1 << 30,
    timeout: float = 60.0,
) -> Push:
    """Writes this process's part of `params` into the open generation of every receiver's window.

    Args:
        params: the arrays of the plan's source.
        peers: the receivers, connected.
        name: the window, where the plan was made from shardings and not from layouts.
        staging: bytes of cast or cut out copies that may be in flight at once; beyond it the next array waits.
        timeout: seconds for a receiver to answer, and for room in the staging.

    Every write adds one to `window.counter` of the generation at the receiver. When the last one for a receiver has
    arrived, the permission to write is given back: the death of this process afterwards does not spoil the generation.

    Raises `KeyError` for a receiver that is not among the peers, `ValueError` for arrays that are not those of the
    plan, `TypeError` for a plan that is none, and what `Engine.write` does.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"push: plan is a {type(plan).__name__}: must be what xt.plan returned")
    if isinstance(peers, Peer | str):  # type: ignore[unreachable]
        raise ValueError(f"push: peers={peers!r} must be a collection of peers, as in [{peers!r}]")
    members = list(peers.values() if isinstance(peers, Mapping) else peers)
    for peer in members:
        check_peer(peer, "push: peers=")
    by_name = dict(peers) if isinstance(peers, Mapping) else {peer.name: peer for peer in members}
    if set(plan.windows) == {""} and len(by_name) == 1:
        by_name = {"": next(iter(by_name.values()))}
    arrays = leaves_by_path(params)
    if arrays.keys() != plan.dtypes.keys():
        raise ValueError(f"push: params and the plan differ in {sorted(arrays.keys() ^ plan.dtypes.keys())[:8]}")
    for path, (shape, dtype) in plan.sources.items():
        array, what = arrays[path], path or "the array"
        with about("push"):
            _memory.check_array(array, f"push: {what}")
        if array.shape != shape or array.dtype != dtype:
            found, planned = f"{array.dtype}{list(array.shape)}", f"{dtype}{list(shape)}"
            raise ValueError(f"push: {what} is {found}, and was {planned} when the plan was made: make another plan")
    transfers: list[Transfer] = []
    staged: deque[tuple[Transfer, int]] = deque()
    nbytes = 0
    writes = plan.of(jax.process_index())
    targets: dict[str, RemoteArray | RemoteTree] = {}
    for receiver in dict.fromkeys(receiver for receiver, _ in writes):
        window = plan.windows[receiver] or name
        if window is None:
            raise ValueError("push: the plan names no window; give name=")
        if receiver not in by_name:
            raise KeyError(f"push: the plan's receiver {receiver!r} is not among peers= {sorted(by_name)}")
        targets[receiver] = by_name[receiver].window(window, timeout)
    left = {receiver: [path for r, path in writes if r == receiver] for receiver in targets}
    for (receiver, path), pieces in writes.items():
        target = targets[receiver]
        array = target if isinstance(target, RemoteArray) else target.arrays[path]
        cut = [_cut_out(arrays[path], piece, plan.dtypes[path]) for piece in pieces]
        copies = sum(data.nbytes for data, is_copy in cut if is_copy)
        while staged and copies + sum(size for _, size in staged) > staging:
            staged[0][0].wait(timeout)
            staged.popleft()
        parts = [
            (f"{path}{list(piece.box)}", data, array[tuple(slice(*extent) for extent in piece.box)])
            for piece, (data, _) in zip(pieces, cut)
        ]
        left[receiver].remove(path)
        core = array.peer.core
        request = f"push of {path or 'the array'} to {receiver or array.peer.name!r}"
        job, sources = parts_job(core, parts, None, request, timeout)
        number = push_number(array.target.name, array.generation)
        transfer = Transfer(core, "put", request, [job], sources, number, last=not left[receiver]).start()
        transfers.append(transfer)
        nbytes += sum(data.nbytes for data, _ in cut)
        if copies:
            staged.append((transfer, copies))
    return Push(transfers, nbytes)


def _cut_out(array: Any, piece: Piece, dtype: np.dtype) -> tuple[Any, bool]:
    """Returns (the piece as an array of its own, whether it is a copy)."""
    if not isinstance(array, jax.Array):
        part = array[tuple(slice(*extent) for extent in piece.box)]
        return np.asarray(part, dtype, order="C"), True
    held = (shard.data for shard in array.addressable_shards if box_of(shard.index, array.shape) == piece.shard)
    if (data := next(held, None)) is None:
        raise ValueError(
            f"push: {piece.path or 'the array'} is {array.shape} with {array.sharding}, and this process holds no "
            f"shard {piece.shard} of it, as it did when the plan was made: make another plan"
        )
    if piece.shard == piece.box and array.dtype == dtype:
        return data, False
    starts = [start - origin for (start, _), (origin, _) in zip(piece.box, piece.shard)]
    sizes = tuple(stop - start for start, stop in piece.box)
    return _slice(data, starts, sizes, dtype), True


@functools.partial(jax.jit, static_argnums=(2, 3))
def _slice(data, starts, sizes, dtype):
    return jax.lax.dynamic_slice(data, starts, sizes).astype(dtype)
