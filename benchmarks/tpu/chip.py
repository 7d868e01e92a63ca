"""`python -m benchmarks tpu-chip PART --json FILE`: times on TPUs, beside what was counted for the same chip.

Parts, each a process of its own:
- `operations`: dispatch, combine and round trip of 4096 and of 128 tokens (a decode), beside
  `jax.lax.ragged_all_to_all` alone and `all_gather` + `psum_scatter`.
- `kernels`: what each kernel of a dispatch and a combine takes. From the profiler where it shows TPU operations; else
  from programs that keep one kernel more each (`watch.keep`), as differences.
- `further`: the same for all other kernels (`benchmarks.tpu.further`).
- `layer`: an MoE layer with `grouped_matmul="auto"`, the default, forward and with its gradients, beside the same layer
  on `jax.lax.ragged_all_to_all` and `jax.lax.ragged_dot`.
- `counted`: the static estimate, in which nothing runs: bundles of each kernel, XLA's estimate of its operations, time
  of the bytes on the wire and in HBM (`benchmarks.tpu.bundles`), of the chip that --generation and --devices name.
- `counted-further`: the static estimate for the programs of `further`.

`compared` joins the parts: measured over counted, for every kernel and operation. `benchmarks.tpu.here` says where a
part runs; for a topology it only compiles, and writes the kernels of each program.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.lib.options import TPU_CASES, TPU_GENERATIONS
from benchmarks.tpu.programs import CASES, Case

LARGE = {"hidden": 7168, "experts": 256, "top_k": 8}
SMALL = {"hidden": 256, "experts": 8, "top_k": 4}
SMALL_TOKENS = {4096: 16, 128: 2}
"""Tokens of a rehearsal: the interpreter takes milliseconds for each DMA."""
WIDTH = 1024
"""Features inside an expert of the layer: its weights and gradients fit a v5e."""
CAPACITY_FACTOR = 1.25
PEERS = ("all_gather + psum_scatter by token",)
EXCHANGE = "ragged_all_to_all there and back, no sorting"
AGAINST_PEERS = ("throughput-bf16", "low-latency-bf16")
OPERATIONS = ("dispatch", "combine")
OURS = "xen_moe_jax"
SLOW = 8.0
"""A kernel is called slow where its measured time over its counted one is this many times the median of all kernels."""
SMALLEST_SHARE = 0.1
"""A slow kernel also takes at least this share of the time of its operation's kernels."""


def sizes(small: bool) -> dict[str, int]:
    return SMALL if small else LARGE


only: list[str] = []
"""Names of the cases to which `main` confines the parts; empty: all of them."""


def cases(small: bool) -> list[Case]:
    """The cases of the static report; a rehearsal has two, with few tokens, and each part takes one of them."""
    if not small:
        return [case for case in CASES if not only or case.name in only]
    few = [dataclasses.replace(case, tokens=SMALL_TOKENS[case.tokens]) for case in CASES]
    return [case for case in few if case.name in AGAINST_PEERS]


# -- counted ----------------------------------------------------------------------------------------------------------


Put = Callable[[dict[str, Any]], None]
"""Takes what a part has found so far: a row, or a document that gets more rows."""


