"""The time of a decode layer that is one kernel, out of its bundles, the bytes of HBM and those of the wire.

A timeline is simulated: slabs of weights come one after the other, each as soon as a buffer is free; a slab is
multiplied when it is there and the slab before it has been; the first rows wait for the records of all ranks; sums of a
visit go onto the wire when it ends. A bundle takes a cycle, HBM and the links have their public bandwidth, and nothing
has a latency.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from benchmarks.tpu import bundles
from benchmarks.tpu.dump import Loop

STARTS = ("dma.hbm_to_vmem", "dma.general")
"""Names of the start of a DMA into VMEM: all are general on tpu7x."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """Attributes:
    ranks, tokens, top_k, experts, hidden, width: sizes; experts of all ranks.
    pieces, kept, certain: as the policy chose.
    """

    ranks: int
    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int
    pieces: Any
    kept: int
    certain: int

    @property
    def local(self) -> int:
        return self.experts // self.ranks

    @property
    def record_bytes(self) -> int:
        from xen_moe_jax.pallas_kernels.decode_layer import record_of

        return record_of(self.hidden, "bfloat16").bytes

    @property
    def _sizes(self) -> Any:
        from xen_moe_jax.pallas_kernels.decode_routing import Sizes

        most = self.pieces.rows_at_once
        return Sizes(self.ranks, self.tokens, self.top_k, self.local, most, self.kept, self.certain)

    @property
    def routing_bytes(self) -> int:
        """Routing that a rank sends to another."""
        return 2 * self._sizes.half * self._sizes.wide * 4

    @property
    def blocks(self) -> int:
        """Blocks of sources whose routing is ordered together."""
        return int(self._sizes.blocks)


@dataclasses.dataclass(frozen=True)
class Visit:
    """Attributes:
    rows: of the visit. depths: number of rows of each pair that its last row ends. off: those of other ranks' tokens.
    """

    rows: int
    depths: tuple[int, ...]
    off: int


def visits(layer: Layer, seed: int) -> tuple[list[Visit], int, int]:
    """Visits of the busiest rank under uniform routing; the largest number of records that a rank sends to others or
    gets from them; how often it waits for them."""
    idx = bundles.random_experts(layer.tokens, layer.ranks, layer.experts, layer.top_k, seed)
    owner = idx // layer.local
    busiest = int(np.bincount(owner.ravel(), minlength=layer.ranks).argmax())
    reached = np.stack([(owner == r).any(2).sum(1) for r in range(layer.ranks)], axis=1)  # [source, destination]
    off = reached * ~np.eye(layer.ranks, dtype=bool)
    most = layer.pieces.rows_at_once
    slots = [np.argwhere(idx == busiest * layer.local + e)[:, :2] for e in range(layer.local)]  # (source, token)
    pieces = [rows[:most] for e, rows in enumerate(slots) if len(rows) or e < layer.certain]
    pieces += [rows[at : at + most] for rows in slots for at in range(most, len(rows), most)]
    last: dict[tuple[int, int], int] = {}
    depth: dict[tuple[int, int], int] = {}
    for n, rows in enumerate(pieces):
        for pair in map(tuple, rows.tolist()):
            last[pair], depth[pair] = n, depth.get(pair, 0) + 1
    found = []
    for n, rows in enumerate(pieces):
        ended = [pair for pair, at in last.items() if at == n]
        found.append(
            Visit(len(rows), tuple(depth[pair] for pair in ended), sum(source != busiest for source, _ in ended))
        )
    most = layer.ranks * layer.tokens
    waits = max(int(bundles.waits(n, most).sum()) for n in (reached[busiest], reached[:, busiest]))
    return found, int(max(off.sum(0).max(), off.sum(1).max())), waits


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Bundles of the kernel on the busiest rank.

    Attributes:
      pack: until the first record leaves. send: of the loop that starts records. index: of the tables. tail: after the
        last visit. before, up, between, down, after: of each visit: before its slabs, one slab of gate and up, the
        activation, one slab of down, after its slabs.
    """

    pack: float
    send: float
    index: float
    tail: float
    before: list[float]
    up: list[float]
    between: list[float]
    down: list[float]
    after: list[float]


