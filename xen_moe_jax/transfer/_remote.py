"""The sending side: a peer, its windows, and the arrays in them as targets of writes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from xen_moe_jax.transfer._channel import Channel
from xen_moe_jax.transfer._checks import as_int, check_name
from xen_moe_jax.transfer._connection import Connection, Grant, Template
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused, stale_window
from xen_moe_jax.transfer._layout import Box, Layout, Leaf, Pages, Shard, copy_runs, shift
from xen_moe_jax.transfer._repeat import Repeat
from xen_moe_jax.transfer._transfer import Runs
from xen_moe_jax.transfer._wire import Link, at_address

MAX_TEMPLATES = 1024
PagesKey = tuple[bytes, bytes]


class Peer(Connection):
    """Another engine, connected. `peer["kv"]` is its window of that name.

    Attributes: `name`, `process` (host and process number), `lost` (the reason why it is lost, or None).
    """

    def __init__(
        self,
        core: Core,
        number: int,
        channel: Channel,
        link: Link,
        hello: dict[str, Any],
        on_lost: Callable[[Peer], None],
        disconnect: Callable[[Peer], None],
    ):
        super().__init__(core, number, channel, link, hello, on_lost)
        self._disconnect = disconnect

    def __repr__(self) -> str:
        return f"<Peer {self.name!r}{': ' + self.lost if self.lost else ''}>"

    def __getitem__(self, name: str) -> RemoteArray | RemoteTree:
        """Returns the window `name` in its open generation. Asks the peer; raises `TransferRefused`, `PeerLost`,
        `TransferTimeout`.
        """
        return self.window(name)

    def window(self, name: str, timeout: float = 30.0) -> RemoteArray | RemoteTree:
        """Returns `peer[name]`, with a time limit in seconds."""
        check_name(name, f"window of {self.name!r}")
        reply = self.ask({"t": "look", "name": name}, timeout, f"window {name!r} of {self.name!r}")
        leaves = {record["p"]: Leaf.from_json(record) for record in reply["leaves"]}
        target = RemoteWindow(self, name, int(reply["w"]), int(reply["g"]), bool(reply["writable"]), leaves)
        return remote(target, str(reply["prefix"]))

    def close(self) -> None:
        """Ends the connection; returns when nothing of this process can be written at the peer any more.

        The name is free then: another process may connect under it, also while this peer's process is stopped.
        """
        self._disconnect(self)


class RemoteWindow:
    """One generation of a peer's window. The permission to write is asked for at the first write."""

    def __init__(self, peer: Peer, name: str, window: int, generation: int, writable: bool, leaves: dict[str, Leaf]):
        self.peer, self.name, self.window, self.generation = peer, name, window, generation
        self.writable, self.leaves = writable, leaves
        self._grant: Grant | None = None

    def grant(self, request: str, timeout: float) -> Grant:
        """Returns the permission to write. Raises `StaleWindow`, `TransferRefused`, `PeerLost`, `TransferTimeout`."""
        if self._grant is None or not self._grant.open:
            self._grant = self._ask(request, timeout)
        return self._grant

    def _ask(self, request: str, timeout: float) -> Grant:
        lock = self.peer.core.lock
        with lock:
            if held := self.peer.grants.get((self.window, self.generation)):
                if not held.open:
                    raise held.stale_error(request)
                return held
        # The reply installs the grant in the order of frames, so that a frame that revokes it finds it.
        self.peer.ask({"t": "open", "name": self.name, "w": self.window, "g": self.generation}, timeout, request)
        with lock:
            if held := self.peer.grants.get((self.window, self.generation)):
                return held
        raise stale_window(request, self.peer.name, self.name, self.generation)


class _Addressed:
    """Memory of one generation of a peer's window."""

    target: RemoteWindow

    @property
    def generation(self) -> int:
        """Number of the generation of the peer's window that this addresses."""
        return self.target.generation

    @property
    def peer(self) -> Peer:
        """The peer that owns the memory."""
        return self.target.peer


