"""Registered memory: of a generation that peers write into, and of arrays that peers may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from xen_moe_jax.transfer import _cuda_memory, _memory
from xen_moe_jax.transfer._connection import Connection
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._layout import Leaf, Shard, leaves_by_path
from xen_moe_jax.transfer._wire import Memory

Record = tuple[str, tuple[int, ...], Any, list[Shard]]
"""(path, shape, dtype, local shards) of an array."""


def array_records(tree, request: str) -> tuple[list[Record], list[object]]:
    """Waits for the arrays of a tree; returns their records, and the objects to keep alive while their memory is used.

    Raises `TransferRefused` for a leaf that is not an array, or whose dtype cannot be transferred.
    """
    flat = leaves_by_path(tree)
    for path, array in flat.items():
        _memory.check_array(array, f"{request}: {path or 'the value'}")
    flat = {path: _memory.row_major(array) for path, array in flat.items()}
    jax.block_until_ready(flat)
    records: list[Record] = []
    kept: list[object] = []
    for path, array in flat.items():
        dtype = _memory.check_dtype(array.dtype, f"{request}: {path or 'the array'}")
        shards, held = _memory.local_shards(array)
        kept += held
        records.append((path, tuple(array.shape), dtype, shards))
    return records, kept


class Region:
    """Registered memory of the arrays of one generation, or of one published tree."""

    def __init__(self, core: Core, leaves: Sequence[Record]):
        self._memories: list[Memory] = []
        self._copies: list[_cuda_memory.DeviceMemory] = []
        self.leaves: list[Leaf] = []
        with core.lock:
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
                        memory = core.wire.register(pointer, nbytes, shard.memory)
                        self._memories.append(memory)
                        registered.append(Shard(shard.box, pointer, shard.memory, memory.key))
                    self.leaves.append(Leaf(path, shape, dtype, tuple(registered)))
            except BaseException:
                self.release()
                raise

    def describe(self, with_memory: bool) -> list[dict]:
        """Returns the arrays as JSON records; with their addresses and keys only if `with_memory`."""
        records = [leaf.to_json() for leaf in self.leaves]
        if not with_memory:
            for record in records:
                record["h"] = [{"b": shard["b"], "a": 0, "m": shard["m"], "k": ""} for shard in record["h"]]
        return records

    def release(self) -> None:
        """Unregisters the memory."""
        for memory in self._memories:
            memory.release()
        self._memories, self._copies = [], []


class Generation:
    """The memory of one generation of a window.

    Attributes: `number`, `blocks` (one for each array), `region`, `writers` (peers that have permission to write),
    `lost` (peers that were lost while they had permission).
    """

    def __init__(self, core: Core, number: int, paths: Sequence[str], blocks: Sequence[_memory.Block]):
        self.number, self.blocks = number, blocks
        self.region = Region(core, [(path, b.shape, b.dtype, b.shards) for path, b in zip(paths, blocks)])
        self.writers: set[Connection] = set()
        self.lost: list[Connection] = []

    def lose(self, peer: Connection) -> None:
        """Notes that a peer is lost. If it had permission to write, the contents of the memory are unknown."""
        if peer in self.writers:
            self.writers.discard(peer)
            self.lost.append(peer)


class Published:
    """Arrays that peers may read. Made by `Engine.publish`; a read holds them until it has ended."""

    def __init__(self, core: Core, name: str, tree, forget: Callable[[Published], None]):
        self._core, self.name, self._forget = core, name, forget
        self._arrays = list(leaves_by_path(tree).values())
        records, self._kept = array_records(tree, f"publish {name!r}")
        self.region = Region(core, records)
        self._readers = 0
        self._closed = False

    def close(self) -> None:
        """Hides the arrays from peers. Their memory is given back when the last read has ended."""
        with self._core.lock:
            self._closed = True
            self._forget(self)
            self._release()

    # The methods from here on need the engine's lock.

    def intact(self) -> bool:
        """Returns whether none of the arrays was donated or deleted."""
        return not any(isinstance(a, jax.Array) and a.is_deleted() for a in self._arrays)

    def lease(self) -> None:
        """Holds the arrays for one more read."""
        self._readers += 1

    def give_back(self) -> None:
        """Ends a lease."""
        self._readers -= 1
        self._release()

    def _release(self) -> None:
        if self._closed and not self._readers:
            self.region.release()
            self._arrays, self._kept = [], []
