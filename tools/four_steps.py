"""The steps that four GPUs of one host run for `gpu_check.py --steps four`, most important first within a part.

All chosen checks run side by side. Timings compile beside them and measure one after the other when no check runs: both
lock the file `context.lock`, which checks share and a timing holds alone (benchmarks/lib/turns.py). On four H200 with
64 cores the checks of the first part take 270 s, the timings of the next two more than 200 s, and `nodes-nccl` more
than 220 s, so that everything needs at least two calls of ten minutes. With --small every step runs briefly, also on a
machine with one GPU: this rehearses the commands, and its figures have no meaning.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

from tools.steps import PYTEST, Step

ROOT = pathlib.Path(__file__).parents[1]
Commands = list[list[str]]


def tests(path: str, *chosen: str, small: str = "") -> Any:
    """Returns a function that makes the commands of a step: one run of the file for each of `chosen`.

    Args:
      path: a file in tests/gpu.
      *chosen: expressions for pytest's -k; "" runs every test of the file.
      small: the expression for a rehearsal; with "" a rehearsal only collects the tests.
    """

    def commands(context: Any) -> Commands:
        if context.small and not small:
            return [[*PYTEST, "--collect-only", "-q", f"tests/gpu/{path}"]]
        wanted = (small,) if context.small else chosen
        command = [*PYTEST, "-o", "faulthandler_timeout=200", f"tests/gpu/{path}"]  # the log gets the stack of a hang
        return [[*command, *(["-k", words] if words else [])] for words in wanted]

    return commands


def python(*words: str) -> list[str]:
    return [sys.executable, "-m", *words]


TARGET = "-gencode=arch=compute_90a,code=sm_90a"
NATIVE = {
    "kernel_times": "benchmarks/ops/kernel_times.cu",
    "native_paced": "tests/native/nodes/paced.cu tests/native/world.cu",
}
"""Native programs and their sources; all are linked with the kernels."""


def compiled(context: Any, name: str, sources: str, objects: str = "") -> str:
    """Returns the shell command by which nvcc makes the program `name` in the scratch folder of the run."""
    return f"nvcc -std=c++17 -O3 {TARGET} -I. {sources} {objects} -o '{context.scratch / name}'"


def link(context: Any) -> Commands:
    build = compiled(context, "link_ceiling", "benchmarks/ops/link_ceiling.cu")
    return [["bash", "-ec", f"cd '{ROOT}'; {build}; '{context.scratch / 'link_ceiling'}' '{context.link_json}'"]]


def native_programs(context: Any) -> Commands:
    """Compiles the kernels for Hopper GPUs, and then the programs of `NATIVE` side by side."""
    kernels = context.scratch / "kernels"
    lines = [f"cd '{ROOT}'; JOBS=32 nice tools/build_kernels.sh '{kernels}' {TARGET}"]  # beside tests with limits
    objects = f"'{kernels}'/*.o"
    lines += [f"{compiled(context, name, sources, objects)} & made+=($!)" for name, sources in NATIVE.items()]
    return [["bash", "-ec", "\n".join([*lines, 'for one in "${made[@]}"; do wait "$one"; done'])]]


def native(context: Any, name: str, *arguments: str) -> list[str]:
    return [str(context.scratch / name), *arguments]


def kernels_alone(context: Any) -> Commands:
    """Returns the commands that time kernels without JAX, in CUDA graphs: small batches, then 4096 tokens."""
    return [native(context, "kernel_times", str(context.out / "kernels.json"))]


SMALL_SUITE = ("fp8 dispatch, bf16 combine", "decode 1")


def suite(context: Any) -> Commands:
    """The suite "gpu" without its last entry, "every peer": `jax_best` times these peers."""
    from benchmarks.suite import GPU

    command = python("benchmarks", "suite", "gpu", "--json", str(context.out / "ops.json"), "--lock", context.lock)
    only = SMALL_SUITE if context.small else list(GPU)[:-1]
    return [[*command, "--ranks", str(context.gpus), *context.link_option(), "--only", *only]]


JAX_SETTINGS = ("ours", "default", "one process per device", "user buffers")
"""The library, and each setting of XLA that makes JAX fastest in a row of the table for four GPUs
(docs/lab/benchmark_tables.md)."""


def jax_best(context: Any) -> Commands:
    if context.gpus < 2:  # nothing travels
        return [python("benchmarks", "jax-best", "--help")]
    command = python(
        "benchmarks", "jax-best", "--platform", "gpu", "--deepseek-v3", "--repeats", "3", "--seconds", "400"
    )
    settings = JAX_SETTINGS[:1] if context.small else JAX_SETTINGS
    return [[*command, "--lock", context.lock, "--settings", *settings, "--json", str(context.out / "jax_best.json")]]


SHAPES = (
    ("H 4096, I 1536, 64 experts", "Qwen3-30B-A3B"),
    ("gpt-oss, 64 experts a rank", "DeepSeek-V3, 16 experts a rank"),
)


def routed_mlp(context: Any, *options: str, name: str = "layers") -> Commands:
    """Two processes, each of which measures two shapes of `SHAPES`."""
    made = []
    for number, shapes in enumerate([SHAPES[0][1:]] if context.small else SHAPES):
        command = python("benchmarks.layers.routed_mlp", "--lock", context.lock, *options, "--only", *shapes)
        command += ["--tokens", "512"] if context.small else []
        made.append([*command, "--json", str(context.out / f"{name}_{number}.json")])
    return made


def in_float8(context: Any) -> Commands:
    return routed_mlp(context, "--float8", name="layers_float8")


LAYER = "--platform gpu --tokens 4096 --hidden 4096 --experts 64 --top-k 8 --width 1536 --capacity-factor 1.25".split()


OURS = ("xen_moe_jax", "experts alone", "xen_moe_jax, weights in front", "xen_moe_jax, no capacity")
WAYS = {
    "layer": (*OURS, "xen_moe_jax, 2 chunks", "xen_moe_jax, fp8 wire", "all_gather + psum_scatter"),
    "model": (*OURS, "all_gather + psum_scatter"),
}


def whole_layers(context: Any) -> Commands:
    """A Flax layer beside the fastest way by JAX's own collectives, then stacks of four layers."""
    made = []
    for mode, repeats in (("layer", "5"), ("model", "3")):
        out = str(context.out / f"{mode}.json")
        given = [*LAYER, "--ranks", str(context.gpus), "--inner", "20", "--repeats", repeats, "--lock", context.lock]
        made.append(python("benchmarks", mode, *given, "--ways", *WAYS[mode], "--json", out))
    return made[:1] if context.small else made