def cycles(kernel: Loop, layer: Layer, of: list[Visit], waits: int) -> Cycles:
    """Counts the loops of the kernel, which stand in the order of the program.

    One pass is taken. Both branches of a condition are counted. What is outside of all loops is counted before the
    visits and again after them; of loops over ranks, experts or groups of tokens each turns as often as the longest
    of these.

    Args:
      waits: turns of the loops that wait for the records of all ranks, or for those to all ranks.

    Raises:
      ValueError: the kernel has other loops than this was written for.
    """
    from xen_moe_jax.pallas_kernels import send

    front, visit, tail = _largest(kernel)
    of_pass, inside, rest_of_pass = _largest(visit)
    once = 0.0
    if len(_slabs(inside)) == 2:  # there is a loop over passes, unless one is enough for all rows that there can be
        once, visit = float(visit.bundles), inside
        front, tail = [*front, *of_pass], [*rest_of_pass, *tail]
    turns = max(layer.ranks, layer.local, -(-layer.tokens // 16))
    pack, sending, index = float(kernel.bundles), 0.0, once
    seen_send = False

    def waiting(loop: Loop) -> float:
        """Bundles of the loops inside one over ranks, which wait for their records, many at a time."""
        most = max((inner.bundles for inner in loop.inner), default=0)
        return most * waits * len(loop.inner) / len(send.WAIT_BATCHES)

    early = min(layer.pieces.ahead, layer.certain * sum(layer.pieces.slabs(layer.hidden, layer.width)))
    for loop in front:
        starts = sum(loop.operations[name] for name in STARTS)
        if starts == layer.ranks:
            sending += layer.tokens * loop.bundles
            seen_send = True
        elif starts > 1:
            if seen_send:
                index += (layer.pieces.ahead - early) * loop.bundles
            else:
                pack += early * loop.bundles
        elif loop.operations["dma.vmem_to_smem"]:
            index += layer.blocks * loop.bundles + _written(loop, layer, of)
        else:
            times = layer.ranks if loop.operations[bundles.WAIT] else turns
            cost = times * loop.bundles + waiting(loop)
            index, pack = index + cost * seen_send, pack + cost * (not seen_send)
    if not seen_send or not index:
        raise ValueError("no loop that sends records, or none that orders them: the counts are of another kernel")
    rest = float(kernel.bundles)
    for loop in tail:  # waits, and sums of groups of tokens
        rest += layer.ranks * loop.bundles + waiting(loop) if loop.inner else -(-layer.tokens // 16) * loop.bundles
    return Cycles(pack, sending, index, rest, *_of_visits(visit, layer, of))


def _slabs(visit: Loop) -> list[Loop]:
    """The loops over slabs, which wait for a DMA and have loops inside."""
    return [loop for loop in visit.inner if loop.operations[bundles.WAIT] and loop.inner]


def _largest(loop: Loop) -> tuple[list[Loop], Loop, list[Loop]]:
    """The inner loop with most bundles, and the loops before and after it."""
    at = max(range(len(loop.inner)), key=lambda i: sum(inner.bundles for inner in loop.inner[i].all_inner()))
    return loop.inner[:at], loop.inner[at], loop.inner[at + 1 :]


def _written(loop: Loop, layer: Layer, of: list[Visit]) -> float:
    """Bundles of the loops that write the rows of the tables, in fours and the rest of them."""
    (slots,) = (inner for inner in loop.inner if inner.inner)
    many, single = slots.inner
    lists, rows = layer.blocks * layer.top_k, sum(v.rows for v in of)
    return lists * slots.bundles + rows / 4 * many.bundles + min(rows, 1.5 * lists) * single.bundles


def _of_visits(visit: Loop, layer: Layer, of: list[Visit]) -> tuple[list[float], ...]:
    from xen_moe_jax.pallas_kernels.decode_experts import COLUMNS, GROUP

    slabs = _slabs(visit)
    if len(slabs) != 2:
        raise ValueError(f"{len(slabs)} loops over slabs, not 2: the counts are of another kernel")
    begin, middle = (visit.inner.index(loop) for loop in slabs)
    columns = max(1, layer.width // COLUMNS), max(1, layer.hidden // COLUMNS)

    def piece(loop: Loop, times: int) -> float:
        return loop.bundles + times * sum(inner.bundles for inner in loop.inner)

    def slab(loop: Loop, times: int, pieces: int) -> float:
        return loop.bundles + pieces * sum(piece(inner, times) for inner in loop.inner)

    found: tuple[list[float], ...] = ([], [], [], [], [])
    fetch, fetch_one, unpack, *zero = visit.inner[:begin]
    *between, words, note, two, one = visit.inner[middle + 1 :]
    turns = layer.pieces.slabs(layer.hidden, layer.width)
    whole = layer.hidden // layer.pieces.depth, layer.width // layer.pieces.width
    for v in of:
        pieces = -(-v.rows // layer.pieces.rows)
        groups = -(-v.rows // GROUP)
        before = visit.bundles + v.rows // 4 * fetch.bundles + v.rows % 4 * fetch_one.bundles + groups * unpack.bundles
        before += pieces * sum(piece(loop, max(columns)) for loop in zero)
        up, down = (slab(loop, times, pieces) for loop, times in zip(slabs, columns, strict=True))
        activation = pieces * sum(piece(loop, columns[0]) for loop in visit.inner[begin + 1 : middle])
        after = pieces * sum(piece(loop, columns[1]) for loop in between) + groups * words.bundles
        pairs, further = len(v.depths), sum(v.depths) - len(v.depths)
        after += v.rows * note.bundles + pairs // 2 * two.bundles + pairs % 2 * one.bundles
        after += further * max(inner.bundles for inner in two.inner)
        # a last slab that is smaller stands outside of the loops, and is counted there and as a whole one here
        values = (before, up * whole[0] / turns[0], activation, down * whole[1] / turns[1], after)
        for each, value in zip(found, values, strict=True):
            each.append(value)
    return found


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds from the beginning of the kernel.

    Attributes:
      rows: the records of all ranks are here, and the tables made. weights: the last slab has come. core: the core is
        done with the last visit. back: the last sum has come. end: the layer is done. busy: the core's own work.
      wire: what travels, there and back.
    """

    rows: float
    weights: float
    core: float
    back: float
    end: float
    busy: float
    wire: float


def simulated(layer: Layer, chip: Any, counted: Cycles, of: list[Visit], off: int) -> Time:
    """Runs the timeline.

    Args:
      chip: a `topologies.Topology`. off: records that a rank sends to others in the dispatch.
    """
    us, per_byte = 1e6 / chip.clock_hz, 1e6 / chip.hbm_bytes_per_s
    routing = chip.all_to_all_us((layer.ranks - 1) * layer.routing_bytes, layer.ranks)
    there = chip.all_to_all_us(off * layer.record_bytes, layer.ranks)
    packed = counted.pack * us
    indexed = packed + max(counted.send * us, routing) + counted.index * us
    rows = max(indexed, packed + max(counted.send * us, routing + there))

    ups, downs = layer.pieces.slabs(layer.hidden, layer.width)
    sizes = []  # bytes of an expert's slabs
    for count, size, matrix, wide, each in (
        (ups, layer.pieces.depth, layer.hidden, layer.width, 2),
        (downs, layer.pieces.width, layer.width, layer.hidden, 1),
    ):
        sizes += [each * min(size, matrix - n * size) * wide * 2 for n in range(count)]
    slabs = len(sizes) * len(of)
    early = layer.certain * len(sizes)
    came = 0.0
    begun: list[float] = []
    arrivals: list[float] = []
    now, wire = rows, 0.0
    ahead = layer.pieces.ahead

    def arrive(n: int) -> None:
        nonlocal came
        asked = (0.0 if n < early else indexed) if n < ahead else begun[n - ahead]
        came = max(came, asked) + sizes[n % len(sizes)] * per_byte
        arrivals.append(came)

    for n in range(min(ahead, slabs)):
        arrive(n)
    for i, visit in enumerate(of):
        now += counted.before[i] * us
        for k in range(len(sizes)):
            n = i * len(sizes) + k
            begun.append(now)
            if n + ahead < slabs:
                arrive(n + ahead)
            if visit.rows:
                cost = counted.up[i] if k < ups else counted.down[i]
            else:
                cost = 0.0
            now = max(now, arrivals[n]) + cost * us
            if k == ups - 1:
                now += counted.between[i] * us
        now += counted.after[i] * us
        wire = max(wire, now) + chip.all_to_all_us(visit.off * layer.record_bytes, layer.ranks)
    out = layer.tokens * layer.hidden * 2 * per_byte
    end = max(now, wire) + counted.tail * us + out
    busy = (counted.pack + counted.send + counted.index + counted.tail) * us
    busy += us * sum(
        b + ups * u + m + downs * d + a
        for b, u, m, d, a in zip(counted.before, counted.up, counted.between, counted.down, counted.after, strict=True)
    )
    back = chip.all_to_all_us(sum(v.off for v in of) * layer.record_bytes, layer.ranks)
    return Time(rows, arrivals[-1] if arrivals else 0.0, now, wire, end, busy, routing + there + back)
