"""Issue cycles of compiled TPU kernels, counted from libtpu's final VLIW bundles (`tpu_dump`).

A bundle takes a cycle at least: the sum over loops of (bundles of the body x trips) is a floor of the core's time,
stalls not included. Trips follow from the shapes and a routing. Both branches of a condition are counted, so that the
sum is a little over the floor. Work that a condition does once in a kernel, to meet other ranks, is counted once, and
its loops over all ranks as often as they turn.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from benchmarks.tpu.dump import Loop, request_dump, take_dump

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
NO_ESTIMATE = 2**62
FETCH, STORE, SEND, WAIT = "dma.hbm_to_vmem", "dma.vmem_to_hbm", "dma.general", "dma.done.wait"
"""Names of a DMA within the chip, of one to another chip, and of the wait for a DMA."""


# -- trips ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """A loop of a kernel: the largest one inside the grid that has `operation` at least `at_least` times. Without an
    operation: the loops that no other part names.

    Attributes:
      trips: number of trips of all steps together.
      copies: number of pieces or copies of the loop, which conditions inside it divide, or which the program has
        several times. All of its pieces are counted then, also the branches that are not taken.
      at_most: most operations of the loop. depth: depth of the loop; the grid is 1, None is any.
    """

    name: str
    operation: str
    trips: float
    at_least: int = 1
    copies: int = 0
    at_most: int | None = None
    depth: int | None = None

    def names(self, loop: Loop) -> bool:
        if self.depth not in (None, loop.depth):
            return False
        count = loop.operations[self.operation] if self.operation else 0
        return not self.operation or (count >= self.at_least and count <= (self.at_most or count))


@dataclasses.dataclass(frozen=True)
class Work:
    """Work of one kernel on the busiest rank: steps of its grid (0: it has none), loops inside them, and the ranks that
    it meets."""

    steps: float
    parts: tuple[Part, ...] = ()
    ranks: int = 1


@dataclasses.dataclass(frozen=True)
class Count:
    """Bundles of one kernel: of each step outside its loops, of each turn of each loop, and of all together, on one of
    the cores that share them; `issue` of them in loops that start DMAs.
    """

    step: int
    turn: dict[str, int]
    total: float
    cores: int = 1
    issue: float = 0.0


def count(kernel: Loop, work: Work) -> Count:
    """Bundles of a kernel; a loop that `work` does not name is counted once a step.

    Raises:
      ValueError: the kernel has no such loop: it is not the kernel that `work` was written for.
    """
    found = list(kernel.all_inner())
    grid = min((loop.depth for loop in found), default=0) if work.steps else 0
    step = sum(loop.bundles for loop in found if loop.depth == grid)  # it shows in pieces, cut by the loops inside
    inner = [loop for loop in found if loop.depth > grid]
    turn, total, issue = {}, kernel.bundles + meeting(kernel, work.ranks) + work.steps * step, 0.0
    for part in work.parts:
        named = [other for other in work.parts if other.operation] if not part.operation else []
        chosen = [loop for loop in inner if part.names(loop) and not any(p.names(loop) for p in named)]
        if not chosen and part.operation == FETCH:  # XLA put the source into VMEM: rows come by loads and stores
            moved = [loop for loop in inner if loop.operations["vld"] and loop.operations["vst"]]
            chosen = [loop for loop in moved if loop.operations["vld"] == loop.operations["vst"]]
        if not chosen:
            raise ValueError(f"no loop with {part.operation} for {part.name}: {[dict(x.operations) for x in inner]}")
        bundles = [loop.bundles for loop in chosen]
        turn[part.name] = -(-sum(bundles) // part.copies) if part.copies else max(bundles)
        total += part.trips * turn[part.name]
        issue += part.trips * turn[part.name] if part.operation in (FETCH, STORE, SEND) else 0.0
    return Count(step, turn, total / kernel.cores, kernel.cores, issue / kernel.cores)


@dataclasses.dataclass(frozen=True)
class Visited:
    """Attributes:
    given: blocks of all pairs. blocks: blocks that `reduce_slots` visits. groups: groups of existing pairs in these
      blocks.
    turns: rows of the pair of each group that has most, together.
    tiles, singles: eights of rows of one turn, and rows that make none. odd: pairs of a block over its fours.
    waits: for rows that were fetched, and for records that left.
    """

    given: int
    blocks: int
    groups: int
    turns: int
    tiles: int
    singles: int
    odd: int
    waits: int


def waits(rows: Any, most: int) -> Any:
    """Turns of the loops that wait for `rows` DMAs, at most `most` at a time."""
    from xen_moe_jax.pallas_kernels import send

    turns, left = 0, rows
    for size in (n for n in send.WAIT_BATCHES if n <= most):
        turns, left = turns + left // size, left % size
    return turns


def meeting(kernel: Loop, ranks: int) -> int:
    """Bundles of the further turns of a kernel's loops over ranks, of which its own bundles have one."""
    from xen_moe_jax.pallas_kernels import send

    signals = ranks // send.signals_at_once(ranks) - 1
    return signals * kernel.signals + (send.recv_semaphores(ranks) - 1) * kernel.waits


