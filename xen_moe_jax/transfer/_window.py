"""The receiving side: windows that peers write into, one generation at a time, and arrays that peers may read.

A generation is `open` (peers may ask for leave to write), `closing` (leave was withdrawn, peers are finishing), and
then committed: its memory is an array of this process, which no peer can address any more, and the next generation is
open in other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax

from xen_moe_jax.transfer import _cuda_memory, _memory
from xen_moe_jax.transfer._counter import ImmCounter
from xen_moe_jax.transfer._errors import PeerLost, StaleWindow, TransferTimeout
from xen_moe_jax.transfer._layout import Leaf, Shard, leaves_by_path
from xen_moe_jax.transfer._plan import Layout

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine
    from xen_moe_jax.transfer._remote import Peer
    from xen_moe_jax.transfer._wire import Memory

_numbers = itertools.count(1)


def _broadcast(shardings, avals, request: str) -> list:
    """A sharding or None for every array. Raises ValueError."""
    if shardings is None or isinstance(shardings, jax.sharding.Sharding):
        return [shardings] * len(jax.tree.leaves(avals))
    structure: Any = jax.tree.structure(avals)
    try:
        flat = structure.flatten_up_to(shardings)
    except ValueError as cause:
        raise ValueError(
            f"{request}: shardings must be one sharding, or a pytree of shardings like avals: {cause}"
        ) from None
    for given in flat:
        if given is not None and not isinstance(given, jax.sharding.Sharding):
            raise ValueError(
                f"{request}: shardings={given!r} must be jax.sharding.Sharding (a spec needs its mesh: "
                "jax.NamedSharding(mesh, spec))"
            )
    return flat


class Region:
    """Registered memory of the arrays of one generation, or of one published tree."""

    def __init__(self, engine: Engine, leaves: list[tuple[str, tuple[int, ...], Any, list[Shard]]]):
        self._memories: list[Memory] = []
        self._copies: list[_cuda_memory.DeviceMemory] = []
        self.leaves: list[Leaf] = []
        with engine._lock:
            try:
                for path, shape, dtype, shards in leaves:
                    registered = []
                    for shard in shards:
                        if not (nbytes := _memory.shard_bytes(shard, dtype.itemsize)):
                            continue
                        pointer = shard.pointer
                        if shard.memory == "cuda" and (copied := _cuda_memory.shareable_copy(pointer, nbytes)):
                            self._copies.append(copied)
                            pointer = copied.pointer
                        memory = engine._wire.register(pointer, nbytes, shard.memory)
                        self._memories.append(memory)
                        registered.append(Shard(shard.box, pointer, shard.memory, memory.key))
                    self.leaves.append(Leaf(path, shape, dtype, tuple(registered)))
            except BaseException:
                self.release()
                raise

    def describe(self, with_memory: bool) -> list[dict]:
        records = [leaf.to_json() for leaf in self.leaves]
        if not with_memory:
            for record in records:
                record["h"] = [{"b": shard["b"], "a": 0, "m": shard["m"], "k": ""} for shard in record["h"]]
        return records

    def release(self) -> None:
        for memory in self._memories:
            memory.release()
        self._memories, self._copies = [], []


class _Generation:
    """Memory of one generation, who may write into it, and who has not yet confirmed that nothing more comes."""

    def __init__(self, engine: Engine, window: Window, number: int):
        self.number = number
        self.blocks = [
            _memory.Block(a.shape, a.dtype, s, window._in_place, shared=True)
            for a, s in zip(window._avals, window._shardings)
        ]
        self.region = Region(
            engine, [(path, b.shape, b.dtype, b.shards) for path, b in zip(window._paths, self.blocks)]
        )
        self.writers: set[Peer] = set()
        self.lost: list[Peer] = []


class Window:
    """Writable, registered memory for a pytree of arrays. Made by `Engine.window`.

    Attributes: `generation` (int, of the open generation), `name`, `layout` (for `plan`).
    """

    def __init__(
        self,
        engine: Engine,
        avals,
        shardings,
        name: str | None,
        writers: Collection[str] | None,
        readable: bool,
        in_place: bool,
    ):
        flat, self._treedef = jax.tree.flatten(avals)
        self._paths = list(leaves_by_path(avals))
        request = "window" if name is None else f"window {name!r}"
        if not flat:
            raise ValueError(f"{request}: avals is a pytree without arrays")
        for path, aval in zip(self._paths, flat):
            where = f"{request}: {path or 'avals'}"
            if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
                raise ValueError(f"{where} is a {type(aval).__name__}: must be a jax.ShapeDtypeStruct or an array")
            _memory.check_dtype(aval.dtype, where)
        self._shardings = [
            given if given is not None else getattr(aval, "sharding", None)
            for given, aval in zip(_broadcast(shardings, avals, request), flat)
        ]
        for path, aval, sharding in zip(self._paths, flat, self._shardings):
            if sharding is not None:
                try:
                    sharding.shard_shape(aval.shape)
                except ValueError as cause:
                    raise ValueError(f"{request}: {path or 'avals'} cannot be split so: {cause}") from None
        self._avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in flat]
        self._engine, self.name = engine, name if name is not None else "+".join(map(str, avals))
        if isinstance(writers, str):  # its letters would be the names
            raise ValueError(f"window: writers={writers!r} must be a collection of names, as in [{writers!r}]")
        if writers is not None and not (
            isinstance(writers, Collection) and all(isinstance(writer, str) for writer in writers)
        ):
            raise ValueError(f"window: writers={writers!r} must be a collection of peers' names, or None for all")
        self._writers = None if writers is None else frozenset(writers)
        self._readable, self._in_place = readable, in_place
        self.number = next(_numbers)
        self._published: Published | None = None
        self._state = "open"
        self._open = _Generation(engine, self, 1)
        self._finishing: dict[int, _Generation] = {}

    def __repr__(self) -> str:
        return f"<Window {self.name!r}, generation {self.generation}, {self._state}>"

    @property
    def generation(self) -> int:
        """Number of the open generation."""
        return self._open.number

    @property
    def layout(self) -> Layout:
        """Who holds which slice: what `plan` wants to know of a destination."""
        return Layout(self._engine.name, self.name, tuple(self._open.region.leaves))

    def counter(self, expect: int) -> ImmCounter:
        """Counts the writes of `push` into the open generation."""
        return self._engine.counter(push_number(self.name, self.generation), expect=expect)

    def commit(self, timeout: float | None = 30.0, last: bool = False):
        """Closes the open generation and returns its arrays, immutable from now on; opens the next one in other memory.

        Returns the pytree of `jax.Array` that the window was made for. It waits until every peer that had leave to
        write has confirmed that nothing of it can land any more; writes that were still on their way end as
        `StaleWindow` at their sender. Count what you need *before* you commit. With `last=True` no next generation is
        opened (and none allocated): the window is closed.

        Raises `PeerLost` where a peer died that had leave to write and had not given it back: what it left is unknown.
        `reset()` and have it written again. Raises `TransferTimeout` where a peer does not confirm in time (commit
        again to go on waiting, or reset).
        """
        engine, request = self._engine, f"commit of generation {self.generation} of window {self.name!r}"
        with engine._lock:
            self._check_usable(request)
            generation = self._open
        following = None if last else _Generation(engine, self, generation.number + 1)
        try:
            with engine._lock:
                self._check_usable(request)
                if self._state == "open":
                    self._state = "closing"
                    for writer in list(generation.writers):
                        writer.send({"t": "revoke", "w": self.number, "g": generation.number})
            try:
                engine._wait(
                    lambda: self._settled(generation, request),
                    timeout,
                    lambda: f"{request}: {', '.join(sorted(repr(w.name) for w in generation.writers))} did not confirm",
                    request,
                )
            except TransferTimeout as error:
                error.peer = ", ".join(sorted(writer.name for writer in generation.writers)) or None
                raise
        except BaseException:
            if following is not None:
                with engine._lock:
                    following.region.release()
            raise
        with engine._lock:
            generation.region.release()
            self._state = "closed" if last else "open"
            if following is not None:
                self._open = following
        arrays = jax.tree.unflatten(self._treedef, [block.array() for block in generation.blocks])
        if self._readable:
            self._publish(arrays)
        with engine._lock:
            if last:
                engine._forget_window(self)
            engine._answer_waiting(self)
        return arrays

    def _settled(self, generation: _Generation, request: str) -> bool:
        if self._open is not generation or self._state == "closed":
            raise StaleWindow(f"{request}: the window was reset or closed meanwhile", request=request)
        if generation.lost:
            names = ", ".join(f"{peer.name!r} ({peer.lost})" for peer in generation.lost)
            raise PeerLost(
                f"{request}: lost while they could write: {names}. What they left is unknown: "
                "call reset() and have it written again",
                peer=generation.lost[0].name,
                request=request,
            )
        return not generation.writers

    def reset(self) -> None:
        """Throws the open generation away and opens the next one in fresh memory; never waits for a peer.

        The old memory is not given back before every peer that had leave to write into it has confirmed, or is known to
        have ended: until then nothing else can be hit by a late write. What its writes had added to counters is taken
        back.
        """
        engine = self._engine
        with engine._lock:
            self._check_usable(f"reset of window {self.name!r}")
            number = self._open.number
        following = _Generation(engine, self, number + 1)
        with engine._lock:
            old, self._open, self._state = self._open, following, "open"
            engine._arrivals.forget_generation(self.number, old.number)
            engine._retire(self, old)
            engine._answer_waiting(self)
            engine._changed.notify_all()

    def close(self) -> None:
        """Takes the window away from its peers. Its memory goes when nothing can land in it any more; never waits."""
        with self._engine._lock:
            if self._state == "closed":
                return
            self._state = "closed"
            self._engine._retire(self, self._open)
            self._engine._forget_window(self)
            self._engine._answer_waiting(self)
            self._engine._changed.notify_all()
        if self._published is not None:
            self._published.close()

    def _publish(self, arrays) -> None:
        engine = self._engine
        previous, self._published = self._published, Published(engine, self.name, arrays)
        with engine._lock:
            for name, (window, prefix) in engine._names.items():
                if window is self:
                    engine._published[name] = (self._published, prefix)
        if previous is not None:
            previous.close()

    def _check_usable(self, request: str) -> None:
        if self._state == "closed" or self._engine.closed:
            raise StaleWindow(f"{request}: the window is closed", request=request)

    # Under the engine's lock.

    def may_write(self, peer: Peer) -> bool:
        return self._writers is None or peer.name in self._writers

    def lose(self, peer: Peer) -> None:
        """A peer is gone. One that had leave to write may have left anything."""
        if peer in self._open.writers:
            self._open.writers.discard(peer)
            self._open.lost.append(peer)

    def confirm(self, peer: Peer, number: int) -> None:
        if self._open.number == number:
            self._open.writers.discard(peer)


class Published:
    """Arrays that peers may read. Made by `Engine.publish`; a read holds them until it has ended."""

    def __init__(self, engine: Engine, name: str, tree):
        self._engine, self.name = engine, name
        flat = leaves_by_path(tree)
        for path, array in flat.items():
            _memory.check_array(array, f"publish {name!r}: {path or 'the value'}")
        jax.block_until_ready(tree)
        self._arrays = list(flat.values())
        self._kept: list[object] = []
        records = []
        for path, array in flat.items():
            dtype = _memory.check_dtype(array.dtype, f"publish {name!r}: {path or 'the array'}")
            shards, kept = _memory.local_shards(array)
            self._kept += kept
            records.append((path, tuple(array.shape), dtype, shards))
        self.region = Region(engine, records)
        self._readers = 0
        self._closed = False

    def close(self) -> None:
        """Peers find it no more. Its memory is let go when the last read has ended."""
        with self._engine._lock:
            self._closed = True
            self._engine._forget_published(self)
            self._release()

    def intact(self) -> bool:
        return not any(isinstance(a, jax.Array) and a.is_deleted() for a in self._arrays)

    def lease(self) -> None:
        self._readers += 1

    def give_back(self) -> None:
        self._readers -= 1
        self._release()

    def _release(self) -> None:
        if self._closed and not self._readers:
            self.region.release()
            self._arrays, self._kept = [], []


def push_number(window: str, generation: int) -> str:
    return f"push:{window}:{generation}"
