"""Addresses of an array's elements, and the runs of bytes that copy them elsewhere.

A `Box` is a rectangle of global coordinates, one (start, stop) per dimension. A shard is a box and the address of its
row-major elements. Everything here is arithmetic on the host; nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

Box = tuple[tuple[int, int], ...]

Pages = tuple[np.ndarray, np.ndarray]
"""(source pages, destination pages): equal lengths, indices along the paged dimension."""


class Shard(NamedTuple):
    """Part of an array in one piece of memory. `key` is empty for memory of this process that no peer addresses."""

    box: Box
    pointer: int
    memory: str
    key: bytes = b""

    @property
    def size(self) -> int:
        return math.prod(stop - start for start, stop in self.box)


@dataclass(frozen=True)
class Leaf:
    """One array of a tree: its path in the tree ("" for a tree that is one array), shape, dtype and shards."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    shards: tuple[Shard, ...]

    @classmethod
    def of_boxes(cls, path: str, shape: tuple[int, ...], dtype: np.dtype, boxes: Sequence[Box]) -> Leaf:
        """Returns a leaf whose boxes are known, but not its memory."""
        return cls(path, shape, dtype, tuple(Shard(box, 0, "host") for box in boxes))

    @property
    def on_host(self) -> bool:
        return all(shard.memory == "host" for shard in self.shards)

    def to_json(self) -> dict:
        shards = [{"b": s.box, "a": s.pointer, "m": s.memory, "k": s.key.hex()} for s in self.shards]
        return {"p": self.path, "s": self.shape, "d": self.dtype.name, "h": shards}

    @classmethod
    def from_json(cls, record: dict) -> Leaf:
        shards = tuple(
            Shard(tuple((int(a), int(b)) for a, b in s["b"]), int(s["a"]), str(s["m"]), bytes.fromhex(s["k"]))
            for s in record["h"]
        )
        return cls(str(record["p"]), tuple(map(int, record["s"])), jax.numpy.dtype(record["d"]), shards)


@dataclass(frozen=True)
class Layout:
    """The arrays of one window and the boxes that its process holds: `window.layout` there, `peer["w"].layout` at a
    peer.
    """

    owner: str
    window: str
    leaves: tuple[Leaf, ...]


def distinct(shards: Sequence[Shard]) -> tuple[Shard, ...]:
    """Returns the first shard of each box: a reader needs no replicas."""
    return tuple({shard.box: shard for shard in reversed(shards)}.values())


def leaves_by_path(tree) -> dict[str, Any]:
    """Returns a pytree's leaves by path: "" for a single leaf, "layers/0/k" below containers.

    Raises ValueError where two leaves have the same path.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    leaves: dict[str, Any] = {}
    for path, leaf in flat:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in leaves:
            raise ValueError(f"two arrays of the tree have the path {name!r}: rename a key that has a slash")
        leaves[name] = leaf
    return leaves


def box_of(index: Sequence[slice], shape: Sequence[int]) -> Box:
    """Returns the box of a shard's index (as in `jax.Array.addressable_shards`)."""
    return tuple(piece.indices(extent)[:2] for piece, extent in zip(index, shape, strict=True))


def intersection(a: Box, b: Box) -> Box | None:
    """Returns the coordinates that both boxes hold, or None if there are none."""
    both = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in both) else both


def shift(box: Box, offsets: Sequence[int]) -> Box:
    return tuple((start + by, stop + by) for (start, stop), by in zip(box, offsets, strict=True))


def _strides(box: Box) -> list[int]:
    """Returns the distance of neighbours along each dimension of a row-major box, in elements."""
    strides, total = [1] * len(box), 1
    for axis in reversed(range(len(box))):
        strides[axis] = total
        total *= box[axis][1] - box[axis][0]
    return strides


def copy_runs(source: Box, destination: Box, itemsize: int, pages: Pages | None = None, axis: int = 0) -> np.ndarray:
    """Returns the runs that copy the intersection of two boxes, int64 `[n, 3]`: source offset, destination offset,
    bytes.

    With `pages`, coordinate `pages[0][i]` of the source along `axis` goes to `pages[1][i]` of the destination; along
    the other dimensions coordinates are the same. Neighbouring runs are joined.
    """
    common = [(max(s[0], d[0]), min(s[1], d[1])) for s, d in zip(source, destination, strict=True)]
    if pages is not None:
        common[axis] = (0, 1)
    if any(start >= stop for start, stop in common):
        return np.zeros((0, 3), np.int64)
    source_strides, destination_strides = _strides(source), _strides(destination)
    inner, outer = 1, len(common)
    while outer > 0 and not (pages is not None and outer - 1 == axis):
        outer -= 1
        start, stop = common[outer]
        inner *= stop - start
        if (start, stop) != source[outer] or (start, stop) != destination[outer]:
            break
    # The elements of the dimensions from `outer` on lie in one run. It begins at the first common element of each.
    offsets = np.zeros((1, 2), np.int64)
    for dimension in range(len(common)):
        if pages is not None and dimension == axis:
            coordinates = np.stack(pages, -1).astype(np.int64)
            inside = np.ones(len(coordinates), bool)
            for column, box in enumerate((source, destination)):
                inside &= (coordinates[:, column] >= box[axis][0]) & (coordinates[:, column] < box[axis][1])
            coordinates = coordinates[inside]
        else:
            start, stop = common[dimension]
            coordinates = np.arange(start, stop if dimension < outer else start + 1, dtype=np.int64)[:, None].repeat(
                2, 1
            )
        begins = np.array([source[dimension][0], destination[dimension][0]], np.int64)
        strides = np.array([source_strides[dimension], destination_strides[dimension]], np.int64)
        offsets = (offsets[:, None] + (coordinates - begins) * strides).reshape(-1, 2)
    runs = np.concatenate([offsets, np.full((len(offsets), 1), inner, np.int64)], axis=1) * itemsize
    return _joined(runs)


def _joined(runs: np.ndarray) -> np.ndarray:
    """Joins each run with the next one where that continues it in both source and destination."""
    if len(runs) < 2:
        return runs
    ends = runs[:-1, :2] + runs[:-1, 2:]
    begins_new = np.concatenate([[True], (ends != runs[1:, :2]).any(1)])
    firsts = np.flatnonzero(begins_new)
    sizes = np.add.reduceat(runs[:, 2], firsts)
    return np.concatenate([runs[firsts, :2], sizes[:, None]], axis=1)
