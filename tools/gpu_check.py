"""Builds, tests and times everything on a GPU machine, in one call that cannot hang.

    python tools/gpu_check.py OUTPUT_DIRECTORY [--steps build,conformance,bench] [--budget 540] [--wheels DIRECTORY]
                              [--memory nccl]
    python tools/gpu_check.py OUTPUT_DIRECTORY --steps four|four1,four2,...  (see tools/four_steps.py)
    python tools/gpu_check.py OUTPUT_DIRECTORY --nodes       (several nodes: see tools/node_check.py)

Every step is a process group with a time limit of its own, cut to the rest of the whole budget; at the limit the group
is killed and the step counts as failed, with the output that it had shown. Correctness comes first, then timing, then
stress. OUTPUT_DIRECTORY gets `STEP.json` and one `logs.txt`; a short table is printed last. The exit status is the
number of steps that failed or were left out.

Needs jax with CUDA, pytest, hypothesis and absl-py; the build needs nanobind, CMake and ninja, and is skipped when the
modules are there already. Without a network, put wheels of the missing packages in a directory and name it with
--wheels.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
from typing import TextIO

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.gpu import processes  # noqa: E402
from tools import four_steps, node_check  # noqa: E402
from tools.steps import PYTEST, Outcome, Step, choose, listing, run_step, side_by_side, table  # noqa: E402

GPU_ENVIRONMENT = {"JAX_PLATFORMS": "cuda", "PYTHONUNBUFFERED": "1"}


@dataclasses.dataclass(frozen=True)
class Context:
    """Holds all values that the commands of a step depend on.

    Attributes:
      out: the folder that gets figures and outcomes.
      gpus: number of GPUs.
      build: "auto", "always" or "never", as --build says.
      scratch: a folder that is removed when the run ends.
      small: True for a rehearsal of `four_steps`.
    """

    out: pathlib.Path
    gpus: int
    build: str
    scratch: pathlib.Path
    small: bool = False

    @property
    def lock(self) -> str:
        """The file by which checks and timings of `four_steps` take turns."""
        return str(self.scratch / "turns.lock")

    @property
    def link_json(self) -> pathlib.Path:
        return self.out / "link_ceiling.json"

    def link_option(self) -> list[str]:
        return ["--link-ceiling", str(self.link_json)] if self.link_json.exists() else []


def shell(line: str) -> list[str]:
    return ["bash", "-ec", line]


def gpu_tests(*arguments: str) -> list[str]:
    return [*PYTEST, *arguments]


def build_commands(context: Context) -> list[list[str]]:
    """CMake into the source tree; nothing where the modules exist, unless --build always."""
    if context.build == "never" or (context.build == "auto" and any(ROOT.glob("xen_moe_jax/_cuda*.so"))):
        return [[sys.executable, "-c", "import xen_moe_jax._cuda as m; print('prebuilt', m.__file__)"]]
    folder, jobs = context.scratch / "build", max(2, (os.cpu_count() or 2) - 2)
    return [
        shell(
            f"cmake -S '{ROOT}' -B '{folder}' -G Ninja -DPython_EXECUTABLE='{sys.executable}' -DXEN_MOE_CUDA=ON"
            f" && cmake --build '{folder}' -j {jobs} && cmake --install '{folder}' --prefix '{ROOT}'"
        )
    ]


def info_commands(context: Context) -> list[list[str]]:
    return [
        shell("nvidia-smi -L; nvidia-smi topo -m; nvcc --version | tail -2; uname -r; nproc"),
        [sys.executable, "-c", "import jax, jaxlib as l; print(jax.__version__, l.__version__, jax.devices())"],
        [sys.executable, "-m", "xen_moe_jax.doctor"],
    ]  # fmt: skip


def link_commands(context: Context) -> list[list[str]]:
    program = context.scratch / "link_ceiling"
    source = ROOT / "benchmarks" / "ops" / "link_ceiling.cu"
    return [shell(f"nvcc -O3 -std=c++17 -arch=native '{source}' -o '{program}' && '{program}' '{context.link_json}'")]


def conformance_class(context: Context) -> str:
    classes = {8: "TestEightRanks", 4: "TestFourRanks", 2: "TestTwoRanks", 1: "TestOneRank"}
    return next(name for gpus, name in classes.items() if context.gpus >= gpus)


def conformance_commands(context: Context) -> list[list[str]]:
    return [gpu_tests(f"tests/gpu/test_conformance.py::{conformance_class(context)}", "--maxfail=25")]


def process_commands(context: Context) -> list[list[str]]:
    wanted = SOME_PROCESSES if context.gpus > 1 else IN_TURNS
    return [gpu_tests("tests/gpu/test_processes.py", "-k", wanted)]


def sanitizer_commands(context: Context) -> list[list[str]]:
    """One GPU, one rank: bounds and races inside the kernels. XLA's own allocations are made one by one, so that
    bounds are exact.
    """
    program = [sys.executable, str(ROOT / "tests" / "gpu" / "sanitized_program.py")]
    checker = shutil.which("compute-sanitizer") or "compute-sanitizer"
    common = [checker, "--error-exitcode", "9", "--target-processes", "all"]
    return [[*common, "--tool", "memcheck", *program], [*common, "--tool", "racecheck", *program, "--short"]]


def suite_commands(context: Context, seconds: float, *only: str) -> list[list[str]]:
    script = [
        sys.executable,
        "-m",
        "benchmarks",
        "suite",
        "gpu",
        "--json",
        str(context.out / "bench-figures.json"),
    ]
    return [[*script, "--seconds", str(seconds), "--ranks", str(context.gpus), *context.link_option(), *only]]


def stress_commands(context: Context, calls: int, seconds: float) -> list[list[str]]:
    script = [
        sys.executable,
        str(ROOT / "tests" / "gpu" / "stress.py"),
        "--json",
        str(context.out / "stress-calls.json"),
    ]
    return [[*script, "--calls", str(calls), "--seconds", str(seconds), "--ranks", str(context.gpus), "--threads", "8"]]


def random_calls_commands(context: Context, calls: int, seconds: float) -> list[list[str]]:
    script = [sys.executable, str(ROOT / "tests" / "gpu" / "random_calls.py")]
    limits = ["--calls", str(calls), "--seconds", str(seconds), "--ranks", str(context.gpus)]
    return [[*script, *limits, "--json", str(context.out / "random-calls-figures.json")]]


def chaos_commands(context: Context, kills: int, stalls: int, seconds: float) -> list[list[str]]:
    ranks, gpus = max(4, context.gpus), min(8, context.gpus)  # fewer GPUs than ranks are shared, in turns
    script = [sys.executable, "-m", "tests.gpu.chaos", "--ranks", str(ranks), "--gpus", str(gpus)]
    limits = ["--kills", str(kills), "--stalls", str(stalls), "--seconds", str(seconds), "--together", "4"]
    return [[*script, *limits, "--json", str(context.out / "chaos-figures.json")]]


ONE_GPU = ("info", "build", "smoke", "conformance", "processes", "dead-process", "chaos", "sanitizer")
"""Steps that a machine with a single GPU can run."""
SMOKE = "test_dispatch_and_combine and (grouped/uniform or ranked/uniform or padded/uniform)"
SOME_PROCESSES = "two_processes or see_one or opposite or stress"
IN_TURNS = "share_a_gpu or sixteen"
DEATHS = ("tests/gpu/test_processes.py", "tests/gpu/test_active.py")

STEPS = (
    Step("info", 40, info_commands, about="GPUs, versions, doctor"),
    Step("build", 200, build_commands, about="CMake, unless the modules are there"),
    Step("smoke", 60, lambda c: [gpu_tests(f"tests/gpu/test_conformance.py::{conformance_class(c)}", "-k", SMOKE)],
         about="three cases"),
    Step("conformance", 90, conformance_commands, about="the conformance class, one process"),
    Step("meshes", 70, lambda c: [gpu_tests("tests/gpu/test_meshes.py", "-k", "not large")],
         about="dp x ep, permuted devices, numbers of thread blocks"),
    Step("processes", 160, process_commands, about="one process per GPU; with one GPU, processes that share it"),
    Step("failure", 200, lambda c: [gpu_tests("tests/gpu/test_failure.py")],
         about="absent ranks, mismatches, bad handles, memory"),
    Step("company", 300, lambda c: [gpu_tests("tests/gpu/test_company.py")], about="beside XLA's collectives"),
    Step("concurrency", 240, lambda c: [gpu_tests("tests/gpu/test_concurrency.py")],
         about="threads, meshes, graphs at once"),
    Step("dead-process", 120, lambda c: [gpu_tests(*DEATHS, "-k", "late or server")],
         about="a late and a killed process, a server that goes on"),
    Step("chaos", 300, lambda c: chaos_commands(c, 40, 200, 270), default=False, about="SIGKILL and SIGSTOP at random"),
    Step("random-calls", 300, lambda c: random_calls_commands(c, 1_000_000, 270), default=False,
         about="1,000,000 random operations in jitted loops"),
    Step("link", 40, link_commands, about="bare pushes over NVLink"),
    Step("bench", 170, lambda c: suite_commands(c, 140), about="figures, most important first"),
    Step("graphs", 60, lambda c: [gpu_tests("tests/gpu/test_graphs.py")], about="CUDA graphs forced on"),
    Step("stress", 110, lambda c: stress_commands(c, 20_000, 90), about="20,000 random calls"),
    Step("sanitizer", 150, sanitizer_commands, default=False, about="compute-sanitizer memcheck and racecheck",
         environment={"XLA_PYTHON_CLIENT_ALLOCATOR": "platform", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
)  # fmt: skip


def install_wheels(directory: str, target: pathlib.Path) -> None:
    """Unpacks wheels for this run alone and puts them on the path of every step."""
    wheels = sorted(str(p) for p in pathlib.Path(directory).glob("*.whl"))
    if not wheels:
        raise SystemExit(f"--wheels {directory}: no *.whl there")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--no-index",
            "--no-deps",
            "--no-compile",
            "--target",
            str(target),
            *wheels,
        ],
        check=True,
        timeout=120,
    )
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(target)]))


def count_gpus() -> int:
    """Returns how many GPUs the programs of this process see."""
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        return len([name for name in visible.split(",") if name])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


MOST_OF_A_REHEARSAL = 45.0
"""Seconds that a check has with --small."""


def run_four(steps: list[Step], context: Context, seconds: float, log: TextIO) -> int:
    """Runs steps of `four_steps` within `seconds`, as their turns say; returns the number of steps that failed.

    Raises:
      SystemExit: there are fewer than four GPUs, without --small.
    """
    if context.gpus < 4 and not context.small:
        raise SystemExit(f"{context.gpus} GPU(s): --steps four needs four of one host; --small rehearses it on fewer")
    began, outcomes = time.monotonic(), []

    def run(step: Step, left: float) -> None:
        print(f"[{time.monotonic() - began:5.0f} s] {step.name}: {step.about}", flush=True)
        left = min(left, MOST_OF_A_REHEARSAL) if context.small and step.turn == "shared" else left
        outcomes.append(run_step(step, context, left, log, processes.environment(**GPU_ENVIRONMENT)))
        (context.out / f"{step.name}.json").write_text(json.dumps(dataclasses.asdict(outcomes[-1]), indent=1) + "\n")
        print(f"[{time.monotonic() - began:5.0f} s] {table(outcomes[-1:])}", flush=True)

    side_by_side(steps, seconds, run, context.lock)
    print(table(outcomes))
    return sum(outcome.status != "passed" for outcome in outcomes)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", help=listing(STEPS))
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for everything")
    parser.add_argument("--build", choices=("auto", "always", "never"), default="auto")
    parser.add_argument("--wheels", help="directory of wheels to use for this run")
    parser.add_argument(
        "--memory",
        choices=("auto", "nvshmem", "nccl"),
        help="what gives memory between processes (XEN_MOE_MEMORY); NCCL_HOME says where NCCL is",
    )
    parser.add_argument("--gpus", type=int, help="default: all that CUDA_VISIBLE_DEVICES leaves")
    parser.add_argument("--small", action="store_true", help="with --steps four: a rehearsal of its commands")
    node_check.add_options(parser)
    options = parser.parse_args(arguments)
    four = (options.steps or "").startswith("four") and not options.nodes
    if options.small and not four:
        parser.error(f"--small rehearses --steps four alone; given: --steps {options.steps}")
    if options.nodes:
        return node_check.main(options)
    began = time.monotonic()
    if options.memory:
        os.environ["XEN_MOE_MEMORY"] = options.memory  # every step inherits it
    options.out.mkdir(parents=True, exist_ok=True)
    steps = four_steps.chosen(options.steps) if four else choose(STEPS, options.steps)
    outcomes = []
    with tempfile.TemporaryDirectory() as scratch, open(options.out / "logs.txt", "a") as log:
        if options.wheels:
            install_wheels(options.wheels, pathlib.Path(scratch) / "wheels")
        gpus, where = options.gpus or count_gpus(), pathlib.Path(scratch)
        context = Context(options.out.resolve(), gpus, options.build, where, options.small)
        if four:
            return run_four(steps, context, options.budget - (time.monotonic() - began), log)
        need = 1 if all(step.name in ONE_GPU for step in steps) else 2
        if context.gpus < need:
            raise SystemExit(f"{context.gpus} GPU(s): these steps need at least {need} of one host")
        for step in steps:
            left = options.budget - (time.monotonic() - began)
            print(f"[{options.budget - left:5.0f} s] {step.name}: {step.about}", flush=True)
            if left < 10:
                outcomes.append(Outcome(step.name, "left out, no time", 0.0))
            else:
                environment = processes.environment(**GPU_ENVIRONMENT)
                outcomes.append(run_step(step, context, min(step.seconds, left), log, environment))
                print("\n".join(outcomes[-1].output_end.splitlines()[-12:]), flush=True)
            result = dataclasses.asdict(outcomes[-1])
            (options.out / f"{step.name}.json").write_text(json.dumps(result, indent=1) + "\n")
            if step.name == "build" and outcomes[-1].status != "passed":
                print("the build failed: nothing else can run")
                break
    print(table(outcomes))
    return sum(o.status != "passed" for o in outcomes) + len(steps) - len(outcomes)


if __name__ == "__main__":
    sys.exit(main())