def decode_mlp(context: Any) -> Commands:
    command = python("benchmarks.layers.decode_mlp", "--lock", context.lock, "--json", str(context.out / "decode.json"))
    return [[*command, *(["--only", "Qwen3-30B-A3B", "--no-profile"] if context.small else [])]]


def train(context: Any) -> Commands:
    command = python("benchmarks", "train", "--lock", context.lock, "--json", str(context.out / "train.json"))
    steps = ["--steps", "2", "--warm-up", "1", "--layers", "2"] if context.small else ["--steps", "15", "--kernels"]
    return [[*command, *steps]]


def decode_step(context: Any) -> Commands:
    """Ten thousand replays of a decode step of each batch size, beside JAX's ways. The step has sixteen layers: with
    sixty, as a whole model has, it takes 19 ms, and the replays would take minutes."""
    command = python("benchmarks", "decode-step", "--platform", "gpu", "--hidden", "7168", "--experts", "128")
    command += ["--top-k", "8", "--lock", context.lock, "--json", str(context.out / "decode_step.json")]
    if context.small:
        return [[*command, "--layers", "2", "--batches", "1", "--replays", "200", "--peers", "none"]]
    peers = "padded all_to_all,all_gather + psum_scatter"
    replays = ["--batches", "32", "128", "--replays", "10000", "--peer-replays", "100", "--peers", peers]
    return [[*command, "--layers", "16", *replays]]