def counted(generation: str, devices: int, small: bool, folder: str, put: Put = lambda _: None) -> dict[str, Any]:
    """The static estimate of every case and operation, in microseconds; nothing here is measured. `put` gets it after
    every row."""
    from benchmarks.tpu import bundles, programs, topologies

    topology = topologies.TOPOLOGIES[generation]
    document, name = counted_for(generation, devices), topology.topology_of(devices)
    known: dict[tuple[Any, ...], Any] = {}  # cases that differ in the other operation's wire share a program
    for case in cases(small):
        for operation in OPERATIONS:
            compile_one = functools.partial(
                programs.compile_own, generation, case, operation, sizes(small), topology=name
            )
            wire_dtype = case.dispatch_wire if operation == "dispatch" else case.combine_wire
            key = (case.tokens, case.layout, operation, wire_dtype)
            if key not in known:
                known[key] = bundles.compile_counted(compile_one, folder)
            program = known[key]
            routing = bundles.uniform_routing(
                case.tokens, devices, sizes(small)["experts"], sizes(small)["top_k"], bundles.grouping(program), 0
            )
            us = 1e6 / topology.clock_hz
            top_k = sizes(small)["top_k"]
            moved = programs.traffic(case, operation, bundles.moves(routing), sizes(small)["hidden"], top_k, devices)
            by_all_gather = programs.gathered(case, operation, devices, top_k, sizes(small)["hidden"])
            wire = topology.all_gather_us if by_all_gather else topology.all_to_all_us
            counts, uncounted = bundles.counts_and_rest(program, routing, case.layout == "padded")
            row: dict[str, Any] = {"case": case.name, "operation": operation, "tokens": case.tokens}
            row |= {"kernels": {kernel: round(c.total * us, 3) for kernel, c in counts.items()}}
            given = topology, case, operation, bundles.moves(routing), sizes(small)["hidden"], top_k, devices
            row |= {"bytes_us": programs.bytes_us(*given)}
            row |= {
                "xla_us": bundles.xla_cycles(program.text) * us,
                "wire_us": wire(moved["ici_bytes"], devices),
                "hbm_us": moved["hbm_bytes"] / topology.hbm_bytes_per_s * 1e6,
                "floor_us": 0.0,
                "uncounted": uncounted,
            }
            row["floor_us"] = max(row["wire_us"], row["hbm_us"], sum(row["kernels"].values()) + row["xla_us"])
            document["rows"].append(row)
            put(document)
    return document


def counted_for(generation: str, devices: int) -> dict[str, Any]:
    """Returns a document of the static estimate without rows."""
    from benchmarks.tpu import topologies

    name = topologies.TOPOLOGIES[generation].topology_of(devices)
    return {"generation": generation, "devices": devices, "topology": name, "estimates": True, "rows": []}


def counted_further(
    generation: str, devices: int, small: bool, folder: str, put: Put = lambda _: None
) -> dict[str, Any]:
    """`counted` for the programs of the part `further`."""
    from benchmarks.tpu import further
    from benchmarks.tpu import here as places

    document = counted_for(generation, devices)
    os.environ[places.COMPILE_FOR] = document["topology"]  # before `here` is asked for the first time
    for one, given in further_programs(small):
        document["rows"].append(further.counted(one, given, generation, folder))
        put(document)
    return document


def further_programs(small: bool) -> Iterator[tuple[Any, Any]]:
    """`(further.Further, further.Given)` of every program that runs here."""
    from benchmarks.tpu import further
    from benchmarks.tpu import here as places

    seen = set()
    for one in further.FURTHER:
        if (only and one.case(1).name not in only) or (small and one.operation in seen):
            continue  # a rehearsal has one number of tokens
        seen.add(one.operation)
        case = one.case(places.here().count)
        if small:
            case = dataclasses.replace(case, tokens=SMALL_TOKENS[4096 if one.sizes is None else 128])
        given = sizes(small) if one.sizes is None else further.sizes_of(further.decoded(small))
        measured = prepared(case, given, one.slices)
        if one.make is further.experts and measured.config.backend != "pallas":
            continue  # it calls kernels by themselves, of which the reference backend has none
        yield one, further.Given(measured.problem, measured.config, small)


HOSTS = {"v4-8": ("v4", 4), "v5e-8": ("v5e", 8), "v5p-8": ("v5p", 4), "v6e-8": ("v6e", 8), "7x-8": ("tpu7x", 8)}
"""By the name of one host: its generation, and how many JAX devices it has."""


# -- programs ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Measured:
    """A case on the devices that there are."""

    case: Case
    problem: Any
    config: Any


