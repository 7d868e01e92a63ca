"""The receiving side: windows that peers write into, one generation at a time, and the table of all that peers see.

A generation is `open` (peers may ask for permission to write), then `closing` (the permission was withdrawn, and peers
finish), then committed: its memory is an array of this process, which peers can no longer address, and the next
generation is open in other memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import jax

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import as_int
from xen_moe_jax.transfer._connection import Connection
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._counter import Arrivals, ImmCounter, check_imm
from xen_moe_jax.transfer._errors import PeerLost, StaleWindow, TransferTimeout, about
from xen_moe_jax.transfer._layout import Layout, leaves_by_path
from xen_moe_jax.transfer._region import Generation, Published, Region

_numbers = itertools.count(1)


def _broadcast(shardings, avals, request: str) -> list:
    """Returns a sharding or None for every array. Raises ValueError."""
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


class Window:
    """Writable, registered memory for a pytree of arrays. Made by `Engine.window`.

    Attributes: `generation` (int, of the open generation), `name`, `layout` (for `plan`).
    """

    def __init__(
        self,
        windows: Windows,
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
            if not all((size := as_int(extent)) is not None and size >= 0 for extent in aval.shape):
                raise ValueError(f"{where} has shape {tuple(aval.shape)}: must be integers of 0 or more")
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
        self._windows, self._core = windows, windows.core
        self.name = name if name is not None else "+".join(map(str, avals))
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
        self.open_generation = self._new_generation(1)

    def __repr__(self) -> str:
        return f"<Window {self.name!r}, generation {self.generation}, {self._state}>"

    def _new_generation(self, number: int) -> Generation:
        blocks = [
            _memory.Block(aval.shape, aval.dtype, sharding, self._in_place, shared=True)
            for aval, sharding in zip(self._avals, self._shardings)
        ]
        return Generation(self._core, number, self._paths, blocks)

    @property
    def generation(self) -> int:
        """Number of the open generation."""
        return self.open_generation.number

    @property
    def layout(self) -> Layout:
        """The slices that this process holds: a destination for `plan`."""
        return Layout(self._core.name, self.name, tuple(self.open_generation.region.leaves))

    def counter(self, expect: int) -> ImmCounter:
        """Counts the writes of `push` into the open generation."""
        return self._windows.counter(push_number(self.name, self.generation), expect)

    def commit(self, timeout: float | None = 30.0, last: bool = False):
        """Closes the open generation and returns its arrays, immutable from now on; opens the next one in other memory.

        Returns the pytree of `jax.Array` that the window was made for. Waits until every peer that had permission to
        write has confirmed that it writes no more; writes that were still pending end as `StaleWindow` at their sender.
        Wait for the counters *before* you commit. With `last=True` no next generation is opened (and none allocated):
        the window is closed.

        Raises `PeerLost` if a peer died that had permission to write and had not given it back: the contents are
        unknown. Call `reset()` and have the generation written again. Raises `TransferTimeout` if a peer does not
        confirm in time: commit again to go on waiting, or reset.
        """
        core, request = self._core, f"commit of generation {self.generation} of window {self.name!r}"
        with core.lock:
            self._check_usable(request)
            generation = self.open_generation
        following = None if last else self._new_generation(generation.number + 1)
        try:
            with core.lock:
                self._check_unchanged(generation, request)
                if self._state == "open":
                    self._state = "closing"
                    for writer in list(generation.writers):
                        writer.send({"t": "revoke", "w": self.number, "g": generation.number})
            try:
                core.wait(
                    lambda: self._settled(generation, request),
                    timeout,
                    lambda: f"{request}: {', '.join(sorted(repr(w.name) for w in generation.writers))} did not confirm",
                    request,
                )
            except TransferTimeout as error:
                error.peer = ", ".join(sorted(writer.name for writer in generation.writers)) or None
                raise
            with core.lock:
                self._check_unchanged(generation, request)
                generation.region.release()
                self._state = "closed" if last else "open"
                if following is not None:
                    self.open_generation = following
        except BaseException:
            if following is not None:
                with core.lock:
                    following.region.release()
            raise
        arrays = jax.tree.unflatten(self._treedef, [block.array() for block in generation.blocks])
        if self._readable:
            self._publish(arrays)
        with core.lock:
            if last:
                self._windows.forget(self)
            self._windows.answer_looks(self)
        return arrays

    def _check_unchanged(self, generation: Generation, request: str) -> None:
        """Raises StaleWindow if another thread has ended the generation since this one let go of the lock."""
        if self.open_generation is not generation or self._state == "closed":
            raise StaleWindow(f"{request}: the window was committed, reset or closed meanwhile", request=request)

    def _settled(self, generation: Generation, request: str) -> bool:
        self._check_unchanged(generation, request)
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

        The old memory is kept until every peer that had permission to write into it has confirmed, or is known to have
        ended, so that a late write cannot hit other data. It subtracts the generation's own writes from counters.
        """
        core, request = self._core, f"reset of window {self.name!r}"
        with core.lock:
            self._check_usable(request)
            old = self.open_generation
        following = self._new_generation(old.number + 1)
        with core.lock:
            try:
                self._check_unchanged(old, request)
            except StaleWindow:
                following.region.release()
                raise
            self.open_generation, self._state = following, "open"
            self._windows.arrivals.forget_generation(self.number, old.number)
            self._windows.retire(self, old)
            self._windows.answer_looks(self)
            core.changed.notify_all()

    def close(self) -> None:
        """Takes the window away from its peers; never waits. Its memory is kept until no peer can write into it."""
        with self._core.lock:
            if self._state == "closed":
                return
            self._state = "closed"
            self._windows.retire(self, self.open_generation)
            self._windows.forget(self)
            self._windows.answer_looks(self)
            self._core.changed.notify_all()
        if self._published is not None:
            self._published.close()

    def _publish(self, arrays) -> None:
        previous, self._published = self._published, self._windows.publish_committed(self, arrays)
        if previous is not None:
            previous.close()

    def _check_usable(self, request: str) -> None:
        if self._state == "closed" or self._core.closed:
            raise StaleWindow(f"{request}: the window is closed", request=request)

    # The methods from here on need the engine's lock.

    @property
    def is_closing(self) -> bool:
        """True while a `commit` waits for the peers that had permission to write."""
        return self._state == "closing"

    def is_open(self, generation: int) -> bool:
        """Returns whether peers may write into this generation."""
        return self._state == "open" and self.generation == generation

    def may_write(self, peer: Connection) -> bool:
        """Returns whether the peer is one of the window's writers."""
        return self._writers is None or peer.name in self._writers