@dataclasses.dataclass(frozen=True)
class Grouping:
    """How a combine groups its pairs.

    Attributes:
      group: pairs that are reduced together. parts: the pairs that exist in each of so many parts of all pairs are
        brought together in full blocks (`order_pairs`, a part a core); 0: they stay in their blocks (`order_tokens`).
    """

    group: int
    parts: int = 0


def visited_pairs(depths: Any, grouping: Grouping) -> Visited:
    """Work of `order_pairs` or `order_tokens`, and of `reduce_slots`, on pairs with `depths [P]` rows each, 0 for no
    pair."""
    import numpy as np

    from xen_moe_jax.pallas_kernels import order_pairs, reduce_slots, send

    block, group = min(order_pairs.BLOCK, -(-len(depths) // 128) * 128), grouping.group
    given = -(-len(depths) // block)
    if grouping.parts:
        size = -(-given // grouping.parts) * block
        parts = [depths[n * size : (n + 1) * size] for n in range(grouping.parts)]
        full = [part[part > 0] for part in parts]
        full = [np.pad(part, (0, -len(part) % block)) for part in full]
        depths = np.concatenate(full) if any(map(len, full)) else np.zeros(block, int)
    blocks = -np.sort(-np.pad(depths, (0, -len(depths) % block)).reshape(-1, block), axis=1)
    groups = blocks.reshape(-1, group)
    leave = (groups > 0).sum(1)
    here = (groups[:, :, None] > np.arange(groups.max(initial=0))).sum(1)  # [group, slot]: pairs with such a row
    tile = reduce_slots.TILE
    return Visited(
        given,
        len(blocks),
        int(np.maximum(-(-(blocks > 0).sum(1) // group), 1).sum()),
        int(groups[:, 0].sum()),
        int((here // tile).sum()),
        int((here % tile).sum()),
        int(((blocks > 0).sum(1) % send.SEND_BATCH).sum()),
        int((waits(groups.sum(1), tile) + waits(leave, group)).sum()),
    )


@dataclasses.dataclass(frozen=True)
class Routing:
    """The load of one rank under a random routing.

    Attributes:
      tokens, top_k, ranks, rows: sizes. sent: records that leave (this rank's own included). placed: rows that arrive.
      pairs: the pairs that a combine visits. experts: rows of each local expert. sources: records from each rank.
    """

    tokens: int
    top_k: int
    ranks: int
    sent: int
    placed: int
    pairs: Visited
    experts: tuple[int, ...]
    sources: tuple[int, ...]

    def visited(self, block: int, padded: bool) -> int:
        """Rows of the blocks of `routed.x` that hold live rows; with `padded`, experts begin at blocks of their own."""
        return sum(-(-n // block) for n in (self.experts if padded else [self.placed])) * block

    def visited_waits(self, block: int, padded: bool) -> int:
        """Turns of waiting for the records of these blocks."""
        live = self.experts if padded else [self.placed]
        return sum(n // block * waits(block, block) + waits(n % block, block) for n in live)


def mean_waits(rows: int, blocks: float, most: int) -> float:
    """Turns of waiting for `rows` rows in `blocks` blocks, whose numbers of rows differ by some tens."""
    import numpy as np

    return float(waits(max(int(rows / blocks) - 32, 0) + np.arange(64), most).mean() * blocks)


def tables_of(routing: Routing) -> tuple[int, int]:
    """Tables that `index_rows` makes of the records of all sources, and runs of records in them."""
    from xen_moe_jax.pallas_kernels import index_rows

    most = index_rows.records_at_once(routing.tokens)
    at_once = index_rows.sources_at_once(routing.ranks, routing.tokens, routing.top_k)
    tables = runs = 0
    for first in range(0, routing.ranks, at_once):
        fill = 0
        for count in routing.sources[first : first + at_once]:
            pieces = [most] * (count // most) + [count % most]
            runs += len(pieces)
            for piece in pieces:
                if fill + piece > most:
                    tables, fill = tables + 1, 0
                fill += piece
        tables += fill > 0
    return tables, runs


def works(program: Program, routing: Routing, padded: bool, tile: int = 16, slices: int = 1) -> dict[str, Work]:
    """Trips of every kernel of a grouped or padded dispatch and combine. With several `slices` those of a dispatch on
    two axes, which forwards as many records as tokens have come from each."""
    from xen_moe_jax.pallas_kernels import index_rows, order_pairs

    blocks = {"push": 1, "place": 1, "reduce_slots": 1, "reduce_ranks": 1} | program.blocks
    cores = max((loop.cores for loop in program.kernels.values()), default=1)
    pairs = routing.pairs
    destinations = min(routing.ranks, routing.top_k)
    push, place, ranks = (blocks[name] for name in ("push", "place", "reduce_ranks"))
    pack = blocks.get("pack_tokens", push)
    placing = routing.visited(place, padded)
    tables, runs = tables_of(routing)
    rows = len(routing.experts) * routing.ranks * routing.tokens if padded else routing.placed * 5 // 4
    sources = index_rows.sources_at_once(routing.ranks, routing.tokens, routing.top_k)
    steps = -(-routing.ranks // sources)
    positions = sources * routing.top_k * (-(-routing.tokens // 128) * 128)
    fills = [n / index_rows.filled_at_once(n) for n in (positions, rows)]
    forwarded = slices * routing.tokens
    # of reduce_slots, which sends its sums, and of its form that stores them on this rank
    reduced = (
        Part("group", "", pairs.groups, copies=1, depth=2),
        Part("turn", "", pairs.turns, copies=1, depth=3),
        Part("fetch", FETCH, pairs.tiles, at_least=8, copies=2),
        Part("fetch one", FETCH, pairs.singles, at_most=2, copies=2),
        Part("add", "vld", pairs.turns - pairs.groups, 16, depth=3),
        Part("wait", WAIT, pairs.waits, depth=3),
    )
    even, odd = (routing.sent - pairs.odd) / 4, pairs.odd
    return {
        "xen_moe_push": Work(
            routing.tokens / push,
            (
                Part("send", SEND, routing.tokens),
                Part("wait", WAIT, mean_waits(routing.sent, routing.tokens / push, push), depth=2),
                *_groups("encode", push, tile, routing.tokens),
            ),
            routing.ranks,
        ),
        "xen_moe_pack": Work(
            routing.tokens / push,
            (Part("store", STORE, routing.tokens),) + _groups("encode", push, tile, routing.tokens),
        ),
        "xen_moe_pack_tokens": Work(routing.tokens / pack, _groups("encode", pack, tile, routing.tokens)),
        # its loops over sources, and those that fill windows, which turn a little more often
        "xen_moe_index_tokens": Work(routing.ranks, (Part("slots", "sst", routing.placed / 8, 16, depth=3),)),
        "xen_moe_place": Work(
            placing / place,
            (
                Part("fetch", FETCH, placing / 4, copies=2),
                Part("wait", WAIT, routing.visited_waits(place, padded), depth=2),
                *_groups("decode", place, tile, placing),
            ),
        ),
        "xen_moe_index_rows": Work(
            steps,
            (
                Part("run", FETCH, runs, at_most=1, copies=2),
                # a loop starts the DMAs that fill the windows, and another one waits for them
                Part("fill", WAIT, 2 * (steps * fills[0] + 2 * cores * fills[1]), at_most=1, depth=2),
                Part("table", "vld", tables, 16, depth=2),
                Part("column", "", tables * routing.top_k, copies=1, depth=3),
                Part("slots", "sst", routing.placed / 8, 8, depth=4),
            ),
        ),
        "xen_moe_scatter": Work(
            routing.ranks * routing.tokens / order_pairs.BLOCK, (Part("slots", "sst", routing.placed / 8, 4, depth=3),)
        ),
        # each core has a step behind its last block
        # one loop starts the runs to all ranks, two wait for those that leave and those that arrive
        "xen_moe_exchange": Work(
            0,
            (
                Part("start", SEND, routing.ranks, depth=1),
                Part("wait", WAIT, 2 * routing.ranks, at_most=1, depth=1),
            ),
            routing.ranks,
        ),
        "xen_moe_start": Work(0, (Part("start", SEND, routing.ranks, depth=1),), routing.ranks),
        "xen_moe_done": Work(0, (Part("wait", WAIT, 2 * routing.ranks, at_most=1, depth=1),)),
        "xen_moe_forward": Work(
            forwarded / min(blocks.get("forward", forwarded), forwarded),
            (Part("send", SEND, forwarded, depth=2),),
            routing.ranks // slices,
        ),
        "xen_moe_order_pairs": Work(pairs.given + 1, (Part("leave", "", pairs.blocks, copies=1, depth=2),)),
        "xen_moe_order_tokens": Work(pairs.blocks),
        "xen_moe_reduce_slots": Work(
            pairs.blocks,
            (
                *reduced,
                Part("send", SEND, even, at_least=4, depth=3),
                Part("send one", SEND, odd, at_most=1, depth=3),
            ),
            routing.ranks,
        ),
        "xen_moe_reduce_slots_local": Work(
            pairs.blocks,
            (
                *reduced,
                Part("store", STORE, even, at_least=4, depth=3),
                Part("store one", STORE, odd, at_most=1, depth=3),
            ),
        ),
        "xen_moe_reduce_ranks": Work(
            routing.tokens / ranks,
            (
                Part("fetch", FETCH, routing.tokens * destinations / 4, copies=2),
                Part("wait", WAIT, mean_waits(routing.sent, routing.tokens / ranks, destinations * ranks), depth=2),
                Part("add", "vld", routing.tokens * destinations / min(tile, ranks), 16),
            ),
        ),
    }


def _groups(name: str, block: int, tile: int, rows: int) -> tuple[Part, ...]:
    """The loop over groups of rows of a block; a block of one group has none, and is counted with the step."""
    return (Part(name, "vld", rows / tile, 16),) if block > tile else ()


# -- XLA --------------------------------------------------------------------------------------------------------------


def xla_cycles(text: str) -> int:
    """XLA's own estimate of the cycles of its operations in a compiled program.

    Scalar gathers, sorts, grouped matmuls and collectives have none; a scatter that it gives to the SparseCore has the
    largest int64 instead of one.
    """
    return sum(n for n in map(int, CYCLES.findall(text)) if n < NO_ESTIMATE)


def scalar_operations(text: str) -> dict[str, int]:
    """Gathers, scatters and sorts that XLA left in a program: most elements of one, by kind."""
    found: dict[str, int] = {}
    for shape, kind in re.findall(r"= \(?\w+\[([\d,]*)\][^=]*? (gather|scatter|sort)\(", text):
        elements = 1
        for n in filter(None, shape.split(",")):
            elements *= int(n)
        found[kind] = max(found.get(kind, 0), elements)
    return found


# -- a program ---------------------------------------------------------------------------------------------------------


BY_WEIGHT = "xen_moe_grouped_by_weight"
GROUPED = ("xen_moe_grouped_products", "xen_moe_grouped_transposed", "xen_moe_activation_gradients", BY_WEIGHT)
"""Kernels of grouped matmuls and of their gradients."""


class Grid(NamedTuple):
    """A call of a kernel of grouped matmuls.

    Attributes:
      products: multiplications of a piece of rows in a step of the grid. steps: number of steps of the grid.
      shared: length of the grid's first dimension, which cores share. across: number of steps of the grid that have
        the same visit. piece, tile: rows of a piece, of a tile. columns: columns of a tile.
      rows: rows of the result; 0 for a gradient by weights, whose result has none.
      split: a visit has several steps, so that the next visit reads its rows and its expert's weights again.
      given, beside: bytes that HBM moves in all steps for one row of the operands that are multiplied; for one row of
        all other operands and of the results.
      weights: bytes that HBM moves in all steps for one expert's weights, or for their gradient.
      first_row, window: the first row of the window whose rows the call makes or reads, and how many rows it has.
      awaited: bytes of sums that a gradient by the weights of a window reads and writes while nothing else runs.
    """

    kernel: str
    products: int
    steps: int
    shared: int
    across: int
    piece: int
    tile: int
    columns: int
    rows: int
    split: bool
    given: int
    beside: int
    weights: int
    first_row: int = 0
    window: int = 0
    awaited: int = 0

    def of_window(self, experts: tuple[int, ...]) -> tuple[int, ...]:
        """Returns how many of each expert's rows are in the window."""
        ends = list(itertools.accumulate(experts))
        inside = [
            [min(max(at - self.first_row, 0), self.window) for at in (end - size, end)]
            for end, size in zip(ends, experts, strict=True)
        ]
        return tuple(end - begin for begin, end in inside)


def grid_of(name: str, keywords: dict[str, Any], spec: Any, results: Any) -> Grid:
    """The `Grid` of a call.

    Args:
      keywords: of the kernel's body. spec: its `grid_spec`. results: shape and dtype of each result.
    """
    tiles, ((rows, *_), dtype), awaited = keywords["tiles"], results[0], 0
    if name == BY_WEIGHT:
        across, tile = math.prod(spec.grid[:2]), tiles.above * tiles.columns
        sizes = (False, across * (tiles.above + tiles.columns), 0, across * tile)
        pairs, rows, first_row, window = 1, 0, 0, (spec.grid[2] - keywords["local"]) * tiles.rows
        if part := keywords["window"]:
            first_row, ends = part.first, (part.first, part.rows - part.first - part.count)
            awaited = 4 * across * tile * sum(beyond > 0 for beyond in ends)
    else:
        across, steps, pairs = spec.grid[0] * spec.grid[2], spec.grid[2], sum(map(len, keywords["sums"]))
        tile = tiles.columns * tiles.depth
        count = 1 + max(left for terms in keywords["sums"] for left, _ in terms)
        blocks = [*spec.in_specs[count + pairs :], *spec.out_specs]
        shapes = [block.block_shape for block in blocks if len(block.block_shape or ()) == 2]
        beside = spec.grid[0] * sum(high // tiles.rows * wide for high, wide in shapes)
        groups = keywords["local"] + keywords["zeros"]
        every = [block for block in [*spec.in_specs[:count], *blocks] if len(block.block_shape or ()) == 2]
        above = max(block.index_map(0, 0, 0, [0], [0], [0])[0] for block in every)
        first_row, window = above * tiles.rows, (spec.grid[1] - groups) * tiles.rows
        sizes = (steps > 1, across * count * tiles.depth, beside, across * pairs * tile)
    split, *moved = sizes
    products = pairs * tiles.piece * tile
    given, other, weights = (n * dtype.itemsize for n in moved)
    return Grid(
        name, products, math.prod(spec.grid), spec.grid[0], across, tiles.piece, tiles.rows, tiles.columns, rows, split,
        given, other, weights, first_row, window, awaited,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled operation. `blocks`: rows or tokens of a step of each kernel, as the policy chose them.
    `every_kernel`: also those that share a name. `grids`: of each call of a kernel of grouped matmuls.
    """

    text: str
    kernels: dict[str, Loop]
    blocks: dict[str, int]
    compiled: Any = None
    every_kernel: tuple[tuple[str, Loop], ...] = ()
    grids: tuple[Grid, ...] = ()


def compile_counted(compile_program: Callable[[], Any], folder: str) -> Program:
    """Compiles a program, and takes libtpu's dump out of `folder`."""
    from xen_moe_jax.backends.pallas import hardware

    blocks = {}
    launch = hardware.launch

    def recorded(kernel: str, *args: Any, **kwargs: Any) -> Any:
        chosen = launch(kernel, *args, **kwargs)
        blocks[kernel] = chosen.block
        return chosen

    hardware.launch = recorded  # type: ignore[assignment]
    grids: list[Grid] = []
    try:
        with recorded_grids(grids):
            compiled = compile_program()
    finally:
        hardware.launch = launch
    kernels = take_dump(folder)
    return Program(compiled.as_text(), dict(kernels), blocks, compiled, tuple(kernels), tuple(grids))


@contextlib.contextmanager
def recorded_grids(grids: list[Grid]) -> Iterator[None]:
    """Inside this context, `Launch.call` writes down the grids of grouped matmuls."""
    from xen_moe_jax.pallas_kernels.launch import Launch

    call = Launch.call

    def recorded(self: Any, body: Any, *args: Any, name: str, grid_spec: Any, **kwargs: Any) -> Any:
        if name in GROUPED:
            out = kwargs["out_shape"]
            grids.append(grid_of(name, body.keywords, grid_spec, out if isinstance(out, list) else [out]))
        return call(self, body, *args, name=name, grid_spec=grid_spec, **kwargs)

    Launch.call = recorded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.call = call  # type: ignore[method-assign]


def grouping(program: Program) -> Grouping:
    """How a combine of this program groups its pairs."""
    from xen_moe_jax.pallas_kernels import reduce_slots

    order = program.kernels.get("xen_moe_order_pairs")
    return Grouping(reduce_slots.pairs_at_once(program.blocks.get("reduce_slots", 1)), order.cores if order else 0)


def counts(program: Program, routing: Routing, padded: bool) -> dict[str, Count]:
    """Bundles of every kernel of a program that `works` knows.

    Raises:
      ValueError: a kernel does not have the loops that `works` names.
    """
    found, rest = counts_and_rest(program, routing, padded)
    if rest:
        raise ValueError("; ".join(f"{name}: {reason}" for name, reason in rest.items()))
    return found


def counts_and_rest(
    program: Program, routing: Routing, padded: bool, slices: int = 1
) -> tuple[dict[str, Count], dict[str, str]]:
    """`counts`, and why a kernel was not counted: small programs have fewer loops than `works` names."""
    known = works(program, routing, padded, slices=slices)
    found, rest = {}, {}
    for name, loop in program.kernels.items():
        if name in known:
            try:
                found[name] = count(loop, known[name])
            except ValueError as error:
                rest[name] = str(error)
    return found, rest


def random_experts(tokens: int, ranks: int, experts: int, top_k: int, seed: int) -> Any:
    """Distinct experts of every token, `[ranks, tokens, top_k]`, all equally likely."""
    import numpy as np

    rng = np.random.default_rng(seed)
    return np.argpartition(rng.random((ranks, tokens, experts), np.float32), top_k, axis=2)[..., :top_k]


def random_routing(tokens: int, ranks: int, experts: int, top_k: int, pairs: Grouping, seed: int) -> Routing:
    """Load of the busiest rank under uniform routing with distinct experts."""
    import numpy as np

    idx = random_experts(tokens, ranks, experts, top_k, seed)
    owner = idx // -(-experts // ranks)
    rows = np.stack([(owner == r).sum(2) for r in range(ranks)])  # [destination, source, token]
    busiest = int(rows.sum((1, 2)).argmax())
    return Routing(
        tokens,
        top_k,
        ranks,
        int((rows[busiest] > 0).sum()),
        int(rows[busiest].sum()),
        visited_pairs(rows[busiest].reshape(-1), pairs),
        tuple(np.bincount(idx[owner == busiest], minlength=experts)[np.unique(idx[owner == busiest])].tolist()),
        tuple((rows[busiest] > 0).sum(1).tolist()),
    )


def uniform_routing(tokens: int, ranks: int, experts: int, top_k: int, pairs: Grouping, seed: int) -> Routing:
    """Mean load of a rank under uniform routing with distinct experts of a token; it sends as many records as it
    gets."""
    import numpy as np

    rng = np.random.default_rng(seed)
    local = -(-experts // ranks)
    depths = rng.hypergeometric(local, experts - local, top_k, (ranks, tokens))
    placed = int(depths.sum())
    return Routing(
        tokens,
        top_k,
        ranks,
        int((depths > 0).sum()),
        placed,
        visited_pairs(depths.reshape(-1), pairs),
        tuple(rng.multinomial(placed, np.full(local, 1 / local)).tolist()),
        tuple((depths > 0).sum(1).tolist()),
    )


def moves(routing: Routing) -> Any:
    """`tpu_programs.Counts` of a rank."""
    from benchmarks.tpu import programs as tpu_programs

    others = routing.ranks - 1
    off, duplicated = (n * others // routing.ranks for n in (routing.sent, routing.placed))
    return tpu_programs.Counts(off, duplicated, routing.sent, routing.placed)


def main() -> int:
    """`python -m benchmarks.tpu.bundles`: where the cycles of a dispatch and a combine go."""
    import argparse
    import json
    import tempfile

    from benchmarks.tpu import programs as tpu_programs
    from benchmarks.tpu import topologies as tpu_topologies

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generation", choices=list(tpu_topologies.TOPOLOGIES), default="v5p")
    parser.add_argument("--case", choices=[case.name for case in tpu_programs.CASES], default="throughput")
    chosen = ["dispatch", "combine", "redispatch", "exchange"]
    parser.add_argument("--operations", nargs="+", choices=chosen, default=chosen[:2])
    parser.add_argument("--json", help="write the counts here")
    options = parser.parse_args()

    folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
    tpu_topologies.prepare_environment()
    request_dump(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")
    sizes = {"hidden": 7168, "experts": 256, "top_k": 8}
    topology = tpu_topologies.TOPOLOGIES[options.generation]
    case = next(case for case in tpu_programs.CASES if case.name == options.case)
    document: dict[str, Any] = {"generation": options.generation, "case": case.name, "operations": {}}
    print(f"{options.generation}, 8 devices, {case.name}: {case.tokens} tokens a device. Estimates: no TPU ran this.")
    total = 0.0
    for operation in options.operations:
        compile_one = functools.partial(tpu_programs.compile_own, options.generation, case, operation, sizes)
        program = compile_counted(compile_one, folder)
        routing = uniform_routing(case.tokens, 8, sizes["experts"], sizes["top_k"], grouping(program), 0)
        found = counts(program, routing, case.layout == "padded")
        cycles = {name: c.total for name, c in found.items()} | {"XLA (its own estimate)": xla_cycles(program.text)}
        wire = tpu_programs.traffic(case, operation, moves(routing), sizes["hidden"])["ici_bytes"]
        gathers = tpu_programs.gathered(case, operation, 8, sizes["top_k"], sizes["hidden"])
        wire_us = topology.all_gather_us(wire) if gathers else topology.all_to_all_us(wire)
        print(f"\n{operation}: wire {wire_us:.0f} us")
        for name, n in cycles.items():
            print(f"  {name:28} {n / topology.clock_hz * 1e6:8.1f} us", end="")
            shared = " on each of two cores" if name in found and found[name].cores > 1 else ""
            print(f"  {found[name].step} a step, {found[name].turn}{shared}" if name in found else "")
        total += sum(cycles.values())
        document["operations"][operation] = {
            "wire_us": wire_us,
            "cycles": cycles,
            "step": {name: c.step for name, c in found.items()},
            "turn": {name: c.turn for name, c in found.items()},
            "cores": {name: c.cores for name, c in found.items()},
            "scalar_operations": scalar_operations(program.text),
            "collective_bytes": tpu_programs.collectives(program.text),
        }
    print(f"\nall: {total:.0f} cycles, {total / topology.clock_hz * 1e6:.0f} us at {topology.clock_hz / 1e9:.2f} GHz")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