def prepared(case: Case, sizes: dict[str, int], slices: int = 1) -> Measured:
    """The case's workload, placed; for a topology its shapes alone.

    Args:
      sizes: `hidden`, `experts`, `top_k`. slices: ranks of the slow axis; the mesh has one if they are more than 1.
    """
    import jax

    from benchmarks.tpu import further
    from benchmarks.tpu import here as places
    from xen_moe_jax.tuning import problem as problems
    from xen_moe_jax.tuning import workload

    here = places.here()
    found: dict[str, Any] = {**sizes}
    work = workload.Workload(
        case.tokens, ranks=here.count, wire=case.dispatch_wire, combine_wire=case.combine_wire, layout=case.layout,
        capacity_factor=CAPACITY_FACTOR if case.layout == "grouped" else None, **found,
    )  # fmt: skip
    several = slices > 1
    shape = (slices, here.count // slices) if several else (here.count,)
    mesh = places.mesh(shape, (further.SLOW_AXIS, problems.AXIS) if several else (problems.AXIS,))
    idx, weights = workload.draw_topk_idx(work), workload.draw_topk_weights(work)
    caps = workload.capacities(work, idx)
    if here.kind != "topology":
        inputs = problems.place_inputs(work, mesh, idx, weights)
        return Measured(case, problems.Problem(work, mesh, idx, weights, caps, inputs), places.config())
    of_rank, of_pool, _ = problems.specs(mesh)

    def struct(shape: tuple[int, ...], dtype: Any, spec: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

    pool = (work.pool, work.ranks * work.tokens, work.top_k)
    inputs = problems.Inputs(
        struct((work.ranks * work.tokens, work.hidden), work.compute_dtype, of_rank),
        struct(pool, "int32", of_pool),
        struct(pool, "float32", of_pool),
    )
    return Measured(case, problems.Problem(work, mesh, idx, weights, caps, inputs), places.config())


def operations_of(measured: Measured) -> list[Any]:
    """Returns the programs that are timed in a case: ours, and the peers' where the case has them."""
    from benchmarks.peers import registry
    from xen_moe_jax.tuning import programs

    problem, against = measured.problem, measured.case.name in AGAINST_PEERS
    wanted = (*OPERATIONS, "round trip") if against else OPERATIONS
    found = programs.own_programs(problem.work, problem.caps, measured.config, wanted)
    if against:
        names = tuple(n for n in PEERS if problem.platform in registry.PEERS[n].platforms)
        found += registry.peer_programs(problem.work, problem.caps, problem.platform, names)
        found.append(bare_exchange(measured))
    return found


def bare_exchange(measured: Measured) -> Any:
    """Returns the least that a round trip on `jax.lax.ragged_all_to_all` needs: the rows of every slot go to their
    ranks and come back. They are taken as sorted, and nothing is added up; XLA compiles the sorts for minutes.
    """
    import jax
    import jax.numpy as jnp

    import xen_moe_jax as xm
    from benchmarks.peers.ragged import exclusive
    from xen_moe_jax.tuning.problem import AXIS
    from xen_moe_jax.tuning.programs import Program

    work, here = measured.problem.work, measured.problem.platform == "cpu"
    room = work.ranks * work.tokens * work.top_k if here else measured.problem.caps.grouped
    ragged = xm.ragged_all_to_all if here else jax.lax.ragged_all_to_all  # XLA has none for CPUs

    def prepare(x: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> tuple[jax.Array, jax.Array]:
        named = (topk_idx // work.local_experts)[..., None] == jnp.arange(work.ranks)
        sizes = jnp.sum(named, axis=(0, 1), dtype=jnp.int32)
        return jnp.repeat(x, work.top_k, axis=0), jax.lax.all_gather(sizes, AXIS)

    def step(operands: Any, rows: jax.Array, topk_idx: jax.Array, topk_weights: jax.Array) -> jax.Array:
        sizes, me = operands[1], jax.lax.axis_index(AXIS)  # [source, destination]
        starts, landing = exclusive(sizes, 1), exclusive(sizes, 0)
        there = jnp.zeros((room, work.hidden), rows.dtype)
        there = ragged(rows, there, starts[me], sizes[me], landing[me], sizes[:, me], axis_name=AXIS)
        back = jnp.zeros_like(rows)
        return ragged(there, back, landing[:, me], sizes[:, me], starts[:, me], sizes[me], axis_name=AXIS)

    return Program(EXCHANGE, "round trip", prepare, lambda operands, *_: operands[0], step)


def is_own(program: Any) -> bool:
    return program.name.startswith(OURS)


class Clock:
    """Compiles programs, tells the watch, and times them; on a topology it only compiles."""

    def __init__(self, small: bool):
        from benchmarks.tpu import here as places

        self.small, self.only_compiles = small, places.here().kind == "topology"
        self.compiled: list[dict[str, Any]] = []

    def start(self, name: str, measured: Measured, program: Any, around: Any = None) -> Any:
        """The compiled loop ready to run, and its kernels; None where nothing can run."""
        from benchmarks.tpu import programs, watch
        from xen_moe_jax.tuning import timing

        inner = 1 if self.small else 20 if measured.case.tokens > 1000 else 200
        watch.compiling(name)
        loop: list[Any] = []
        start = timing.compile_only(
            program, measured.problem, inner, around=around or contextlib.nullcontext(), kept=loop
        )
        kernels = list(watch.traced)
        row = {"program": name, "kernels": [kernel for kernel, _ in kernels]}
        self.compiled.append(row | {"compiled": programs.kernels(loop[0].as_text())})
        if self.only_compiles:
            return None
        watch.running(f"{name}: preparing operands", kernels)
        timed = start()
        watch.running(name, kernels)
        timed.run_once()
        watch.finished()
        return timed, kernels

    def time(self, name: str, started: Any, repeats: int) -> list[float]:
        """Microseconds of a call, of the slowest process, for each repeat."""
        from benchmarks.tpu import watch
        from xen_moe_jax.tuning import timing

        timed, kernels = started
        watch.running(name, kernels)
        found = [timing.slowest_process(timed.run_once()) for _ in range(repeats)]
        watch.finished()
        return found


def measure_operations(small: bool, put: Callable[[dict], None]) -> Clock:
    """Every operation of every case, and the peers."""
    from benchmarks.lib import verify

    clock = Clock(small)
    for case in cases(small)[-1:] if small else cases(small):
        measured = prepared(case, sizes(small))
        started = []
        for program in operations_of(measured):
            name = f"{case.name}, {program.operation}, {program.name}"
            one = clock.start(name, measured, program)
            if one is None:
                continue
            error = None
            if program.name != EXCHANGE:
                verify.check_timed_result(one[0], measured.problem)
            if program.round_trip is not None:
                error = verify.check_round_trip(program, measured.problem)
            elif program.name == EXCHANGE:
                error = unlike(one[0].result, one[0].operands[0][0])
            started.append((name, program, one, error))
        for name, program, one, error in started:
            us = clock.time(name, one, 1 if small else 7)
            put(
                {
                    "case": case.name,
                    "operation": program.operation,
                    "program": OURS if is_own(program) else program.name,
                    "us": statistics.median(us),
                    "least_us": min(us),
                    "most_us": max(us),
                    "largest_error": error,
                }
            )
    return clock


def unlike(got: Any, expected: Any) -> float:
    """Returns 0.0.

    Raises:
      WrongResultError: rows did not come back as they left.
    """
    import jax
    import jax.numpy as jnp

    from benchmarks.lib import verify

    different = int(jax.jit(lambda a, b: jnp.sum(a != b))(got, expected))
    if different:
        raise verify.WrongResultError(f"{EXCHANGE}: {different} elements did not come back as they left")
    return 0.0


# -- kernels ----------------------------------------------------------------------------------------------------------

KERNEL = re.compile(r"^%?(xen_moe_[a-z_]*[a-z])(?=[.\s=]|$)")
"""The profiler's name of a kernel: its name in the compiled program, with a number behind it."""


def kernels_of_profile(profile: Any, calls: int) -> dict[str, float]:
    """Microseconds of each of our kernels in a call, on the device where it takes longest. Empty where the profile
    shows no operation of a TPU.
    """
    slowest: dict[str, float] = {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:TPU"):
            continue
        here: dict[str, float] = {}
        for line in plane.lines:
            if line.name != "XLA Ops":
                continue
            for event in line.events:
                if match := KERNEL.match(event.name):
                    here[match[1]] = here.get(match[1], 0.0) + event.duration_ns / 1e3 / calls
        for name, us in here.items():
            slowest[name] = max(slowest.get(name, 0.0), us)
    return slowest


def profiled(run: Callable[[], Any], calls: int) -> dict[str, float]:
    """`kernels_of_profile` of one run."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        files = sorted(pathlib.Path(folder).rglob("*.xplane.pb"))
        return kernels_of_profile(jax.profiler.ProfileData.from_file(str(files[-1])), calls) if files else {}


def differences(names: list[str], us: list[float]) -> dict[str, float]:
    """Returns the microseconds that each kernel adds, from the times of programs with none, one, two ... of them.

    No time is negative.
    """
    found: dict[str, float] = {}
    for name, before, after in zip(names, us, us[1:], strict=False):
        found[name] = found.get(name, 0.0) + max(after - before, 0.0)
    return found


def time_kernels(clock: Clock, measured: Measured, program: Any, operation: str, put: Callable[[dict], None]) -> None:
    """Times the kernels of one program, and puts its row: by the profiler where it shows them, else as differences of
    programs with one kernel more each."""
    from benchmarks.tpu import watch

    label, small = f"{measured.case.name}, {operation}", clock.small
    whole = clock.start(f"{label}, whole", measured, program, watch.keep(None))
    row: dict[str, Any] = {"case": measured.case.name, "operation": operation}
    names = clock.compiled[-1]["kernels"]
    if whole is not None:
        timed, _ = whole
        by_profile = {} if small else profiled(timed.run_once, timed.inner)
        if by_profile:
            put(row | {"by": "profile", "us": by_profile})
            return
    times = []
    for kept in range(len(names)):
        name = f"{label}, {kept} of {len(names)} kernels"
        one = clock.start(name, measured, program, watch.keep(kept))
        if one is not None:
            times.append(min(clock.time(name, one, 2 if small else 5)))
    if whole is not None:
        times.append(min(clock.time(f"{label}, whole", whole, 2 if small else 5)))
        put(row | {"by": "programs with one kernel more each", "us": differences(names, times)})


def measure_kernels(small: bool, put: Callable[[dict], None]) -> Clock:
    """Each kernel of a dispatch and a combine."""
    from xen_moe_jax.tuning import programs

    clock = Clock(small)
    for case in cases(small)[:1] if small else cases(small):
        measured = prepared(case, sizes(small))
        work, caps = measured.problem.work, measured.problem.caps
        for program in programs.own_programs(work, caps, measured.config, OPERATIONS):
            time_kernels(clock, measured, program, program.operation, put)
    return clock


def measure_further(small: bool, put: Callable[[dict], None]) -> Clock:
    """Each kernel of the programs of `benchmarks.tpu.further`."""
    clock = Clock(small)
    for one, given in further_programs(small):
        case = dataclasses.replace(one.case(given.work.ranks), tokens=given.work.tokens)
        time_kernels(clock, Measured(case, given.problem, given.config), one.make(given), one.operation, put)
    return clock


# -- a layer ----------------------------------------------------------------------------------------------------------


def layer_programs(small: bool) -> Iterator[tuple[str, str, Any, Any, Callable[[], Any]]]:
    """(program, operation, mesh, jitted, operands), ours and the peer's, forward and with gradients. Our layer chooses
    its grouped matmul itself; the peer's is `jax.lax.ragged_dot`."""
    import jax
    import jax.numpy as jnp

    from benchmarks.layers import layer_programs as layers
    from benchmarks.tpu import here as places
    from benchmarks.tpu import layer_programs as peers

    case = next(case for case in cases(small) if case.name == "throughput-bf16")
    measured = prepared(case, sizes(small))
    width = 64 if small else WIDTH
    config = dataclasses.replace(peers.config_of(measured.problem.work, width, "auto"), kernel=measured.config)
    given = layers.LayerProblem(measured.problem, config, 1)
    mesh = measured.problem.mesh

    def shapes() -> Any:
        x, idx = measured.problem.inputs.x, measured.problem.inputs.topk_idx
        first = jax.ShapeDtypeStruct(
            idx.shape[1:], idx.dtype, sharding=jax.NamedSharding(mesh, layers.operand_specs(given)[2])
        )
        work = given.work
        experts, hidden = work.local_experts * work.ranks, work.hidden
        all_shapes: dict[str, tuple[int, ...]] = {
            "gate": (experts, hidden, width),
            "up": (experts, hidden, width),
            "down": (experts, width, hidden),
        }
        all_shapes["router"] = (hidden, experts)
        weights = {
            name: jax.ShapeDtypeStruct(
                (1, *shape), jnp.float32 if name == "router" else work.compute_dtype,
                sharding=jax.NamedSharding(mesh, layers.weight_specs()[name]),
            )
            for name, shape in all_shapes.items()
        }  # fmt: skip
        return weights, x, first

    if places.here().kind == "topology":
        operands = shapes
    else:
        operands = functools.cache(lambda: tuple(layers.draw_operands(given)))
    for program in (peers.OWN, peers.PEER):
        if program == peers.PEER and mesh.devices.flat[0].platform == "cpu":
            continue  # XLA has no ragged all-to-all for CPUs
        chosen = config if program == peers.OWN else dataclasses.replace(config, grouped_matmul="ragged_dot")
        layer = peers.layer_of(program, chosen, given.work)
        for operation, wrap in layers.OPERATIONS.items():
            if program == peers.PEER and operation == "forward":
                continue  # XLA compiles the peer's sorts for minutes
            mapped = jax.shard_map(
                wrap(layers.stacked(layer, 1)),
                mesh=mesh,
                in_specs=layers.operand_specs(given),
                out_specs=layers.result_specs(given, operation),
                check_vma=False,
            )
            yield program, operation, mesh, jax.jit(mapped), operands


def measure_layer(small: bool, put: Callable[[dict], None]) -> Clock:
    """A layer of 4096 tokens, ours and the peer's."""
    import jax

    from benchmarks.tpu import here as places
    from benchmarks.tpu import layer_programs as peers
    from benchmarks.tpu import watch
    from xen_moe_jax.tuning import timing

    clock, calls = Clock(small), 1 if small else 10
    for program, operation, mesh, jitted, operands in layer_programs(small):
        name = f"layer, {operation}, {program}"
        watch.compiling(name)
        given = operands()
        with peers.for_other_devices("auto") if clock.only_compiles else contextlib.nullcontext():
            compiled = places.compiled(jitted, mesh, given)
        kernels = list(watch.traced)
        clock.compiled.append({"program": name, "kernels": [kernel for kernel, _ in kernels]})
        if clock.only_compiles:
            continue
        watch.running(name, kernels)
        jax.block_until_ready(compiled(*given))
        us = []
        for _ in range(1 if small else 5):
            began = time.perf_counter()
            for _ in range(calls):
                result = compiled(*given)
            jax.block_until_ready(result)
            us.append(timing.slowest_process((time.perf_counter() - began) / calls * 1e6))
            del result
        watch.finished()
        put({"case": "layer", "operation": operation, "program": program, "us": statistics.median(us),
             "least_us": min(us), "most_us": max(us)})  # fmt: skip
    return clock


# -- together ---------------------------------------------------------------------------------------------------------


def compared(
    estimates: list[dict[str, Any]], kernels: list[dict[str, Any]], operations: list[dict[str, Any]]
) -> dict[str, Any]:
    """Measured over counted: for every kernel of every case and operation, and for the operations; the kernels that are
    slow (`SLOW`). A kernel counts as its bundles, or as the bytes that it moves where those take longer.
    """
    rows = {(row["case"], row["operation"]): row for row in estimates}
    found = []
    for row in kernels:
        known = rows.get((row["case"], row["operation"]), {"kernels": {}})
        whole = sum(row["us"].values())
        for kernel, us in row["us"].items():
            bundles, moving = known["kernels"].get(kernel), known.get("bytes_us", {}).get(kernel, 0.0)
            count = None if bundles is None else max(bundles, moving)
            entry = {"case": row["case"], "operation": row["operation"], "kernel": kernel, "by": row["by"]}
            entry |= {"measured_us": us, "counted_us": count, "bundles_us": bundles, "bytes_us": moving}
            entry |= {"share": us / whole if whole else 0.0}
            found.append(entry | {"ratio": us / count if count else None})
    ratios = [entry["ratio"] for entry in found if entry["ratio"] is not None]
    median = statistics.median(ratios) if ratios else None
    for entry in found:
        ratio = entry["ratio"]
        entry["slow"] = bool(ratio and median and ratio >= SLOW * median and entry["share"] >= SMALLEST_SHARE)
    whole = []
    for row in operations:
        count = rows.get((row["case"], row["operation"]))
        if count and row["program"] == OURS:
            whole.append(row | {"floor_us": count["floor_us"], "ratio": row["us"] / count["floor_us"]})
    return {"kernels": found, "operations": whole, "median_ratio": median}


def table(comparison: dict[str, Any], operations: list[dict[str, Any]]) -> str:
    """For people: kernels with their ratios, then operations with the peers."""
    lines = [f"{'case':<22}{'operation':<24}{'kernel':<30}{'measured us':>12}{'counted us':>12}{'ratio':>12}"]
    for entry in comparison["kernels"]:
        count, ratio = entry["counted_us"], entry["ratio"]
        lines.append(
            f"{entry['case']:<22}{entry['operation']:<24}{entry['kernel']:<30}{entry['measured_us']:>12.1f}"
            f"{'-' if count is None else f'{count:.1f}':>12}{'-' if ratio is None else f'{ratio:.2f}':>12}"
            f"{'  SLOW' if entry['slow'] else ''}"
        )
    lines.append(f"{'case':<18}{'operation':<18}{'program':<38}{'us':>12}{'estimate us':>13}{'ratio':>12}")
    known = {(row["case"], row["operation"]): row for row in comparison["operations"]}
    for row in operations:
        own = known.get((row["case"], row["operation"])) if row["program"] == OURS else None
        lines.append(
            f"{row['case']:<18}{row['operation']:<18}{row['program']:<38}{row['us']:>12.1f}"
            f"{f'{own["floor_us"]:.1f}' if own else '-':>13}{f'{own["ratio"]:.2f}' if own else '-':>12}"
        )
    return "\n".join(lines)


PARTS = {
    "operations": measure_operations,
    "kernels": measure_kernels,
    "further": measure_further,
    "layer": measure_layer,
}
COUNTED = {"counted": counted, "counted-further": counted_further}


def main(arguments: list[str] | None = None) -> int:
    """Runs one part; writes what it has after every row."""
    from benchmarks.tpu import here as places
    from benchmarks.tpu import watch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=(*COUNTED, *PARTS))
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--small", action="store_true", help="sizes that the interpreter can run")
    parser.add_argument(
        "--generation", choices=TPU_GENERATIONS, help="of counted and counted-further; default: every host"
    )
    parser.add_argument("--cases", nargs="+", choices=TPU_CASES, default=[], help="default: all")
    parser.add_argument("--devices", type=int, default=8, help="of that chip")
    options = parser.parse_args(arguments)
    only[:] = options.cases
    if options.part in COUNTED:
        from benchmarks.tpu import dump, topologies

        folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
        topologies.prepare_environment()
        dump.request_dump(folder)
        import jax

        jax.config.update("jax_platforms", "cpu")
        if options.generation:
            keep = functools.partial(write, options.json)
            keep(COUNTED[options.part](options.generation, options.devices, options.small, folder, keep))
            return 0
        if options.part != "counted":
            parser.error(f"{options.part}: name a --generation; a process has the chips of one host")
        from benchmarks.lib import report

        command = "python -m benchmarks tpu-chip counted --json FILE"
        hosts: dict[str, Any] = {}
        for host, chip in HOSTS.items():
            hosts[host] = counted(*chip, options.small, folder)
            write(options.json, {"command": command, "versions": report.versions(), "sizes": LARGE, "hosts": hosts})
        return 0
    places.join()
    watch.install()
    rows: list[dict[str, Any]] = []

    def put(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        write(options.json, {"rows": rows})

    quick = contextlib.nullcontext()
    if places.here().interpreted:
        quick = importlib.import_module("tests.support.interpreter").quick()
    with quick:
        clock = PARTS[options.part](options.small, put)
    write(options.json, {"rows": rows, "programs": clock.compiled})
    return 0


def write(path: pathlib.Path, document: dict[str, Any]) -> None:
    """In the first of several processes."""
    import jax

    if jax.process_index() == 0:
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
