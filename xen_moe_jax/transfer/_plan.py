"""The plan of a push: which process sends which slice to which receiver, computed once from shapes and shardings."""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._layout import Box, Layout, Leaf, box_of, intersection, leaves_by_path


@dataclass(frozen=True)
class Piece:
    """A box (global coordinates) of the array at `path`, which `process` has in its shard `shard`, and `receiver`
    needs.
    """

    path: str
    process: int
    shard: Box
    box: Box
    receiver: str

    @property
    def size(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Plan:
    """Made by `plan`. `arrivals[receiver]` is how many writes a receiver must count; `windows[receiver]` is where they
    go. By path, `sources` are the shapes and dtypes of what is pushed, and `dtypes` those of what travels.
    """

    pieces: tuple[Piece, ...]
    sources: Mapping[str, tuple[tuple[int, ...], np.dtype]]
    dtypes: Mapping[str, np.dtype]
    windows: Mapping[str, str | None]
    arrivals: Mapping[str, int]

    def of(self, process: int) -> dict[tuple[str, str], list[Piece]]:
        """Returns the pieces that a process sends, by (receiver, path). Each entry is one write."""
        writes: dict[tuple[str, str], list[Piece]] = {}
        for piece in self.pieces:
            if piece.process == process:
                writes.setdefault((piece.receiver, piece.path), []).append(piece)
        return writes

    @property
    def nbytes(self) -> int:
        """Bytes that all processes send, a replica at a receiver not counted."""
        return sum(piece.size * self.dtypes[piece.path].itemsize for piece in self.pieces)


def plan(src, dst, cast: Mapping[str, Any] | None = None) -> Plan:
    """Makes a static plan for `push`.

    Args:
        src: pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings: the sender's, over all of its processes.
        dst: the receivers' arrays: a `Layout`, a list of layouts (one for each process of the serving side), or a
            pytree with shardings for a single receiver.
        cast: {pattern of paths: dtype}, the first match counts; the sender casts before it sends, so that only the
            result travels. A pattern that matches no path is an error.

    Where several processes of the sender hold the same slice, the process with the fewest bytes to send so far sends
    it.

    Raises `ValueError` where trees, shapes or dtypes do not fit, a sharding names no devices, or no process holds a
    part that a receiver needs; `TypeError` where a leaf has no shape or no dtype, `dst` mixes Layouts with arrays, or
    `cast` is no mapping.
    """
    avals = leaves_by_path(src)
    sources = {path: _holders(leaf, f"src: {path or 'the value'}") for path, leaf in avals.items()}
    layouts = _layouts(dst)
    dtypes = {path: _memory.check_dtype(aval.dtype, f"plan: {path or 'the array'}") for path, aval in avals.items()}
    given = {path: (tuple(avals[path].shape), dtype) for path, dtype in dtypes.items()}
    casts = _casts({} if cast is None else cast, list(dtypes))
    for path in dtypes:
        dtypes[path] = next((dtype for found, dtype in casts.values() if path in found), dtypes[path])
    load: Counter[int] = Counter()
    pieces: list[Piece] = []
    for layout in layouts:
        there = {leaf.path: leaf for leaf in layout.leaves}
        if there.keys() != avals.keys():
            only = sorted(there.keys() ^ avals.keys())
            raise ValueError(f"plan: source and {layout.owner or 'destination'!r} differ in {only[:8]}")
        for path, leaf in there.items():
            if leaf.shape != tuple(avals[path].shape) or leaf.dtype != dtypes[path]:
                raise ValueError(
                    f"plan: {path or 'the array'} is {dtypes[path]}{list(avals[path].shape)} as sent (see cast=), "
                    f"{leaf.dtype}{list(leaf.shape)} at {layout.owner!r}"
                )
            for box in dict.fromkeys(shard.box for shard in leaf.shards):
                pieces += _cover(path, box, layout.owner, sources[path], load)
    writes = {(piece.process, piece.receiver, piece.path) for piece in pieces}
    arrivals = Counter(receiver for _, receiver, _ in writes)
    return Plan(
        tuple(pieces),
        given,
        dtypes,
        {layout.owner: layout.window or None for layout in layouts},
        {layout.owner: arrivals[layout.owner] for layout in layouts},
    )


def _casts(cast: Mapping[str, Any], paths: list[str]) -> dict[str, tuple[set[str], Any]]:
    """Returns the matching paths and the dtype of each pattern. Raises ValueError for a pattern that matches no path,
    and TypeError if `cast` is no mapping."""
    if not isinstance(cast, Mapping):
        raise TypeError(f"plan: cast={cast!r}: must be a dictionary of dtypes by patterns of paths")
    found = {}
    for pattern, dtype in cast.items():
        try:
            found[pattern] = {path for path in paths if fnmatch.fnmatchcase(path, pattern)}, jax.numpy.dtype(dtype)
        except TypeError:
            raise ValueError(f"plan: cast={{{pattern!r}: {dtype!r}}}: {dtype!r} is no dtype") from None
        if not found[pattern][0]:
            raise ValueError(
                f"plan: cast={{{pattern!r}: ...}}: no array has such a path: there are {paths[:8]}"
                f"{' and more' if len(paths) > 8 else ''}; mend the pattern, or leave it out"
            )
    return found


def _holders(leaf: Any, what: str) -> dict[Box, list[int]]:
    """Returns the distinct boxes of an array, and the processes that hold each. Raises an error that names the leaf
    `what`: TypeError if it has no shape or no dtype, ValueError if its sharding has no devices."""
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise TypeError(f"plan: {what} is a {type(leaf).__name__}: must be an array, or a jax.ShapeDtypeStruct")
    sharding: Any = getattr(leaf, "sharding", None)
    if sharding is None:
        return {tuple((0, extent) for extent in leaf.shape): [jax.process_index()]}
    if isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh):
        raise ValueError(f"plan: {what} has {sharding}: names no devices; give a sharding over a jax.sharding.Mesh")
    holders: dict[Box, list[int]] = {}
    for device, index in sharding.devices_indices_map(tuple(leaf.shape)).items():
        processes = holders.setdefault(box_of(index, leaf.shape), [])
        if device.process_index not in processes:
            processes.append(device.process_index)
    return holders