def push_number(window: str, generation: int) -> str:
    """Returns the number that the writes of a `push` into this generation count with."""
    return f"push:{window}:{generation}"


class Windows:
    """The part of an engine that its peers can see: windows, published arrays, and counters. It answers their
    questions.

    Attributes: `arrivals`, `retired` (generations that were thrown away, whose memory a peer may still address).
    Methods need the engine's lock, except `add`, `publish`, `publish_committed` and `counter`.
    """

    def __init__(self, core: Core):
        self.core, self.arrivals = core, Arrivals()
        self.retired: list[tuple[Window, Generation]] = []
        self._by_number: dict[int, Window] = {}
        self._names: dict[str, tuple[Window, str]] = {}
        self._published: dict[str, tuple[Published, str]] = {}
        self._leases: dict[tuple[int, int], Published] = {}
        self._waiting_looks: list[tuple[Connection, dict]] = []

    def all(self) -> list[Window]:
        """Returns the windows that are not closed."""
        return list(self._by_number.values())

    def counter(self, imm: Any, expect: int, source: Connection | None = None) -> ImmCounter:
        """Returns a counter of arrivals."""
        return ImmCounter(self.core, self.arrivals, check_imm(imm), expect, source)

    def add(self, window: Window, names: dict[str, str]) -> None:
        """Shows a window to peers; `names` has the path of the subtree that each name stands for."""
        with self.core.lock:
            if taken := [n for n in names if n in self._names or n in self._published]:
                window.open_generation.region.release()
                raise ValueError(f"window: the names {taken} are taken; close what has them first")
            self._by_number[window.number] = window
            self._names.update({n: (window, prefix) for n, prefix in names.items()})

    def publish(self, name: str, tree) -> Published:
        """Shows arrays to peers, in place of the arrays published under the name before."""
        with about(f"publish {name!r}"):
            published = Published(self.core, name, tree, self._forget_published)
        with self.core.lock:
            if name in self._names:
                published.close()
                raise ValueError(
                    f"publish: the name {name!r} is a window's; close the window first, or make it readable"
                )
            previous, _ = self._published.get(name, (None, ""))
            self._published[name] = (published, "")
        if previous is not None:
            previous.close()
        return published

    def publish_committed(self, window: Window, arrays) -> Published:
        """Shows the committed arrays of a window to peers, under the window's names."""
        published = Published(self.core, window.name, arrays, self._forget_published)
        with self.core.lock:
            for name, (owner, prefix) in self._names.items():
                if owner is window:
                    self._published[name] = (published, prefix)
        return published

    def close_published(self) -> None:
        """Hides everything that is published."""
        for published in {id(p): p for p, _ in self._published.values()}.values():
            published.close()

    def forget(self, window: Window) -> None:
        """Hides a window."""
        self._by_number.pop(window.number, None)
        self._names = {name: entry for name, entry in self._names.items() if entry[0] is not window}

    def _forget_published(self, published: Published) -> None:
        self._published = {name: entry for name, entry in self._published.items() if entry[0] is not published}

    def retire(self, window: Window, generation: Generation) -> None:
        """Withdraws the permissions for a generation that was thrown away; its memory is kept meanwhile."""
        self.retired.append((window, generation))
        for writer in list(generation.writers):
            writer.send({"t": "revoke", "w": window.number, "g": generation.number})
        self.release_retired()

    def release_retired(self) -> None:
        """Gives back the memory of retired generations that peers can no longer address."""
        if not self.retired:
            return
        kept = []
        for window, generation in self.retired:
            generation.lost = [peer for peer in generation.lost if not peer.has_ended()]
            if generation.writers or generation.lost:
                kept.append((window, generation))
            else:
                generation.region.release()
        self.retired = kept

    def lose(self, peer: Connection) -> None:
        """Ends the permissions and leases of a peer that is lost."""
        for window in self._by_number.values():
            window.open_generation.lose(peer)
        for _, generation in self.retired:
            generation.lose(peer)
        for key in [key for key in self._leases if key[0] == peer.number]:
            self._leases.pop(key).give_back()
        self._waiting_looks = [(p, head) for p, head in self._waiting_looks if p is not peer]

    # Frames of peers.

    def answer_looks(self, window: Window) -> None:
        """Answers the peers that asked for this window while it was closing."""
        ready = [(p, head) for p, head in self._waiting_looks if self._names.get(head["name"], (window,))[0] is window]
        self._waiting_looks = [entry for entry in self._waiting_looks if entry not in ready]
        for peer, head in ready:
            self.on_look(peer, head)

    def on_look(self, peer: Connection, head: dict) -> None:
        """Answers a peer that asks for the arrays of a name."""
        name = head["name"]
        window, prefix = self._names.get(name, (None, ""))
        region: Region
        if window is not None and window.may_write(peer):
            if window.is_closing:
                self._waiting_looks.append((peer, head))
                return
            region = window.open_generation.region
            number, generation, writable = window.number, window.generation, True
        elif name in self._published:
            published, prefix = self._published[name]
            region, number, generation, writable = published.region, 0, 0, False
        else:
            why = "is not for this peer" if window is not None else "does not exist"
            known = sorted(n for n, (w, _) in self._names.items() if w.may_write(peer)) + sorted(self._published)
            text = f"window {name!r} of {self.core.name!r} {why}; this peer can see {known}"
            _refuse(peer, head, "TransferRefused", text)
            return
        reply = {"t": "here", "q": head["q"], "w": number, "g": generation, "prefix": prefix, "writable": writable}
        peer.send(reply | {"leaves": region.describe(with_memory=False)})

    def on_open(self, peer: Connection, head: dict) -> None:
        """Answers a peer that asks for permission to write into a generation."""
        window = self._by_number.get(head["w"])
        name, owner = head["name"], self.core.name
        if window is None and name in self._published:
            _refuse(peer, head, "TransferRefused", f"{name!r} of {owner!r} is published: it is only read")
        elif window is None:
            _refuse(peer, head, "StaleWindow", f"window {name!r} of {owner!r} was closed")
        elif not window.may_write(peer):
            _refuse(peer, head, "TransferRefused", f"window {name!r} of {owner!r} is not for {peer.name!r}")
        elif not window.is_open(head["g"]):
            text = f"generation {head['g']} of window {name!r} of {owner!r} is not open any more"
            _refuse(peer, head, "StaleWindow", f"{text}; take peer[{name!r}] again")
        else:
            window.open_generation.writers.add(peer)
            leaves = window.open_generation.region.describe(with_memory=True)
            peer.send(
                {"t": "grant", "q": head["q"], "w": window.number, "g": head["g"], "name": name, "leaves": leaves}
            )

    def on_revoked(self, peer: Connection, head: dict) -> None:
        """Takes back the permission that a peer returns."""
        window = self._by_number.get(head["w"])
        if window is not None and window.generation == head["g"]:
            window.open_generation.writers.discard(peer)
        for window, generation in self.retired:
            if (window.number, generation.number) == (head["w"], head["g"]):
                generation.writers.discard(peer)

    def on_imm(self, peer: Connection, head: dict) -> None:
        """Counts a write of a peer that has arrived; with `last`, the peer gives its permission back as well."""
        window, imm = self._by_number.get(head["w"]), check_imm(head["k"])
        # A number that was seen before, or a generation that is not open, counts nothing.
        if not peer.arrivals_seen.add(head["n"]):
            return
        if window is not None and window.generation == head["g"] and peer in window.open_generation.writers:
            if not self.arrivals.add(imm, (peer, head["w"], head["g"])):
                peer.lose("it counts too many different numbers; close counters that have been waited for")
        if head.get("last"):
            self.on_revoked(peer, head)

    def on_lease(self, peer: Connection, head: dict) -> None:
        """Grants a lease to a peer that begins to read published arrays."""
        published, _ = self._published.get(head["name"], (None, ""))
        if published is None or not published.intact():
            text = f"{self.core.name!r} has published nothing named {head['name']!r}"
            if published is not None:
                text = f"{self.core.name!r} has donated or deleted {head['name']!r}: publish it again"
            _refuse(peer, head, "TransferRefused", text)
            return
        published.lease()
        self._leases[peer.number, head["q"]] = published
        leaves = published.region.describe(with_memory=True)
        peer.send({"t": "leased", "q": head["q"], "l": head["q"], "leaves": leaves})

    def on_release(self, peer: Connection, head: dict) -> None:
        """Ends a peer's lease, and answers whether the arrays were there all the time."""
        published = self._leases.pop((peer.number, head["l"]), None)
        intact = published is not None and published.intact()
        if published is not None:
            published.give_back()
        peer.send({"t": "released", "q": head["q"], "intact": intact})

    def on_bye(self, peer: Connection, head: dict) -> None:
        """Notes that a peer closes: it has confirmed everything, and writes no more."""
        peer.left = True
        for window in self._by_number.values():
            window.open_generation.writers.discard(peer)
        for _, generation in self.retired:
            generation.writers.discard(peer)


def _refuse(peer: Connection, head: dict, error: str, text: str) -> None:
    peer.send({"t": "no", "q": head["q"], "e": error, "m": text})