class RemoteTree(_Addressed):
    """Part of a window that holds several arrays; `tree["layer"]["k"]` goes down, as in the owner's pytree."""

    def __init__(self, target: RemoteWindow, prefix: str):
        self.target, self._prefix = target, prefix

    def __getitem__(self, key: str | int) -> RemoteArray | RemoteTree:
        return remote(self.target, f"{self._prefix}/{key}" if self._prefix else str(key))

    @property
    def arrays(self) -> dict[str, RemoteArray]:
        """Every array below, by its path from here."""
        inside = f"{self._prefix}/" if self._prefix else ""
        return {
            path[len(inside) :]: RemoteArray(self.target, leaf)
            for path, leaf in self.target.leaves.items()
            if path.startswith(inside)
        }

    @property
    def layout(self) -> Layout:
        """The slices that the peer holds: a destination for `plan`."""
        return Layout(self.peer.name, self.target.name, tuple(self.target.leaves.values()))

    def __repr__(self) -> str:
        return f"<{self.target.name}/{self._prefix} of {self.peer.name!r}, generation {self.generation}>"


class RemoteArray(_Addressed):
    """An array of a peer's window, or a rectangle of it: `array[3]`, `array[:, 8:16]` (integers and slices of step
    1).
    """

    def __init__(self, target: RemoteWindow, leaf: Leaf, box: Box | None = None, dropped: tuple[int, ...] = ()):
        self.target, self.leaf = target, leaf
        self._box = box if box is not None else tuple((0, extent) for extent in leaf.shape)
        self._dropped = dropped
        self.shape = tuple(stop - start for axis, (start, stop) in enumerate(self._box) if axis not in dropped)
        self.dtype = leaf.dtype
        self.repeats: dict[PagesKey | None, Repeat] = {}
        self._text: str | None = None

    @property
    def layout(self) -> Layout:
        """The slices that the peer holds: a destination for `plan`."""
        return Layout(self.peer.name, self.target.name, (self.leaf,))

    def __repr__(self) -> str:
        if self._text is None:  # Every write names its target, should it fail.
            what = f"{self.target.name}/{self.leaf.path}" if self.leaf.path else self.target.name
            self._text = f"<{what} {self.dtype}{list(self.shape)} of {self.peer.name!r}, generation {self.generation}>"
        return self._text

    def __getitem__(self, index) -> RemoteArray:
        index = index if isinstance(index, tuple) else (index,)
        axes = [axis for axis in range(len(self._box)) if axis not in self._dropped]
        if len(index) > len(axes):
            raise IndexError(f"{len(index)} indices for {self!r}")
        box, dropped = list(self._box), set(self._dropped)
        for axis, piece in zip(axes, index):
            start, stop = box[axis]
            if isinstance(piece, slice):
                low, high, step = piece.indices(stop - start)
                if step != 1:
                    raise IndexError(f"slice {piece} of {self!r}: the step must be 1")
                box[axis] = (start + low, start + max(low, high))
            else:
                if (number := as_int(piece)) is None:
                    raise IndexError(f"index {piece!r} of {self!r}: must be an integer or a slice")
                at = number + (stop - start if number < 0 else 0)
                if not 0 <= at < stop - start:
                    raise IndexError(f"index {piece} of {self!r}, axis {axis} has {stop - start}")
                box[axis] = (start + at, start + at + 1)
                dropped.add(axis)
        return RemoteArray(self.target, self.leaf, tuple(box), tuple(sorted(dropped)))

    def runs(
        self,
        local: Sequence[Shard],
        shards: Sequence[Shard],
        pages: Pages | None = None,
        templates: dict[tuple, list[Template]] | None = None,
    ) -> list[Runs]:
        """Returns the runs between local shards (of an array of this rectangle's shape) and the peer's `shards`.

        With `pages`, the first dimension is the paged one. `templates` keeps the parts that do not depend on the local
        addresses, for the next write of the same shape to the same place.
        """
        if templates is None:
            found = self._templates(local, shards, pages)
        else:
            boxes = (local[0].box,) if len(local) == 1 else tuple(here.box for here in local)
            place = (self.leaf.path, self._box, self._dropped, boxes)
            key = place if pages is None else (*place, pages[0].tobytes(), pages[1].tobytes())
            known = templates.get(key)
            if known is None:
                if len(templates) >= MAX_TEMPLATES:
                    templates.clear()
                known = templates[key] = self._templates(local, shards, pages)
            found = known
        placed: dict[tuple[bytes, str, int], list[np.ndarray]] = {}
        for number, remote_key, memory, template in found:
            gpu = number if memory == "cuda" else 0  # Each GPU copies its own part.
            placed.setdefault((remote_key, memory, gpu), []).append(at_address(template, local[number].pointer))
        return [
            Runs(*where[:2], sum(int(piece[:, 2].sum()) for piece in runs), np.concatenate(runs))
            for where, runs in placed.items()
        ]

    def _templates(self, local: Sequence[Shard], shards: Sequence[Shard], pages: Pages | None) -> list[Template]:
        axes = [axis for axis in range(len(self._box)) if axis not in self._dropped]
        offsets = [start for start, _ in self._box]
        axis = axes[0] if axes else 0
        shifted_pages = None if pages is None else (pages[0] + offsets[axis], pages[1] + offsets[axis])
        result: list[Template] = []
        for there in shards:
            for number, here in enumerate(local):
                full: list[tuple[int, int]] = [(0, 1)] * len(self._box)
                for axis_here, axis_there in enumerate(axes):
                    full[axis_there] = here.box[axis_here]
                source = shift(tuple(full), offsets)
                runs = copy_runs(source, there.box, self.dtype.itemsize, shifted_pages, axis)
                if len(runs):
                    result.append((number, there.key, here.memory, runs + np.array([0, there.pointer, 0], np.int64)))
        return result