def processes(context: Any) -> Commands:
    some = "share_a_gpu and 2-low_latency"
    chosen = "four_processes_every_case", "four_processes and not every_case or late_process"
    return tests("test_processes.py", *chosen, small=some)(context)


MLP = "4 and not (fp8 or placement or exact)", "4 and fp8", "4 and placement", "4 and exact"

NODES = (
    "(TwoNodesOfTwo or every_subset) and not Few",
    "(FourNodesOfOne or data_parallel) and not Few",
    "TwoNodesOfTwoFew or FourNodesOfOneFew",
    "(2x2 or 4x1) and few_tokens",
    "(2x2 or 4x1) and test_large",
    "(2x2 or 4x1) and not (few_tokens or test_large)",
)


def node_processes(context: Any) -> Commands:
    """One process for each rank, with NCCL between virtual nodes, but for the tests of `killed_node_processes`."""
    if context.gpus < 4:
        return tests("test_node_processes.py", small="2x1 and start_and_done and throughput")(context)
    layouts, modes = ("2x2", "4x1"), ("throughput", "low_latency")
    chosen = [f"{x} and {mode} and every_case and {half}-" for x in layouts for mode in modes for half in (0, 1)]
    chosen += [f"{x} and {mode} and (start_and_done or every_subset)" for x in layouts for mode in modes]
    return tests("test_node_processes.py", *chosen, "(2x2 or 4x1) and bytes or found")(context)


def killed_node_processes(context: Any) -> Commands:
    """Processes of nodes that are stopped and killed. No other job runs beside them: beside a job that had killed a
    process, five jobs could not register a window of NCCL within 30 s."""
    return tests("test_node_processes.py", "server or (2x2 or 4x1) and stopped", small="2x1 and stopped")(context)


def slow_link(context: Any) -> Commands:
    """Operations between virtual nodes over a link of 50 GB/s, and puts alone over it. One GPU is shared by four
    ranks."""
    made = []
    for per_node in (2, 1):
        given = ["--gpus", str(context.gpus), "--ranks", "4", "--per-node", str(per_node), "--rate", "50"]
        given += ["--repeats", "5", "--blocks", "96" if context.gpus == 4 else "24"]
        given += ["--tokens", "256"] if context.small else []
        for mode in ("operations", "link-only"):
            file = context.out / f"slow_link_{4 // per_node}x{per_node}_{mode}.json"
            made.append(native(context, "native_paced", *given, "--mode", mode, "--json", str(file)))
    return made[:1] if context.small else made


def profile(context: Any) -> Commands:
    command = python(
        "xen_moe_jax", "autotune", "--deepseek-v3", "--output", str(context.out / "profile.json"), "--seconds", "70"
    )
    return [[*command, *(["--tokens", "128", "--dtypes", "bfloat16", "--repeats", "2"] if context.small else [])]]


def elastic(context: Any) -> Commands:
    ranks, kills = ("4", "22") if not context.small else ("3", "2")
    command = python("tests.elastic.serve_chaos", "--kernels", "--gpus", str(context.gpus), "--ranks", ranks)
    return [[*command, "--kills", kills, "--seed", "37"]]


LITTLE_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
UNTUNED = "--xla_gpu_autotune_level=0"
"""For checks with XLA's own matmuls: XLA would time candidates for each matmul, on GPUs that other checks use."""


def check(part: int, name: str, seconds: float, commands: Any, about: str, **changed: str) -> Step:
    """Returns a step of tests, which runs beside other checks; `changed` are further environment variables."""
    return Step(f"four{part}-{name}", seconds, commands, False, LITTLE_MEMORY | changed, about, together=True)


