"""`python -m benchmarks.tpu.decode`: a decode layer compiled for TPUs without one, beside the reading of its weights.

The layer is dispatch, experts and combine of the Flax layers with few tokens, on 8 devices, or on the 4 of a v5p-8. Its
floor is the time in which HBM gives the weights of the experts that have rows. `NOTICE` says what is counted; nothing
is measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import pathlib
import re
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.lib import report
from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu import decode_layer
from benchmarks.tpu import programs as tpu_programs
from benchmarks.tpu import topologies as tpu_topologies
from benchmarks.tpu.dump import Loop

NOTICE = """\
Estimates: no TPU ran this. Weights: bytes of the active experts of the busiest rank over the bandwidth of HBM. Routing
is uniform. A bundle takes a cycle, HBM and links have their public bandwidth, nothing has a latency.
Where a layer is one kernel: experts is the time at which the core has multiplied the last slab, layer the time at
which the last sum has been added up, of a simulated timeline (benchmarks/tpu/decode_layer.py), and XLA's own estimate
of its operations; core: all bundles of the kernel. Elsewhere: experts is the longer of the bytes and of the bundles
of the experts' kernel, with the last slab's product behind the last byte; moved: bundles of the kernels of dispatch
and combine and XLA's estimate; wire: the bytes that leave a device, records of everybody by an all-gather, partial
sums by an all-to-all. The layer is their sum: none is taken to overlap another."""
RANKS = 8


@dataclasses.dataclass(frozen=True)
class Model:
    """One layer's sizes; `activation` and `biased` as in `MoEConfig`."""

    hidden: int
    width: int
    experts: int
    top_k: int
    activation: str = "swiglu"
    biased: bool = False


MODELS = {
    "DeepSeek-V3": Model(7168, 2048, 256, 8),
    "Qwen3-30B-A3B": Model(2048, 768, 128, 8),
    "gpt-oss-120b": Model(2880, 2880, 128, 4, "clipped_swiglu", True),
}
ANCHOR = "sglang-jax-1387"
"""A layer that sglang-jax has measured: its pull request 1387 says 98 us on v7x, for a token on each of 8 ranks with 64
experts each. Hidden size and width are our assumption, which fits the bytes that the pull request names."""
MODELS[ANCHOR] = Model(4096, 1024, 512, 8)
SHOWN = tuple(name for name in MODELS if name != ANCHOR)
TOKENS = (8, 32, 128)
PARTS = (
    "",
    " --models DeepSeek-V3 --weights int8 float8_e4m3fn",
    f" --models {ANCHOR} --generations tpu7x --tokens 1 8",
    " --generations v5p --devices 4",
    " --models DeepSeek-V3 --weights int8 float8_e4m3fn --generations v5p --devices 4",
)
"""Options of the commands that together make all rows of a results file."""
IDENTITY = ("generation", "devices", "model", "tokens", "weights", "matmul")
"""Names of a row's values that identify its layer: no two rows of a file have the same values."""

WEIGHTS = {"bfloat16": None, "float8_e4m3fn": (128, 128), "int8": None}
"""Dtypes of weights, and the blocks that share a scale: DeepSeek-V3's in fp8, a column each in int8."""