def remote(target: RemoteWindow, path: str) -> RemoteArray | RemoteTree:
    if path in target.leaves:
        return RemoteArray(target, target.leaves[path])
    if path and not any(known.startswith(f"{path}/") for known in target.leaves):
        raise KeyError(
            f"window {target.name!r} of {target.peer.name!r} has no {path!r}; it has {sorted(target.leaves)}"
        )
    return RemoteTree(target, path)


def _sides(pages: Any) -> Pages:
    """Returns both sides of `pages` as int64 arrays. Raises `TransferRefused` if they are no pair of integers."""
    try:
        source, destination = pages
    except (TypeError, ValueError):
        raise TransferRefused(f"pages={pages!r} must be (source pages, destination pages)") from None
    return _indices(source), _indices(destination)


def _indices(side: Any) -> np.ndarray:
    indices = np.asarray(side)
    if indices.size and indices.dtype.kind not in "iu":
        raise TransferRefused(f"pages: {side!r} has dtype {indices.dtype}: must be integers")
    return indices.astype(np.int64, copy=False).reshape(-1)


def pages_key(pages: Any) -> PagesKey:
    source, destination = _sides(pages)
    return source.tobytes(), destination.tobytes()


def check_pages(pages, parts: list[tuple[str, Any, RemoteArray]], request: str) -> Pages:
    """Returns (source pages, destination pages) as arrays. Raises `TransferRefused`."""
    source, destination = _sides(pages)
    for label, array, target in parts:
        extents = (array.shape[0] if array.shape else None, target.shape[0] if target.shape else None)
        if fault := _pages_fault(source.tobytes(), destination.tobytes(), *extents):
            raise TransferRefused(f"{request}: {fault.format(label=label)}", peer=target.peer.name, request=request)
    return source, destination


@functools.lru_cache(maxsize=256)
def _pages_fault(source_pages: bytes, destination_pages: bytes, rows: int | None, target_rows: int | None) -> str:
    """Returns the error in `pages` for a source and a target with these numbers of rows, or ""."""
    source, destination = (np.frombuffer(side, np.int64) for side in (source_pages, destination_pages))
    if len(source) != len(destination):
        return f"{len(source)} source pages for {len(destination)} destination pages"
    if len(np.unique(destination)) != len(destination):
        return "a destination page is named twice; transfers have no order"
    sides = ("source", "{label}", source, rows), ("destination", "the target of {label}", destination, target_rows)
    for side, where, indices, extent in sides:
        if extent is None:
            return f"{where} has no dimension to count pages along"
        if len(indices) and not 0 <= indices.min() <= indices.max() < extent:
            return f"{side} pages {int(indices.min())}..{int(indices.max())} of {where}, which has {extent}"
    return ""