def timing(part: int, name: str, seconds: float, commands: Any, about: str, turn: str = "own") -> Step:
    """Returns a step that measures; its `turn` is that of `tools.steps.Step`."""
    return Step(
        f"four{part}-{name}",
        seconds,
        commands,
        False,
        LITTLE_MEMORY,
        about,
        together=turn in ("early", "own"),
        turn=turn,
    )


STEPS = (
    check(1, "conformance", 260,
          tests("test_conformance.py", "TestFourRanks and not Through", "TestFourRanksThrough or TestThreeRanks",
                small="TestOneRank and not Throughput and (grouped/uniform or gradients)"), "four ranks"),
    check(1, "mlp", 400, tests("test_moe_mlp.py", *MLP, small="1 and (swiglu or placement)"), "values and gradients",
          XLA_FLAGS=UNTUNED),
    check(1, "layers", 260, tests("test_layers.py", "4", small="1 and dense and swiglu"), "Flax layers",
          XLA_FLAGS=UNTUNED),
    check(1, "halves", 260, tests("test_async.py", "FourRanks or 4", small="1 and not OneRank and same_bits"),
          "start and done"),
    check(1, "failure", 260, tests("test_failure.py", ""), "failures of four ranks"),
    check(1, "processes", 260, processes, "a process a GPU"),
    check(1, "active", 260, tests("test_active.py", "", small="replicas"), "active="),
    check(1, "meshes", 260, tests("test_meshes.py", ""), "dp x ep, orders, shapes of DeepSeek"),
    check(1, "graphs", 260, tests("test_graphs.py", "replay", "not replay"), "CUDA graphs"),
    timing(2, "link", 40, link, "bare pushes over NVLink", "first"),
    check(2, "native", 300, native_programs, "native programs are built"),
    timing(2, "kernels", 60, kernels_alone, "kernels without JAX", "alone"),
    timing(2, "ops", 420, suite, "dispatch, combine, round trip", "early"),
    timing(2, "jax", 420, jax_best, "JAX at its best", "early"),
    timing(3, "layers", 400, routed_mlp, "moe_mlp over its experts"),
    timing(3, "float8", 400, in_float8, "the same with experts in fp8"),
    timing(3, "train", 400, train, "a training step of 1 B parameters"),
    timing(3, "decode", 400, decode_mlp, "moe_mlp of a decode step"),
    timing(3, "flax", 400, whole_layers, "Flax layers beside JAX's ways"),
    check(4, "nodes-nccl", 420, node_processes, "virtual nodes of processes over NCCL"),
    check(4, "nodes", 400, tests("test_nodes.py", *NODES), "virtual nodes"),
    timing(4, "nodes-killed", 200, killed_node_processes, "processes of nodes are stopped and killed", "alone"),
    timing(4, "slow-link", 120, slow_link, "a link of 50 GB/s", "alone"),
    timing(4, "profile", 120, profile, "the tuner's profile", "alone"),
    check(5, "elastic", 240, elastic, "a server of four processes", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1"),
    timing(3, "replays", 400, decode_step, "a decode step, 10,000 replays"),
)  # fmt: skip


NEEDED = {"four2-kernels": "four2-native", "four4-slow-link": "four2-native"}
"""Steps that run the program of another step."""


def chosen(words: str) -> list[Step]:
    """Returns the steps that `words` names, and the steps that these need, in the order of `STEPS`.

    Args:
      words: words between commas: "four" (all steps), "four1" to "four5" (a part), or the name of a step.

    Raises:
      SystemExit: a word is none of these.
    """
    found = []
    for word in words.split(","):
        steps = [step for step in STEPS if word in ("four", step.name, step.name.split("-")[0])]
        if not steps:
            raise SystemExit(f"--steps {word}: there are four, four1 to four5, and {[s.name for s in STEPS]}")
        found += steps
    names = {step.name for step in found}
    names |= {NEEDED[name] for name in names & NEEDED.keys()}
    return [step for step in STEPS if step.name in names]