def _layouts(dst) -> list[Layout]:
    if isinstance(dst, Layout):
        return [dst]
    if isinstance(dst, Sequence) and dst and all(isinstance(entry, Layout) for entry in dst):
        owners = [layout.owner for layout in dst]
        if len(set(owners)) != len(owners):
            raise ValueError(f"plan: several layouts of one receiver: {owners}")
        return list(dst)
    leaves = []
    for path, leaf in leaves_by_path(dst).items():
        if isinstance(leaf, Layout):
            raise TypeError(
                f"plan: dst: {path} is the Layout of {leaf.owner!r} in a tree of other values: pass a Layout, a list "
                "of Layouts alone, or a tree of arrays"
            )
        boxes = _holders(leaf, f"dst: {path or 'the value'}")
        leaves.append(Leaf.of_boxes(path, tuple(leaf.shape), np.dtype(leaf.dtype), list(boxes)))
    return [Layout("", "", tuple(leaves))]


def _cover(path: str, box: Box, receiver: str, holders: dict[Box, list[int]], load: Counter[int]) -> list[Piece]:
    pieces = []
    for held, processes in holders.items():
        if any(stop == start for start, stop in box) or (common := intersection(held, box)) is None:
            continue
        process = min(processes, key=lambda p: (load[p], p))
        pieces.append(Piece(path, process, held, common, receiver))
        load[process] += pieces[-1].size
    missing = math.prod(stop - start for start, stop in box) - sum(piece.size for piece in pieces)
    if missing:
        raise ValueError(f"plan: no process holds {missing} elements of {path or 'the array'} that {receiver!r} needs")
    return pieces