def quantized(dtype: str, shape: tuple[int, ...], struct: Callable[..., Any]) -> Any:
    """Returns the shapes of a weight of one byte."""
    from xen_moe_jax import QuantizedWeight

    local, rows, columns = shape
    a, b = WEIGHTS[dtype] or (rows, 1)
    return QuantizedWeight(struct(dtype, *shape), struct("float32", local, -(-rows // a), -(-columns // b)), (a, b))


def config_of(model: Model, grouped_matmul: str, kernel: Any, wire: str | None = None) -> Any:
    """Returns the `MoEConfig` of a layer in bfloat16; "auto" takes the decode kernel."""
    import jax.numpy as jnp

    from xen_moe_jax.flax import MoEConfig

    return MoEConfig(
        hidden_size=model.hidden,
        intermediate_size=model.width,
        num_experts=model.experts,
        top_k=model.top_k,
        activation=model.activation,
        expert_bias=model.biased,
        grouped_matmul=grouped_matmul,
        kernel=kernel,
        wire=wire,
        param_dtype=jnp.bfloat16,
    )


def layer(config: Any, weights: Any, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
    """Dispatch, experts and combine of the Flax layers: `[T, H]` of a rank."""
    from xen_moe_jax.experts import tpu_decode
    from xen_moe_jax.flax._chunks import Chunk, through_experts

    chosen = tpu_decode.adapted(config, x.shape[0])
    return through_experts(chosen, weights, Chunk(x, topk_idx, topk_weights))[0]


def compile_layer(
    generation: str, model: Model, tokens: int, grouped_matmul: str, weights_dtype: str, ranks: int = RANKS
) -> Any:
    """Compiles a layer on `ranks` devices of a chip's `generation`, with `tokens` of each device. Weights are operands.

    Raises:
      ValueError: no topology of so many devices is known for the generation.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import xen_moe_jax as xm

    mesh = tpu_topologies.mesh(generation, topology=tpu_topologies.TOPOLOGIES[generation].topology_of(ranks))
    config = config_of(model, grouped_matmul, xm.KernelConfig(backend="pallas"))

    def transposed(weights: Any, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        return layer(config, weights, x, topk_idx.T, topk_weights.T)

    split, of_slots = PartitionSpec("ep"), PartitionSpec(None, "ep")
    specs = (split, split, of_slots, of_slots)
    mapped = jax.shard_map(transposed, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)

    def struct(dtype: Any, *shape: int, spec: Any = split) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    wide, narrow = (model.experts, model.hidden), (model.experts, model.width)
    shapes = {"gate": (*wide, model.width), "up": (*wide, model.width), "down": (*narrow, model.hidden)}
    if weights_dtype == "bfloat16":
        weights = {name: struct(weights_dtype, *shape) for name, shape in shapes.items()}
    else:
        weights = {name: quantized(weights_dtype, shape, struct) for name, shape in shapes.items()}
    if model.biased:
        weights |= {f"{name}_bias": struct(jnp.bfloat16, *narrow) for name in ("gate", "up")}
        weights["down_bias"] = struct(jnp.bfloat16, *wide)
    slots = (model.top_k, ranks * tokens)  # slots by tokens, as XLA keeps what a router has made
    routing = struct(jnp.int32, *slots, spec=of_slots), struct(jnp.float32, *slots, spec=of_slots)
    operands = struct(jnp.bfloat16, slots[1], model.hidden), *routing
    return jax.jit(mapped).trace(weights, *operands).lower(lowering_platforms=("tpu",)).compile()


def expert_cycles(kernel: Loop, visits: int, rows: int, model: Model, pieces: Any) -> tuple[float, float]:
    """Bundles of the experts' kernel on one of the cores that share it: of all visits, and of one slab of down.

    Loops stand in the order of the program: rows come, sums become zero, slabs of gate and up turn, then the
    activation, slabs of down, and rows leave. Both branches of a condition are counted.

    Args:
      visits: of all cores together. rows: of one visit, at most `pieces.rows`.

    Raises:
      ValueError: the kernel has other loops than it was written with.
    """
    from xen_moe_jax.pallas_kernels.decode_experts import GROUP, PRODUCTS, columns_at_once

    if rows > pieces.rows:
        raise ValueError(f"{rows} rows of a visit: the loop over pieces of {pieces.rows} rows is counted as one turn")
    visit = max(kernel.inner, key=lambda loop: sum(inner.bundles for inner in loop.all_inner()))
    turns = {False: model.hidden // pieces.depth, True: model.width // pieces.width}
    wide = {False: model.width, True: model.hidden}
    products = {False: PRODUCTS // 2, True: PRODUCTS}
    down, slab, total = False, 0.0, float(visit.bundles)

    def is_slabs(loop: Loop) -> bool:
        return bool(loop.operations[tpu_bundles.WAIT]) and any(loop.operations[name] for name in decode_layer.STARTS)

    slab_loops = [loop for loop in visit.inner if is_slabs(loop)]
    if len(slab_loops) != 2:
        raise ValueError(f"{len(slab_loops)} loops over slabs, not 2: the counts are of another kernel")

    def of(loop: Loop, together: int) -> float:
        """One turn: loops inside are over pieces of rows, which turn once, and over columns, which are innermost."""
        times = columns_at_once(wide[down], together)[1]
        return loop.bundles + sum(of(inner, together) if inner.inner else times * inner.bundles for inner in loop.inner)

    for loop in visit.inner:
        if loop in slab_loops:
            down = loop is slab_loops[1]
            slab = of(loop, products[down])
            total += turns[down] * slab
        elif any(name.startswith("dma") for name in loop.operations):
            total += -(-rows // GROUP) * loop.bundles
        else:
            total += of(loop, 1)
    return -(-visits // kernel.cores) * total, slab


def moving_cycles(kernel: Loop, work: tpu_bundles.Work, rows: int) -> float:
    """Bundles of a kernel of dispatch or combine. For few tokens it may have fewer loops than `work` says: then at most
    as many bundles as if each loop inside its grid turned once for each of the `rows` that the rank receives."""
    depths = {loop.depth for loop in kernel.all_inner()}
    if len(depths) < 2:
        return tpu_bundles.count(kernel, tpu_bundles.Work(work.steps)).total
    try:
        return tpu_bundles.count(kernel, work).total
    except ValueError:
        inner = sum(loop.bundles for loop in kernel.all_inner() if loop.depth > min(depths))
        return tpu_bundles.count(kernel, tpu_bundles.Work(work.steps)).total + rows * inner / kernel.cores


def own_operations(text: str) -> str:
    """A program's text without a copy of the result to where the program returns it: a model that goes on with the
    result has none."""
    return re.sub(r"\n *ROOT [^\n]* copy\([^\n]*", "", text)


def largest_copy(text: str) -> int:
    """Bytes of the largest array that XLA copies, pads or converts: rows and weights should not be among them."""
    found = [0]
    for dtype, dims in re.findall(r"= (\w+)\[([\d,]+)\]\S* (?:copy|pad|convert|transpose)\(", text):
        bits = tpu_programs.BITS.get(dtype, 32)
        found.append(math.prod(int(size) for size in dims.split(",")) * bits // 8)
    return max(found)


def one_row(
    generation: str,
    name: str,
    tokens: int,
    grouped_matmul: str,
    weights_dtype: str,
    ranks: int,
    folder: str,
    seed: int,
) -> dict[str, Any]:
    """Compiles a layer on `ranks` devices, with `tokens` of each, and returns its row of the results: its identity
    (`key`) and what `counted` returns."""
    model = MODELS[name]
    program = tpu_bundles.compile_counted(
        functools.partial(compile_layer, generation, model, tokens, grouped_matmul, weights_dtype, ranks), folder
    )
    row = {"generation": generation, "devices": ranks, "model": name, "tokens": tokens, "matmul": grouped_matmul}
    return row | counted(program, generation, model, tokens, ranks, weights_dtype=weights_dtype, seed=seed)


def counted(
    program: tpu_bundles.Program,
    generation: str,
    model: Model,
    tokens: int,
    ranks: int = RANKS,
    *,
    weights_dtype: str = "bfloat16",
    wire: str | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """The times of a compiled layer, in microseconds.

    Args:
      tokens: of each of `ranks` devices. wire: of the dispatch.

    Raises:
      ValueError: a kernel has other loops than the counts were written for.
    """
    from xen_moe_jax.experts import tpu_decode
    from xen_moe_jax.pallas_kernels.decode_experts import GROUP
    from xen_moe_jax.tuning.workload import round_up

    chip = tpu_topologies.TOPOLOGIES[generation]
    us = 1e6 / chip.clock_hz
    group = tpu_bundles.grouping(program)
    routing = tpu_bundles.random_routing(tokens, ranks, model.experts, model.top_k, group, seed)
    active = len(routing.experts)
    of_expert = 3 * model.hidden * model.width * (2 if weights_dtype == "bfloat16" else 1)
    weights_us = active * of_expert / chip.hbm_bytes_per_s * 1e6
    of_experts = [round_up(n, GROUP) for n in routing.experts]
    works = tpu_bundles.works(program, routing, False)
    kernels = {
        kernel: round(moving_cycles(loop, works[kernel], routing.placed) * us, 2)
        for kernel, loop in program.kernels.items()
        if kernel in works
    }
    case = tpu_programs.Case("decode", tokens, "grouped", wire, None)
    bytes_of = {
        operation: tpu_programs.traffic(
            case, operation, tpu_bundles.moves(routing), model.hidden, model.top_k, ranks
        )["ici_bytes"]
        for operation in ("dispatch", "combine")
    }  # fmt: skip
    by_all_gather = tpu_programs.gathered(case, "dispatch", ranks, model.top_k, model.hidden)
    wire_us = (chip.all_gather_us if by_all_gather else chip.all_to_all_us)(bytes_of["dispatch"], ranks)
    wire_us += chip.all_to_all_us(bytes_of["combine"], ranks)
    row: dict[str, Any] = {
        "weights": weights_dtype,
        "active_experts": active,
        "weights_us": round(weights_us, 1),
        "wire_us": round(wire_us, 1),
        "kernels_us": round(sum(kernels.values()), 1),
        "by_kernel_us": kernels,
        "xla_us": round(tpu_bundles.xla_cycles(own_operations(program.text)) * us, 1),
        "experts_us": None,
        "largest_copy": largest_copy(program.text),
    }
    if "xen_moe_decode_layer" in program.kernels:
        return row | one_call(program, generation, model, tokens, ranks, weights_dtype, seed, weights_us)
    if "xen_moe_decode_experts" in program.kernels:
        kernel = program.kernels["xen_moe_decode_experts"]
        from xen_moe_jax.backends.pallas import hardware

        limits = {found.name: found.vmem_bytes for found in hardware.GENERATIONS.values()}
        matrices = matrices_of(model, ranks, scaled_of(model, ranks * tokens, weights_dtype))
        pieces = tpu_decode.pieces_for(limits[generation], model.hidden, matrices)
        most = max(of_experts)
        cycles, last = expert_cycles(kernel, active, min(most, pieces.rows), model, pieces)
        bytes_us = weights_us + 2 * sum(of_experts) * model.hidden * 2 / chip.hbm_bytes_per_s * 1e6
        row["core_us"] = round(cycles * us, 1)
        row["experts_us"] = round(max(bytes_us, cycles * us) + last * us, 1)
        row["most_rows"] = most
        total = row["experts_us"] + row["wire_us"] + row["kernels_us"] + row["xla_us"]
        row["layer_us"] = round(total, 1)
        row["ratio"] = round(total / weights_us, 3)
    return row


def matrices_of(model: Model, ranks: int, scaled: Any) -> Any:
    """Returns what policies are told of the experts' weights."""
    from xen_moe_jax.experts import tpu_decode

    shape = model.experts // ranks, model.hidden, model.width
    return tpu_decode.Matrices(shape, "bfloat16", True, model.biased, scaled)


def scaled_of(model: Model, tokens: int, weights_dtype: str) -> Any:
    """Returns what the policy of the experts' kernel is told of weights of one byte. `tokens`: of all ranks."""
    from xen_moe_jax.experts import tpu_decode

    if weights_dtype == "bfloat16":
        return None
    rows = tpu_decode.rows_of_product(tokens * model.top_k / model.experts)
    return tpu_decode.Scaled(rows, WEIGHTS[weights_dtype] is None)


def one_call(
    program: tpu_bundles.Program,
    generation: str,
    model: Model,
    tokens: int,
    ranks: int,
    weights_dtype: str,
    seed: int,
    weights_us: float,
) -> dict[str, Any]:
    """The part of a row that is another one where the layer is one kernel."""
    from xen_moe_jax.backends.pallas import hardware
    from xen_moe_jax.experts import tpu_decode_layer

    chip = tpu_topologies.TOPOLOGIES[generation]
    known = next(found for found in hardware.GENERATIONS.values() if found.name == generation)
    scaled = scaled_of(model, ranks * tokens, weights_dtype)
    chosen = tpu_decode_layer.layer_pieces(
        known.vmem_bytes, known.cores, ranks, (tokens, model.top_k), matrices_of(model, ranks, scaled)
    )
    if chosen is None:
        raise ValueError(
            f"{generation}: the program has one kernel for a layer of which the policy says that it does not fit"
        )
    layer = decode_layer.Layer(
        ranks, tokens, model.top_k, model.experts, model.hidden, model.width, chosen.pieces, chosen.kept,
        chosen.certain, chosen.in_hbm, 2 if scaled is None else 1, chosen.cores,
    )  # fmt: skip
    times, most = [], 0
    for core in range(chosen.cores):
        visits, records = decode_layer.visits(layer, seed, core)
        counted = decode_layer.cycles(program.kernels["xen_moe_decode_layer"], layer, visits, records)
        times.append(decode_layer.simulated(layer, chip, known.cores, counted, visits, records))
        most = max(most, *(visit.rows for visit in visits))
    time = max(times, key=lambda time: time.end)
    sums = 0.0
    if chosen.in_hbm:
        sums = decode_layer.sums_us(program.kernels["xen_moe_decode_sums"], layer, chip)
    total = time.end + sums + tpu_bundles.xla_cycles(own_operations(program.text)) * 1e6 / chip.clock_hz
    return {
        "one_call": True,
        "wire_us": round(time.wire, 1),
        "first_us": round(time.first, 1),
        "rows_us": round(time.rows, 1),
        "experts_us": round(time.core, 1),
        "back_us": round(time.back, 1),
        "core_us": round(time.busy, 1),
        **({"sums_us": round(sums, 1)} if chosen.in_hbm else {}),
        "most_rows": most,
        "slabs_ahead": chosen.pieces.ahead,
        "layer_us": round(total, 1),
        "ratio": round(total / weights_us, 3),
    }


def kernel_times(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of each kernel of a layer: of a counted row."""
    if not row.get("one_call"):
        return row["by_kernel_us"] | {"xen_moe_decode_experts": row["experts_us"]}
    sums = {"xen_moe_decode_sums": row["sums_us"]} if "sums_us" in row else {}
    return sums | {"xen_moe_decode_layer": round(row["layer_us"] - row["xla_us"] - sum(sums.values()), 1)}


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Returns the lines of a Markdown table, one layer a line."""
    columns = [
        "chip",
        "devices",
        "layer",
        "weights",
        "tokens",
        "active",
        "weights us",
        "experts us",
        "of it core us",
        "moved us",
        "XLA us",
    ]
    columns += ["wire us", "layer us", "ratio"]
    lines = ["| " + " | ".join(columns) + " |", "|---|---:|---|" + "---:|" * (len(columns) - 3)]
    for row in rows:
        cells = [
            row["generation"],
            row["devices"],
            row["model"],
            row["weights"],
            row["tokens"],
            row["active_experts"],
            row["weights_us"],
        ]
        cells += [row["experts_us"], row.get("core_us"), row["kernels_us"], row["xla_us"], row["wire_us"]]
        cells += [row.get("layer_us"), row.get("ratio")]
        lines.append("| " + " | ".join("-" if cell is None else str(cell) for cell in cells) + " |")
    return lines


def command(seed: int) -> str:
    """Returns the commands that make all rows of a results file. A run stores them in place of its own command line,
    because it may add rows to a file or replace some."""
    drawn = f" --seed={seed}" if seed else ""
    return "; ".join(f"python -m benchmarks.tpu.decode --json FILE{rows}{drawn}" for rows in PARTS)


def main(arguments: list[str] | None = None) -> int:
    """Compiles each layer, prints the table, writes JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    chips = ("v5e", "v5p", "v6e", "tpu7x")
    parser.add_argument("--generations", nargs="+", choices=list(tpu_topologies.TOPOLOGIES), default=list(chips))
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(SHOWN))
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS), help="of a device")
    parser.add_argument("--grouped-matmul", default="auto", help="auto takes the decode kernel")
    parser.add_argument("--weights", nargs="+", choices=list(WEIGHTS), default=["bfloat16"], help="as they are in HBM")
    parser.add_argument("--devices", type=int, default=RANKS, help="ranks of the layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="write the figures here, and keep those of other layers that are there")
    parser.add_argument(
        "--check", metavar="FILE", help="compare the figures with this file's, and fail where they moved"
    )
    options = parser.parse_args(arguments)
    tpu_topologies.prepare_environment()  # before the versions: it finds the libtpu beside the packages
    document: dict[str, Any] = {
        "command": command(options.seed),
        "notice": NOTICE,
        "versions": report.versions(),
        "seed": options.seed,
        "results": [],
    }
    # a file that cannot be used is an error before the layers compile
    if options.json:
        merged(options.json, document)
    if options.check:
        moved(options.check, document)

    folder = tempfile.mkdtemp(prefix="xen_moe_bundles_")
    tpu_bundles.request_dump(folder)
    import jax

    jax.config.update("jax_platforms", "cpu")
    rows = []
    for generation in options.generations:
        for name in options.models:
            for dtype, tokens in itertools.product(options.weights, options.tokens):
                report.progress(f"{generation} {name} {dtype} {tokens}")
                layer_of = generation, name, tokens, options.grouped_matmul, dtype, options.devices
                rows.append(one_row(*layer_of, folder, options.seed))
    document["results"] = rows
    print("\n".join([*table(rows), "", NOTICE]))
    if options.json:
        report.write_json(options.json, document | {"results": merged(options.json, document)})
    if options.check:
        lines = moved(options.check, document)
        print("\n".join(lines) or f"{options.check}: every figure is as the kernels are")
        return int(bool(lines))
    return 0


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the values of a row that identify its layer."""
    return tuple(row[name] for name in IDENTITY)


def rows_of(path: str, known: dict[str, Any]) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Returns the rows of the file's document by their keys.

    Raises:
      ValueError: the document lacks the seed, or a row a value of its key.
    """
    parts: dict[str, tuple[dict[str, Any], Sequence[str]]] = {"the file": (known, ["seed"])}
    parts |= {f"row {number}": (row, IDENTITY) for number, row in enumerate(known["results"])}
    for part, (found, names) in parts.items():
        if lacks := [name for name in names if name not in found]:
            raise ValueError(
                f"{path}: {part} lacks {', '.join(lacks)}: an older version of this benchmark wrote it; delete the "
                f"file, and make it with {command(known.get('seed', 0))}"
            )
    return {key(row): row for row in known["results"]}


def merged(path: str, document: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the rows of a document, and those of other layers that the file has if it was counted with the same
    versions and seed, in the order of the report.

    Raises:
      ValueError: the file, of these versions, lacks the seed, or a row of it a value of its key.
    """
    rows = {key(row): row for row in document["results"]}
    if pathlib.Path(path).exists():
        known = json.loads(pathlib.Path(path).read_text())
        earlier = rows_of(path, known) if known["versions"] == document["versions"] else {}
        if earlier and known["seed"] == document["seed"]:
            rows = earlier | rows
    chips, models, weights = (list(names) for names in (tpu_topologies.TOPOLOGIES, MODELS, WEIGHTS))

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        numbers = chips.index(row["generation"]), models.index(row["model"]), weights.index(row["weights"])
        return row["matmul"] != "auto", row["devices"] != RANKS, *numbers, row["tokens"]

    return sorted(rows.values(), key=place)


def moved(path: str, again: dict[str, Any]) -> list[str]:
    """Returns a line for each figure of `again` that is another one in the file.

    Raises:
      ValueError: the file was counted with other versions or another seed, or lacks a row, its
        seed, or a value of a row's key.
    """
    known = json.loads(pathlib.Path(path).read_text())
    for name in ("jax", "libtpu"):
        if known["versions"][name] != again["versions"][name]:
            raise ValueError(
                f"--check: the file was counted with {name} {known['versions'][name]}, not {again['versions'][name]}"
            )
    rows, lines = rows_of(path, known), []
    if known["seed"] != again["seed"]:
        raise ValueError(f"--check: the file was counted with --seed={known['seed']}, not {again['seed']}")
    for row in again["results"]:
        if key(row) not in rows:
            raise ValueError(f"--check: the file has no row {key(row)}; make it with --json")
        old = rows[key(row)]
        changed = [name for name in {**old, **row} if old.get(name) != row.get(name)]
        lines += [f"{key(row)}: {name}: {row.get(name)}, the file has {old.get(name)}" for name in changed]
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
