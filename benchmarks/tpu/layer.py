"""`python -m benchmarks.tpu.layer`: a whole MoE layer with its gradients, compiled for TPUs without one.

Dispatch, grouped matmuls, combine, and the gradients of all of it, beside the same layer on
`jax.lax.ragged_all_to_all` (`tpu_layer_programs`). `NOTICE` lists the counted quantities; nothing is measured. A
compilation takes minutes: `--json` is written after each, and a program that the file already has is not compiled
again.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import functools
import importlib.metadata
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib import report
from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import layer_floor
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from benchmarks.tpu.dump import Loop

NOTICE = """\
Estimates: no TPU ran this. rows: of the experts of one device, as the routing was drawn; all terms are of these rows.
Memory of one device as the compiled program has it: temporary bytes as XLA reports them,
which count gaps between buffers twice, and the bytes that temporary buffers take, gaps once. Wire: bytes that leave a
device in the two exchanges of the forward and the two of the backward pass, with uniform routing, over the all-to-all
bandwidth of the torus. Kernels: VLIW bundles of our kernels, one a cycle. hbm_us: their bytes over HBM's bandwidth,
where the sums of the floor take the longer one. timeline: the scheduled program as steps: time of our kernels, starts
with the part of an exchange that leaves, and the starts that are waited for. XLA: its own estimate of
its operations; the grouped matmuls, scalar gathers, sorts and collectives have none and are not in it. grouped_us: our
kernels of the matmuls' gradients, by bundles or by the peak of the matrix units, the longer one for each piece of
rows."""
TARGETS = {
    "v5p:2x2x1": "v5p",
    "v5e:2x4": "v5e",
    "v5p:2x2x4": "v5p",
    "v5e:4x4": "v5e",
    "v4:2x2x4": "v4",
    "v5p:4x4x4": "v5p",
    "v5e:8x8": "v5e",
}
"""Topologies and their generations: one host (v5p-8, v5e-8), 16 devices of three, 64 of two."""
SIZES = {"hidden": 7168, "experts": 256, "top_k": 8}
TOKENS, WIDTH = 4096, 2048
"""DeepSeek-V3's layer, with the tokens of a device that the other figures have."""
MATMULS = ("auto", "ragged_dot", "tokamax")
"""The first is what our layer takes where tokamax is not installed: kernels of ours."""
PROGRAMS = ("xen_moe_jax", "jax.lax.ragged_all_to_all")
"""Names of `layer_programs.OWN` and `layer_programs.PEER`."""
ONE_HOST = tuple(TARGETS)[:2]
"""Topologies for which a program is compiled with each of its matmuls; for other topologies, with the first one
alone."""
WHOLE_DISPATCH = "xen_moe_push"
"""The kernel that a program has if its tokens do not come in waves."""
IDENTITY = ("topology", "program", "matmul")


