"""The time of a decode layer that is one kernel, out of its bundles, the bytes of HBM and those of the wire.

A timeline is simulated: slabs of weights come one after the other, each as soon as a buffer is free; a slab is
multiplied when it is there and the slab before it has been; a visit waits for the records of its group of experts,
which come in the order of groups; sums of a visit go onto the wire when it ends, behind the records. A bundle takes a
cycle, and a product the longer of its bundles and of its operations at the peak of the matrix units; HBM and the links
have their public bandwidth, and nothing has a latency. Rows that come back instead of sums take HBM's time, too, and a
second kernel reads them. Where two cores share the experts, each has a timeline of its own, with half of the
bandwidths.
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
    pieces, kept, certain, in_hbm, cores: as the policy chose.
    weight_bytes: of an element of the experts' weights.
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
    in_hbm: bool = False
    weight_bytes: int = 2
    cores: int = 1

    @property
    def local(self) -> int:
        """Experts of a core."""
        return self.experts // (self.ranks * self.cores)

    @property
    def record_bytes(self) -> int:
        from xen_moe_jax.pallas_kernels.decode_layer import record_of

        return record_of(self.hidden, "bfloat16").bytes

    @property
    def sizes(self) -> Any:
        from xen_moe_jax.pallas_kernels.decode_routing import Sizes

        most = self.pieces.rows_at_once
        known = self.ranks, self.tokens, self.top_k, self.local, most, self.kept, self.certain
        return Sizes(*known, self.cores, self.in_hbm)

    @property
    def routing_bytes(self) -> int:
        """Routing that a rank sends to another."""
        return 2 * self.sizes.half * self.sizes.wide * 4

    @property
    def blocks(self) -> int:
        """Blocks of sources whose routing is ordered together."""
        return int(self.sizes.blocks)


@dataclasses.dataclass(frozen=True)
class Visit:
    """Attributes:
    rows: of the visit. depths: number of rows of each pair that its last row ends, or where rows leave one by one, one
      of each. off: those of other ranks' tokens.
    group: of its expert.
    """

    rows: int
    depths: tuple[int, ...]
    off: int
    group: int


@dataclasses.dataclass(frozen=True)
class Records:
    """Records of the dispatch.

    Attributes:
      off: the largest number that a rank sends to others or gets from them. to_one: to one other rank.
      come: part of those that a rank gets that has come when a group has. waits: turns of the loops that wait for the
        records of each group, and for sums to come back.
    """

    off: int
    to_one: int
    come: tuple[float, ...]
    waits: tuple[int, ...]
    waits_back: int


def visits(layer: Layer, seed: int, core: int = 0) -> tuple[list[Visit], Records]:
    """Visits of a core of the busiest rank under uniform routing, and the records that travel."""
    idx = bundles.random_experts(layer.tokens, layer.ranks, layer.experts, layer.top_k, seed)
    busiest = int(np.bincount(idx.ravel() // (layer.local * layer.cores), minlength=layer.ranks).argmax())
    owner, of_core = np.divmod(idx // layer.local, layer.cores)
    owner = np.where(of_core == core, owner, layer.ranks)
    reached = np.stack([(owner == r).any(2).sum(1) for r in range(layer.ranks)], axis=1)  # [source, destination]
    off = reached * ~np.eye(layer.ranks, dtype=bool)
    most = layer.pieces.rows_at_once
    first = (busiest * layer.cores + core) * layer.local
    slots = [np.argwhere(idx == first + e)[:, :2] for e in range(layer.local)]  # (source, token)
    pieces = [(e, rows[:most]) for e, rows in enumerate(slots) if len(rows) or e < layer.certain]
    pieces += [(e, rows[at : at + most]) for e, rows in enumerate(slots) for at in range(most, len(rows), most)]
    last: dict[tuple[int, int], int] = {}
    depth: dict[tuple[int, int], int] = {}
    for n, (_, rows) in enumerate(pieces):
        for pair in map(tuple, rows.tolist()):
            last[pair], depth[pair] = n, depth.get(pair, 0) + 1
    found, of_group = [], layer.sizes.of_group
    for n, (e, rows) in enumerate(pieces):
        ended = [pair for pair, at in last.items() if at == n]
        if layer.in_hbm:
            ended, depth = list(map(tuple, rows.tolist())), dict.fromkeys(depth, 1)
        away = sum(source != busiest for source, _ in ended)
        found.append(Visit(len(rows), tuple(depth[pair] for pair in ended), away, e // of_group))
    most = layer.ranks * layer.tokens
    mine = np.where(owner == busiest, idx % layer.local, layer.local).min(2) // of_group  # [source, token]
    by_group = np.stack([(mine == g).sum(1) for g in range(layer.sizes.groups)])
    by_group[:, busiest] = 0
    rows = np.bincount(owner[busiest].ravel(), minlength=layer.ranks + 1)[:-1]
    back = rows if layer.in_hbm else reached[busiest]
    come = np.cumsum(by_group.sum(1)) / max(by_group.sum(), 1)
    records = Records(
        int(max(off.sum(0).max(), off.sum(1).max())),
        int(off.max()),
        tuple(come.tolist()),
        tuple(int(bundles.waits(counts, most).sum()) for counts in by_group),
        int(bundles.waits(back, most).sum()),
    )
    return found, records


@dataclasses.dataclass(frozen=True)
class Cycles:
    """Bundles of the kernel on the busiest rank.

    Attributes:
      pack: until the first record leaves. send: of the loop that starts records. index: of the tables. drain: waits
        until the last rows have left, where they leave one by one. tail: after the last visit, when all has come.
      before, up, between, down, after: of each visit: before its slabs, one slab of gate and up, the activation, one
        slab of down, after its slabs.
    """

    pack: float
    send: float
    index: float
    drain: float
    tail: float
    before: list[float]
    up: list[float]
    between: list[float]
    down: list[float]
    after: list[float]


def cycles(kernel: Loop, layer: Layer, of: list[Visit], records: Records) -> Cycles:
    """Counts the loops of the kernel, which stand in the order of the program.

    One pass is taken. Both branches of a condition are counted. What is outside of all loops is counted before the
    visits and again after them; of loops over ranks, experts or groups of tokens each turns as often as the longest
    of these.

    Raises:
      ValueError: the kernel has other loops than this was written for.
    """
    from xen_moe_jax.pallas_kernels import send
    from xen_moe_jax.pallas_kernels.decode_layer import VISITS_KEPT

    front, visit, tail = _largest(kernel)
    once = 0.0
    if len(_slabs(visit)) != 2:  # a loop over passes
        of_pass, inside, rest_of_pass = _largest(visit)
        once, visit = float(visit.bundles), inside
        front, tail = [*front, *of_pass], [*rest_of_pass, *tail]
    turns = max(layer.ranks, layer.local, -(-layer.tokens // 16))
    pack, sending, index = float(kernel.bundles), 0.0, once
    seen_send = False
    batches = len(send.WAIT_BATCHES)

    early = min(layer.pieces.ahead, layer.certain * sum(layer.pieces.slabs(layer.hidden, layer.width)))
    for loop in front:
        starts = sum(loop.operations[name] for name in STARTS)
        if starts == layer.ranks:
            sending += records.to_one * loop.bundles
            seen_send = True
        elif starts > 1:
            if seen_send:
                index += (layer.pieces.ahead - early) * loop.bundles
            else:
                pack += early * loop.bundles
        elif loop.operations["dma.vmem_to_smem"]:
            index += layer.blocks * loop.bundles + _written(loop, layer, of)
        else:
            cost = turns * loop.bundles
            index, pack = index + cost * seen_send, pack + cost * (not seen_send)
    if not seen_send or not index:
        raise ValueError("no loop that sends records, or none that orders them: the counts are of another kernel")
    rest, drain = float(kernel.bundles), 0.0
    waiting, adding = (tail, []) if layer.in_hbm else (tail[:-1], tail[-1:])
    if layer.in_hbm:  # over the last visits, with loops over rows inside
        (over_visits, *waiting), last = waiting, of[-VISITS_KEPT:]
        turned = sum(bundles.waits(v.rows, VISITS_KEPT * layer.pieces.rows_at_once) for v in last)
        drain = len(last) * over_visits.bundles + turned * max(loop.bundles for loop in over_visits.inner)
    for loop in waiting:  # over ranks, with loops over records inside; or over what is left of groups, which is nothing
        most = max((inner.bundles for inner in loop.inner if not inner.inner), default=0)
        rest += layer.ranks * loop.bundles + most * records.waits_back * len(loop.inner) / batches
    rest += -(-layer.tokens // 16) * sum(loop.bundles for loop in adding)
    return Cycles(pack, sending, index, drain, rest, *_of_visits(visit, layer, of, records))


def _slabs(visit: Loop) -> list[Loop]:
    """The loops over slabs, which start DMAs and wait for them."""
    return [loop for loop in visit.inner if loop.operations[bundles.WAIT] and any(loop.operations[n] for n in STARTS)]


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


def _of_visits(visit: Loop, layer: Layer, of: list[Visit], records: Records) -> tuple[list[float], ...]:
    from xen_moe_jax.pallas_kernels import send
    from xen_moe_jax.pallas_kernels.decode_experts import GROUP, PRODUCTS, columns_at_once
    from xen_moe_jax.pallas_kernels.decode_layer import PAIRS, VISITS_KEPT

    slabs = _slabs(visit)
    if len(slabs) != 2:
        raise ValueError(f"{len(slabs)} loops over slabs, not 2: the counts are of another kernel")
    begin, middle = (visit.inner.index(loop) for loop in slabs)
    together = PRODUCTS // 2, PRODUCTS  # gate and up are multiplied side by side
    of_products = [columns_at_once(n, k)[1] for n, k in zip((layer.width, layer.hidden), together, strict=True)]
    of_sums = [columns_at_once(n, 1)[1] for n in (layer.width, layer.hidden)]

    def piece(loop: Loop, times: int) -> float:
        return loop.bundles + times * sum(inner.bundles for inner in loop.inner)

    def slab(loop: Loop, times: int, pieces: int) -> float:
        return loop.bundles + pieces * sum(piece(inner, times) for inner in loop.inner)

    def behind(loops: list[Loop], smaller: int, n: int) -> float:
        """Loops behind the slabs, of which the first is of a last slab that is smaller."""
        first = 1 if smaller else 0
        return sum(piece(loop, of_products[n] if k < first else of_sums[n]) for k, loop in enumerate(loops))

    found: tuple[list[float], ...] = ([], [], [], [], [])
    *arrivals, unpack = visit.inner[:begin]
    if layer.in_hbm:
        *between, words = visit.inner[middle + 1 :]
        note, (many, one) = None, words.inner
        batches = len(send.WAIT_BATCHES)
        between, leaving = between[:-batches], between[-batches:]
    else:
        *between, words, note, many, one = visit.inner[middle + 1 :]
        leaving = []
    turns = layer.pieces.slabs(layer.hidden, layer.width)
    whole = layer.hidden // layer.pieces.depth, layer.width // layer.pieces.width
    smaller = layer.hidden % layer.pieces.depth, layer.width % layer.pieces.width
    awaited = 0
    for n, v in enumerate(of):
        pieces = -(-v.rows // layer.pieces.rows)
        groups = -(-v.rows // GROUP)
        before = visit.bundles + groups * unpack.bundles
        while awaited <= v.group:  # loops over ranks, with loops over records inside
            for loop in arrivals:
                (over_ranks,) = loop.inner
                batch = max(inner.bundles for inner in over_ranks.inner)
                before += loop.bundles + layer.ranks * over_ranks.bundles + batch * records.waits[awaited]
            awaited += 1
        up, down = (slab(loop, times, pieces) for loop, times in zip(slabs, of_products, strict=True))
        activation = pieces * behind(visit.inner[begin + 1 : middle], smaller[0], 0)
        after = pieces * behind(between, smaller[1], 1) + groups * words.bundles
        if leaving and n >= VISITS_KEPT:
            turned = bundles.waits(of[n - VISITS_KEPT].rows, VISITS_KEPT * layer.pieces.rows_at_once)
            after += turned * max(loop.bundles for loop in leaving)
        pairs, further = len(v.depths), sum(v.depths) - len(v.depths)
        after += pairs // PAIRS * many.bundles + pairs % PAIRS * one.bundles
        if note is not None:
            after += v.rows / 4 * note.bundles + further * max(inner.bundles for inner in many.inner)
        # a last slab that is smaller stands outside of the loops, and is counted there and as a whole one here
        values = (before, up * whole[0] / turns[0], activation, down * whole[1] / turns[1], after)
        for each, value in zip(found, values, strict=True):
            each.append(value)
    return found


@dataclasses.dataclass(frozen=True)
class Time:
    """Microseconds from the beginning of the kernel.

    Attributes:
      first: the first visit begins. rows: the records of all ranks are here. weights: the last slab has come. core: the
        core is done with the last visit. back: the last sum has come. end: the layer is done. busy: the core's own
        work, with its waits for the matrix units. wire: what travels, there and back.
    """

    first: float
    rows: float
    weights: float
    core: float
    back: float
    end: float
    busy: float
    wire: float


def simulated(layer: Layer, chip: Any, cores: int, counted: Cycles, of: list[Visit], records: Records) -> Time:
    """Runs the timeline of a core.

    Args:
      chip: a `topologies.Topology`, of which a device has so many `cores`.
    """
    if layer.cores > 1:  # each has its part of HBM and of the links
        hbm, link = chip.hbm_bytes_per_s / layer.cores, chip.link_bytes_per_s / layer.cores
        chip = dataclasses.replace(chip, hbm_bytes_per_s=hbm, link_bytes_per_s=link)
    from xen_moe_jax.pallas_kernels.decode_experts import GROUP
    from xen_moe_jax.pallas_kernels.decode_layer import VISITS_KEPT

    us, per_byte = 1e6 / chip.clock_hz, 1e6 / chip.hbm_bytes_per_s
    routing = chip.all_to_all_us((layer.ranks - 1) * layer.routing_bytes, layer.ranks)
    there = chip.all_to_all_us(records.off * layer.record_bytes, layer.ranks)
    packed = counted.pack * us
    indexed = packed + max(counted.send * us, routing) + counted.index * us
    arrived = [packed + max(counted.send * us * part, routing + there * part) for part in records.come]

    ups, downs = layer.pieces.slabs(layer.hidden, layer.width)
    sizes: list[int] = []  # elements of an expert's slabs
    for count, size, matrix, wide, each in (
        (ups, layer.pieces.depth, layer.hidden, layer.width, 2),
        (downs, layer.pieces.width, layer.width, layer.hidden, 1),
    ):
        sizes += [each * min(size, matrix - n * size) * wide for n in range(count)]
    slabs = len(sizes) * len(of)
    early = layer.certain * len(sizes)
    came = 0.0
    begun: list[float] = []
    arrivals: list[float] = []
    left: list[float] = []
    now, wire = indexed, arrived[-1]
    ahead = layer.pieces.ahead
    rate = chip.flops_per_s / cores / 1e6
    busy = (counted.pack + counted.send + counted.index + counted.drain + counted.tail) * us

    def arrive(n: int) -> None:
        nonlocal came
        asked = (0.0 if n < early else indexed) if n < ahead else begun[n - ahead]
        came = max(came, asked) + sizes[n % len(sizes)] * layer.weight_bytes * per_byte
        arrivals.append(came)

    for n in range(min(ahead, slabs)):
        arrive(n)
    first = max(indexed, arrived[of[0].group]) if of else indexed
    for i, visit in enumerate(of):
        now = max(now, arrived[visit.group]) + counted.before[i] * us
        rows = -(-visit.rows // layer.pieces.rows) * layer.pieces.rows
        work = counted.before[i] + counted.between[i] + counted.after[i]
        busy += work * us
        for k, elements in enumerate(sizes):
            n = i * len(sizes) + k
            begun.append(now)
            if n + ahead < slabs:
                arrive(n + ahead)
            cost = 0.0
            if visit.rows:
                cost = max((counted.up[i] if k < ups else counted.down[i]) * us, 2 * rows * elements / rate)
            busy += cost
            now = max(now, arrivals[n]) + cost
            if k == ups - 1:
                now += counted.between[i] * us
        if layer.in_hbm and i >= VISITS_KEPT:  # rows lie where those of an earlier visit have left
            now = max(now, left[i - VISITS_KEPT])
        now += counted.after[i] * us
        leaving = now
        if layer.in_hbm:  # 16 rows leave at a time, and as many rows come as leave
            leaving -= counted.after[i] * us * (1 - GROUP / max(visit.rows, GROUP))
            came += visit.rows * layer.record_bytes * per_byte
        wire = max(wire, leaving) + chip.all_to_all_us(visit.off * layer.record_bytes, layer.ranks)
        wire = max(wire, now) if layer.in_hbm else wire
        left.append(wire)
    out = 0.0 if layer.in_hbm else layer.tokens * layer.hidden * 2 * per_byte
    end = max(now + counted.drain * us, wire) + counted.tail * us + out
    back = chip.all_to_all_us(sum(v.off for v in of) * layer.record_bytes, layer.ranks)
    weights = arrivals[-1] if arrivals else 0.0
    return Time(first, arrived[-1], weights, now, wire, end, busy, routing + there + back)


def sums_us(kernel: Loop, layer: Layer, chip: Any) -> float:
    """Microseconds of the kernel that adds up the rows of tokens, where they have come one by one: the longer of its
    bundles and of HBM, behind the first block of each core."""
    steps = -(-layer.tokens // 16)
    # a turn has eight tokens; where one step with one turn does everything, the compiled kernel has no loop
    of_step = sum(step.bundles + 2 * sum(loop.bundles for loop in step.inner) for step in kernel.inner)
    core_us = (kernel.bundles + -(-steps // kernel.cores) * of_step) * 1e6 / chip.clock_hz
    rows_us = layer.tokens * layer.top_k * layer.record_bytes * 1e6 / chip.hbm_bytes_per_s
    out_us = layer.tokens * layer.hidden * 2 * 1e6 / chip.hbm_bytes_per_s
    return max(core_us, rows_us + out_us) + rows_us * kernel.cores / steps