def main(arguments: list[str] | None = None) -> int:
    """Compiles the missing programs, prints the table, writes JSON where asked."""
    import tempfile

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--matmuls", nargs="+", choices=MATMULS, default=list(MATMULS))
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures here, and keep those that are there")
    parser.add_argument("--again", action="store_true", help="compile what the file has, too: the kernels have changed")
    options = parser.parse_args(arguments)

    folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
    tpu_topologies.prepare_environment()
    tpu_bundles.request_dump(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")
    from xen_moe_jax.experts import grouped_matmul

    sizes = SIZES | {"tokens": TOKENS, "width": WIDTH}
    fixed = {"versions": report.versions(), "sizes": sizes, "seed": options.seed}
    document = earlier(options.json, fixed) or {"results": [], "left_out": []}
    document |= {"command": command(options.seed), "notice": NOTICE, **fixed}
    for topology, program, matmul in wanted(options.topologies, options.programs, options.matmuls):
        name = f"{topology} {program} {matmul}"
        if matmul == "tokamax" and not grouped_matmul.installed():
            if not known(document, topology, program, matmul):
                leave_out(document, name, "tokamax is not installed where this was compiled")
            continue
        if known(document, topology, program, matmul) and not options.again:
            continue
        report.progress(name)
        try:
            put(document, one_row(topology, program, matmul, options.seed, folder))
        except Exception as error:  # a program that does not compile is a result
            leave_out(document, name, f"{type(error).__name__}: {error}"[:300])
        document["time"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        if options.json:
            report.write_json(options.json, document)
    print("\n".join([*table(document), "", *floors(document), "", NOTICE, *left_out(document)]))
    return 0


def command(seed: int) -> str:
    """Returns the command that makes all rows of a results file. A run stores it in place of its own command line,
    because it may add a few rows to a file."""
    return "python -m benchmarks.tpu.layer --json FILE --again" + (f" --seed={seed}" if seed else "")


def wanted(topologies: list[str], programs: list[str], matmuls: list[str]) -> list[tuple[str, str, str]]:
    """Topology, program and matmul of the rows of a run. The peer's experts take a matmul by its name."""
    found = []
    for topology, program in itertools.product(topologies, programs):
        names = [name for name in MATMULS if (program, name) != (PROGRAMS[1], "auto")]
        found += [
            (topology, program, name) for name in (names if topology in ONE_HOST else names[:1]) if name in matmuls
        ]
    return found


def earlier(path: str | None, fixed: dict[str, Any]) -> dict[str, Any] | None:
    """The document of an earlier run, if it has the same versions, sizes and seed, `fixed`."""
    if path is None or not pathlib.Path(path).exists() or not pathlib.Path(path).read_text():
        return None
    found = json.loads(pathlib.Path(path).read_text())
    return found if all(found.get(name) == value for name, value in fixed.items()) else None


def known(document: dict[str, Any], topology: str, program: str, matmul: str) -> bool:
    return any((r["topology"], r["program"], r["matmul"]) == (topology, program, matmul) for r in document["results"])


def put(document: dict[str, Any], row: dict[str, Any]) -> None:
    """Puts `row` in place of an earlier row of the same program; rows stand in the order of `TARGETS`."""
    others = [r for r in document["results"] if not known({"results": [r]}, *(row[k] for k in IDENTITY))]
    order = {topology: n for n, topology in enumerate(TARGETS)}
    document["results"] = sorted(
        [*others, row], key=lambda r: (order[r["topology"]], MATMULS.index(r["matmul"]), r["program"] != "xen_moe_jax")
    )
    name = " ".join(row[k] for k in IDENTITY)
    document["left_out"] = [entry for entry in document["left_out"] if entry["name"] != name]


def leave_out(document: dict[str, Any], name: str, why: str) -> None:
    document["left_out"] = [entry for entry in document["left_out"] if entry["name"] != name]
    document["left_out"].append({"name": name, "why": why})


def left_out(document: dict[str, Any]) -> list[str]:
    """Programs that the document does not have, and the reasons."""
    return [f"Not compiled: {entry['name']}: {entry['why']}." for entry in document["left_out"]]


# -- a row ------------------------------------------------------------------------------------------------------------


def one_row(topology: str, program: str, matmul: str, seed: int, folder: str) -> dict[str, Any]:
    """Compiles one program and counts it."""
    from benchmarks.tpu import layer_programs as tpu_layer_programs
    from xen_moe_jax.backends.pallas import hardware

    generation = TARGETS[topology]
    chip = tpu_topologies.TOPOLOGIES[generation]
    devices = len(tpu_topologies.devices(generation, topology=topology))
    begin = time.monotonic()
    compiled = tpu_bundles.compile_counted(
        functools.partial(
            tpu_layer_programs.compile_layer, program, generation, topology, TOKENS, SIZES, WIDTH, matmul
        ),
        folder,
    )
    seconds = time.monotonic() - begin
    us = 1e6 / chip.clock_hz
    counted, uncounted = kernel_cycles(compiled, devices, seed)
    experts = tpu_bundles.uniform_routing(
        TOKENS, devices, SIZES["experts"], SIZES["top_k"], tpu_bundles.Grouping(16), seed
    ).experts
    grouped = grouped_cycles(compiled, chip, experts)
    own = program == tpu_layer_programs.OWN
    version = {"tokamax": importlib.metadata.version("tokamax")} if matmul == "tokamax" else {}
    ici = ici_bytes(own, devices, seed)
    order = tpu_layer_programs.scheduled(compiled.text) if own else []
    by_weight = [grid.window for grid in compiled.grids if grid.kernel == tpu_bundles.BY_WEIGHT]
    waves = waves_of(generation, devices, seed, tokens=WHOLE_DISPATCH not in order) if own else []
    schedule = timeline(order, counted, grouped, by_weight, waves) if own else []
    return {
        "topology": topology,
        "devices": devices,
        "program": program,
        "matmul": matmul,
        **version,
        **tpu_layer_programs.memory(compiled.compiled),
        "kernels": dict(collections.Counter(name for name, _ in compiled.every_kernel)),
        "matmul_kernels": tpu_layer_programs.matmul_kernels(compiled.text),
        "collective_bytes": tpu_programs.collectives(compiled.text),
        "rows": sum(experts),
        "ici_bytes": ici,
        "wire_us": round(chip.all_to_all_us(ici, devices), 1),
        "kernels_us": round(sum(counted.values()) * us, 1),
        "by_kernel_us": {name: round(cycles * us, 1) for name, cycles in counted.items()},
        "grouped_us": {name: round(sum(cycles) * us, 1) for name, cycles in grouped.items()},
        "ragged_us": ragged_us(compiled.text, chip, experts),
        **(
            {"hbm_us": hbm_us(chip, devices, seed, matmul == "auto" and generation in hardware.HALVES, counted)}
            if own
            else {}
        ),
        **(
            {"timeline": [[kind, round(n * us, 1) if kind in ("core", "sends") else n] for kind, n in schedule]}
            if own
            else {}
        ),
        "uncounted": uncounted,
        "xla_us": round(tpu_bundles.xla_cycles(compiled.text) * us, 1),
        "scalar_operations": tpu_bundles.scalar_operations(compiled.text),
        "compile_seconds": round(seconds, 1),
    }


def kernel_cycles(program: tpu_bundles.Program, devices: int, seed: int) -> tuple[dict[str, float], dict[str, str]]:
    """Cycles of the library's kernels by name, instances of one name together; and the kernels that were not counted,
    with reasons."""
    from benchmarks.tpu import layer_programs as tpu_layer_programs

    group = tpu_bundles.grouping(program)
    routing = tpu_bundles.uniform_routing(TOKENS, devices, SIZES["experts"], SIZES["top_k"], group, seed)
    works = tpu_bundles.works(program, routing, padded=False)
    each: dict[str, list[float]] = collections.defaultdict(list)
    uncounted = {}
    for name, loop in program.every_kernel:
        if name in tpu_bundles.GROUPED:
            continue
        if name not in works:
            uncounted[name] = "its trips are not modelled"
            continue
        try:
            each[name].append(tpu_bundles.count(loop, works[name]).total)
        except ValueError as error:
            uncounted[name] = str(error)[:200]
    calls = collections.Counter(name.split()[0] for name in tpu_layer_programs.scheduled(program.text))
    counted = {}
    for name, found in each.items():
        times: float = max(len(found), calls[name])  # equal calls are one kernel
        if name in ("xen_moe_place", "xen_moe_reduce_slots_local"):  # windows have the work of one call together
            times = min(times, 2)
        counted[name] = sum(found) / len(found) * times
    return counted, uncounted


def grouped_cycles(
    program: tpu_bundles.Program, chip: tpu_topologies.Topology, experts: tuple[int, ...]
) -> dict[str, list[float]]:
    """Cycles of our kernels of the matmuls and of their gradients by name, of each call in the order of the program.

    A piece of rows takes its bundles, or the peak time of its products where that is longer. A kernel takes the time of
    its pieces and steps, or the time in which HBM moves its bytes where that is longer, and that of the sums for which
    it waits. Pieces with more products have more bundles: in the order of their longest pieces kernels of the dump and
    calls that were traced are matched, and within a kernel its loops and the sizes of its pieces. Calls of the same
    shapes may be one kernel.

    Args:
      experts: rows of each expert of a rank.

    Raises:
      ValueError: there are other kernels than calls.
    """
    found = {}
    for name in tpu_bundles.GROUPED:
        calls = [grid for grid in program.grids if grid.kernel == name]
        loops = sorted((loop for kernel, loop in program.every_kernel if kernel == name), key=_of_grid)
        alike = [grid._replace(first_row=0) for grid in calls]
        for kernels in (calls, alike, list(enumerate(calls))):  # the kernel of each call
            if len(set(kernels)) == len(loops):
                break
        else:
            raise ValueError(f"{name}: {len(loops)} kernels in the dump, {len(calls)} calls")
        grids = dict(zip(kernels, calls, strict=True))
        order = sorted(grids, key=lambda kernel: (_longest(experts, grids[kernel]), grids[kernel]))
        of_kernel = dict(zip(order, loops, strict=True))
        if calls:
            found[name] = [
                _cycles(grid, of_kernel[kernel], chip, experts) for kernel, grid in zip(kernels, calls, strict=True)
            ]
    return found


def _cycles(grid: tpu_bundles.Grid, loop: Loop, chip: tpu_topologies.Topology, experts: tuple[int, ...]) -> float:
    """Cycles of a call, as in `grouped_cycles`."""
    bundles = _of_grid(loop)
    inside = grid.of_window(experts)
    whole, more, seen = pieces(inside, grid)
    longer = [bundles.pop(0) for _ in more][::-1]
    zeros = bool(grid.rows) and grid.kernel != tpu_bundles.GROUPED[0]
    if len(bundles) <= zeros:
        raise ValueError(f"{grid.kernel}: a step has other loops than its pieces and zeros")
    step = sum(inner.bundles for inner in loop.inner)
    least = 2 * grid.products * loop.cores / chip.flops_per_s * chip.clock_hz
    work = whole * max(bundles[0], least)
    work += sum(n * max(b, size / grid.piece * least) for b, (size, n) in zip(longer, more.items(), strict=True))
    rows, present = sum(inside), sum(size > 0 for size in inside)
    if zeros:  # past the last group
        work += (grid.window - rows) // grid.piece * bundles[-1]
    moved = (seen * grid.tile if grid.split else rows) * grid.given + rows * grid.beside
    moved += (seen if grid.split else present) * grid.weights
    busiest = -(-grid.shared // loop.cores) / grid.shared  # the part of the core that has the most tiles
    cycles = (grid.steps * step + grid.across * work) * busiest
    of_hbm = chip.clock_hz / chip.hbm_bytes_per_s
    return max(cycles, moved * of_hbm) + grid.awaited * of_hbm


def ragged_us(text: str, chip: tpu_topologies.Topology, experts: tuple[int, ...]) -> list[float]:
    """Microseconds of each of XLA's grouped matmuls in a compiled program: the peak time of the products of its tiles,
    or the time in which HBM moves what its grid reads and writes, where that is longer.

    A tile of rows that several experts share is multiplied for each of them. XLA's grid goes over tiles of columns,
    then visits of tiles of rows, then the contracted dimension; for a gradient by the weights over tiles of columns, of
    rows of the weight, then visits. A block that the next step has too is not read again.
    """
    from benchmarks.tpu import layer_programs

    rows, local, found = sum(experts), len(experts), []
    for (deep, wide), by_weight, (m, k, n), itemsize in layer_programs.ragged_dots(text):
        seen, across, steps = visits(experts, m) * m, -(-wide // n), -(-deep // k)
        moved = itemsize * (local * deep if by_weight else rows) * wide  # the result
        if by_weight:
            moved += 2 * rows * (across * deep + steps * wide)
        else:
            moved += 2 * (across * (rows if steps == 1 else seen) * deep)
            moved += 2 * (local if steps == 1 else seen // m) * deep * wide
        us = max(2 * seen * deep * wide / chip.flops_per_s, moved / chip.hbm_bytes_per_s) * 1e6
        found.append(round(us, 1))
    return found


def visits(sizes: tuple[int, ...], rows: int) -> int:
    """Tiles of so many rows that the rows of each expert lie in."""
    ends = np.cumsum(sizes)
    return sum(-(-end // rows) - (end - size) // rows for end, size in zip(ends.tolist(), sizes, strict=True) if size)


class Waves(NamedTuple):
    """Waves of `experts.waves` in one exchange, by uniform routing.

    Attributes:
      rows: which part of a rank's rows each window has. carried: which part of the exchange each wave carries.
      buffer: records in the buffer from which the waves leave. home: they are sums that go home.
    """

    rows: list[float]
    carried: list[float]
    buffer: int
    home: bool = False


def waves_of(generation: str, devices: int, seed: int, *, tokens: bool) -> list[Waves]:
    """Returns the waves of our layer, in the order of the program: of rows that come, if `tokens` come in waves; each
    one of the outputs; of cotangents, of which the last window has two; and each one of the rows' gradient. A record
    comes with its token's first row on a rank, and a sum goes home with the last."""
    from benchmarks.tpu import layer_programs as tpu_layer_programs
    from xen_moe_jax._spec import Spec
    from xen_moe_jax.backends.pallas import plan
    from xen_moe_jax.experts import waves

    capacity = tpu_layer_programs.capacity(tpu_layer_programs.workload(devices, TOKENS, SIZES))
    spec = Spec(("ep",), (devices,), SIZES["experts"], TOKENS, SIZES["top_k"], "grouped", capacity, 1)
    rng, local = np.random.default_rng(seed), -(-SIZES["experts"] // devices)
    idx = np.argpartition(rng.random((8 * TOKENS, SIZES["experts"]), np.float32), SIZES["top_k"], axis=1)
    idx = idx[:, : SIZES["top_k"]]
    rows, here, fraction = TOKENS * SIZES["top_k"], idx < local, rng.random(8 * TOKENS)

    def parts(cut: list[tuple[int, int]], back: bool) -> tuple[list[float], list[float]]:
        ends = np.array([min(end, rows) for _, end in cut]) / rows
        expert = np.where(here, idx, -1).max(1) if back else idx.min(1)
        place = np.sort((expert + fraction)[here.any(1)])
        carried = np.diff(np.searchsorted(place, ends * local), prepend=0) / len(place)
        return np.diff(ends, prepend=0).tolist(), [round(float(part), 4) for part in carried]

    def home(cut: list[tuple[int, int]], buffers: list[int]) -> list[Waves]:
        return [Waves([n], [part], room, home=True) for n, part, room in zip(*parts(cut, True), buffers, strict=True)]

    come = Waves(*parts(waves.windows(spec, back=True, both=True), False), plan.combine_staging_rows(spec))
    forward, back = waves.windows(spec, back=True, both=tokens), waves.ways_back(spec, generation)
    buffers = [*waves.rooms(back, spec)[:-1], plan.dispatch_staging_rows(spec)]
    cotangents = come._replace(rows=parts(waves.windows(spec), False)[0])
    return [*[come] * tokens, *home(forward, waves.rooms(forward, spec)), cotangents, *home(back, buffers)]


def timeline(
    order: list[str],
    counted: dict[str, float],
    grouped: dict[str, list[float]],
    by_weight: list[int],
    waves: Sequence[Waves],
) -> list[tuple[str, float]]:
    """Returns what a program does, step by step: ("core", cycles of kernels), ("start", the part of an exchange that
    leaves), ("done", number of the start that is waited for), or ("sends", cycles of a kernel that sends an exchange
    and waits for it).

    Args:
      order: the kernels of the program. counted: cycles of all calls of a kernel. grouped: of each call, as traced.
      by_weight: rows of each gradient by weights, as traced. waves: as of `waves_of`.
    """
    every = collections.Counter(name.split()[0] for name in order)
    each = {name: list(found) for name, found in grouped.items() if name != tpu_bundles.BY_WEIGHT}
    for one, rows in zip(grouped.get(tpu_bundles.BY_WEIGHT, []), by_weight, strict=True):  # they run in another order
        each.setdefault(f"{tpu_bundles.BY_WEIGHT} {rows}", []).append(one)
    for name, found in each.items():
        if len(found) != order.count(name):
            raise ValueError(f"{name}: {order.count(name)} calls in the program, {len(found)} were traced")
    parts: dict[str, list[float]] = collections.defaultdict(list)  # of the waves that leave from a buffer
    for wave in waves:
        parts[f"xen_moe_start {wave.buffer}"] += wave.carried
    if not parts or not parts.keys() <= set(order):  # a wave is a whole exchange, and no window has a part of a kernel
        waves, parts = [], collections.defaultdict(list)
    else:
        windows = [[1.0], *(wave.rows for wave in waves if not wave.home)][-2:]  # of both passes
        each["xen_moe_place"] = [counted["xen_moe_place"] / 2 * n for rows in windows for n in rows]
        sums = counted["xen_moe_reduce_slots_local"] / 2
        each["xen_moe_reduce_slots_local"] = [sums * n for wave in waves if wave.home for n in wave.rows]
    steps: list[tuple[str, float]] = []
    for name in order:
        kernel, _, number = name.partition(" ")
        if kernel == "xen_moe_start":
            steps.append(("start", parts[name].pop(0) if parts[name] else 1.0))
        elif kernel == "xen_moe_done":
            steps.append(("done", int(number)))
        elif kernel in layer_floor.SENDING:
            steps.append(("sends", counted[kernel] / every[kernel]))
        else:
            cycles = each[name].pop(0) if name in each else counted.get(kernel, 0.0) / every[kernel]
            before = steps.pop()[1] if steps and steps[-1][0] == "core" else 0.0
            steps.append(("core", before + cycles))
    return steps


def hbm_us(
    chip: tpu_topologies.Topology, devices: int, seed: int, halves: bool, counted: dict[str, float]
) -> dict[str, float]:
    """Returns microseconds in which HBM moves the bytes of each kernel of the exchanges, forward and backward together.

    A record counts as its row of bfloat16. A row that `reduce_slots` reads counts as two, the rows that share its
    words; or as one with `halves`, where both combines read rows that were made in halves. Where an exchange has a
    start and a done, `pack` or `reduce_slots_local` (a kernel in `counted`) writes what it sends, and the way of that
    is not in its time.
    """
    routing = tpu_bundles.uniform_routing(
        TOKENS, devices, SIZES["experts"], SIZES["top_k"], tpu_bundles.Grouping(16), seed
    )
    rows: dict[str, float] = {
        "xen_moe_push": TOKENS + routing.sent,
        "xen_moe_place": 2 * routing.placed,
        "xen_moe_reduce_slots": (1 if halves else 2) * routing.placed + routing.sent,
        "xen_moe_reduce_ranks": routing.sent + TOKENS,
    }
    for whole, apart in layer_floor.SENDING.items():
        if apart in counted:
            rows[apart] = rows[whole] / 2 if whole in counted else rows.pop(whole)
            rows |= {whole: rows[apart]} if whole in counted else {}
    us = 2 * SIZES["hidden"] * 2 / chip.hbm_bytes_per_s * 1e6
    return {name: round(n * us, 1) for name, n in rows.items()}


def pieces(sizes: tuple[int, ...], grid: tpu_bundles.Grid) -> tuple[int, dict[int, int], int]:
    """Returns how the rows of experts with `sizes` rows each are cut: the number of pieces of `grid.piece` rows; the
    number of longer pieces by their rows, ascending; and the number of visits. In a gradient by weights, two pieces
    that one turn of the kernel's loop multiplies count as one longer piece."""
    from xen_moe_jax.pallas_kernels import grouped_by_weight, grouped_transposed

    ends = np.cumsum(sizes)
    found = [
        (max(end - size - tile * grid.tile, 0), min(end - tile * grid.tile, grid.tile))
        for end, size in zip(ends.tolist(), sizes, strict=True)
        for tile in range((end - size) // grid.tile, -(-end // grid.tile))
        if size
    ]
    begin, end = np.array(found, np.int32).T
    if grid.kernel == tpu_bundles.BY_WEIGHT:
        of_weight = grouped_by_weight.WeightTiles(grid.tile, 128, 128, grid.piece)
        _, whole = grouped_by_weight.pieces_of(begin, end, of_weight)
        if grid.tile == grid.piece:
            return int(whole.sum()), {}, len(found)
        return int((whole % 2).sum()), {2 * grid.piece: int((whole // 2).sum())}, len(found)
    tiles = grouped_transposed.Tiles(grid.tile, 128, 128, grid.piece)
    _, whole, more = grouped_transposed.pieces_of(begin, end, tiles)
    return int(whole.sum()), {size: int((more == n).sum()) for n, size in enumerate(tiles.longer, 1)}, len(found)


def _longest(experts: tuple[int, ...], grid: tpu_bundles.Grid) -> int:
    """Returns the products of the longest piece of a call's steps."""
    return grid.products // grid.piece * max(pieces(experts, grid)[1], default=grid.piece)


def _of_grid(kernel: Loop) -> list[int]:
    """Bundles of the loops in a step of a kernel's grid, over the pieces of rows: of the longest one first."""
    return sorted((loop.bundles for step in kernel.inner for loop in step.inner), reverse=True)


def ici_bytes(own: bool, devices: int, seed: int) -> int:
    """Bytes that leave a device: two exchanges forward, two backward, of a row for each (token, rank) by the library,
    of a row for each slot by the peer; bfloat16.
    """
    routing = tpu_bundles.uniform_routing(
        TOKENS, devices, SIZES["experts"], SIZES["top_k"], tpu_bundles.Grouping(16), seed
    )
    row = SIZES["hidden"] * 2
    if not own:
        return 4 * routing.placed * (devices - 1) // devices * row
    case = tpu_programs.Case("layer", TOKENS, "grouped", None, None)
    counts = tpu_bundles.moves(routing)
    dispatch, combine = (
        tpu_programs.traffic(case, operation, counts, SIZES["hidden"], SIZES["top_k"], devices)["ici_bytes"]
        for operation in ("dispatch", "combine")
    )
    # backward: a redispatch without headers, and a combine
    return dispatch + 3 * combine


# -- showing ----------------------------------------------------------------------------------------------------------

COLUMNS = (
    *(
        "topology",
        "matmul",
        "program",
        "temp MiB",
        "taken MiB",
        "ours of it",
        "ICI MB",
        "wire us",
        "kernels us",
        "XLA us",
    ),
    *("our kernels", "XLA's collectives, KiB"),
)


def cells(row: dict[str, Any], document: dict[str, Any]) -> list[str]:
    # the peer's experts have no "auto"
    from_same = [
        r for r in document["results"] if r["topology"] == row["topology"] and row["matmul"] in (r["matmul"], "auto")
    ]
    least_of_others = [r["allocated_bytes"] for r in from_same if r["program"] != row["program"]]
    own = row["program"] == "xen_moe_jax"
    moved = row["collective_bytes"]
    return [
        row["topology"],
        row["matmul"],
        row["program"],
        f"{row['temp_bytes'] / 2**20:.0f}",
        f"{row['allocated_bytes'] / 2**20:.0f}",
        f"{row['allocated_bytes'] / least_of_others[0]:.0%}" if own and least_of_others else "-",
        f"{row['ici_bytes'] / 1e6:.0f}",
        f"{row['wire_us']:.0f}",
        f"{row['kernels_us']:.0f}" if own else "-",
        f"{row['xla_us']:.0f}",
        str(sum(row["kernels"].values())),
        ", ".join(f"{kind} {size / 1024:.0f}" for kind, size in moved.items()) or "none",
    ]


def table(document: dict[str, Any]) -> list[str]:
    """Returns the rows as a Markdown table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 4) + "---|"]
    return lines + ["| " + " | ".join(cells(row, document)) + " |" for row in document["results"]]


def floors(document: dict[str, Any]) -> list[str]:
    """Returns the static floor of each row as a Markdown table, and the parts of ours as another one."""
    chips = {topology: tpu_topologies.TOPOLOGIES[generation] for topology, generation in TARGETS.items()}
    return [*layer_floor.table(document, chips), "", *layer_floor.parts(document, chips)]


if __name__ == "__main__":
    raise SystemExit(main())
