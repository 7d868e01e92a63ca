"""`tools/gpu_check.py --nodes`: several nodes, from JAX, over their own network; one JSON to send back.

One process for each GPU of each node runs it, numbered node by node; under Slurm it finds its number by itself:

    srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 python tools/gpu_check.py --nodes OUTPUT_DIRECTORY

Elsewhere --coordinator HOST:PORT (of process 0; as many ports from there on as there are steps must be free),
--num-processes, --process-id, --processes-per-node and --local-gpu say it. Every step is a start of its own with a time
limit, after which its process is killed and the next step begins. Process 0 writes `nodes.json`; each process writes
its output to `nodes-PROCESS.txt`. The exit status is the number of steps that failed in this process.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Mapping

from tests.gpu import processes
from xen_moe_jax import doctor


@dataclasses.dataclass(frozen=True)
class Step:
    """Arguments of tests/gpu/rank_program.py, and seconds."""

    name: str
    seconds: float
    arguments: tuple[str, ...]


STEPS = (
    Step("start", 180, ("--cases", "none", "--buffers", "1")),
    Step("failure", 240, ("--cases", "none", "--reset")),
    Step("conformance", 900, ("--cases", "all")),
    Step("large", 600, ("--cases", "grouped,ranked,grouped-scaled-fp8", "--tokens", "4096", "--hidden", "7168")),
    Step("random", 600, ("--cases", "none", "--random_calls", "100000")),
    Step("time", 240, ("--cases", "none", "--time")),
)


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of this process in the job."""

    coordinator: str
    num_processes: int
    process: int
    per_node: int
    gpu: int

    def at_step(self, number: int) -> str:
        """The coordinator's address in a step: a port that an earlier one may still hold is not used again."""
        host, port = self.coordinator.rsplit(":", 1)
        return f"{host}:{int(port) + number}"


def find_place(given: Mapping[str, str | int | None], environment: Mapping[str, str]) -> Place:
    """From options where they are given, else from Slurm.

    Raises:
      ValueError: something is known from neither, or nodes are not of one size.
    """

    def one(option: str, variable: str) -> str:
        value = given.get(option)
        found = environment.get(variable) if value is None else str(value)
        if not found:
            raise ValueError(f"--nodes: pass --{option.replace('_', '-')}, or run under Slurm, which sets {variable}")
        return found.split("(")[0]  # SLURM_NTASKS_PER_NODE and the like: "8(x2)"

    processes_, process = int(one("num_processes", "SLURM_NTASKS")), int(one("process_id", "SLURM_PROCID"))
    per_node = int(one("processes_per_node", "SLURM_TASKS_PER_NODE"))
    if processes_ % per_node or processes_ == per_node:
        raise ValueError(
            f"--nodes: {processes_} processes, {per_node} to a node: two or more nodes of one size are needed"
        )
    coordinator = given.get("coordinator")
    if coordinator is None:
        nodes = one("coordinator", "SLURM_JOB_NODELIST" if "SLURM_JOB_NODELIST" in environment else "SLURM_NODELIST")
        shown = ["scontrol", "show", "hostnames", environment.get("SLURM_JOB_NODELIST", nodes)]
        first = subprocess.run(shown, capture_output=True, text=True, check=True, timeout=30).stdout.split()[0]
        coordinator = f"{first}:{20000 + int(environment.get('SLURM_JOB_ID', '0')) % 10000}"
    gpu = int(given["local_gpu"]) if given.get("local_gpu") is not None else process % per_node
    return Place(str(coordinator), processes_, process, per_node, gpu)


def run(out: pathlib.Path, place: Place, steps: list[Step], rank_options: tuple[str, ...] = ()) -> int:
    """Runs the steps; `rank_options`: for every one of them."""
    out.mkdir(parents=True, exist_ok=True)
    results, log = [], out / f"nodes-{place.process}.txt"
    log.write_text("")
    for number, step in enumerate(steps):
        seen = out / f"nodes-{step.name}.json"
        seen.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.gpu.rank_program", "--coordinator", place.at_step(number)]
        command += ["--num_processes", str(place.num_processes), "--process_id", str(place.process)]
        command += ["--ranks_per_node", str(place.per_node), "--real_nodes", "--found", "--json", str(seen)]
        command += ["--local_gpu", str(place.gpu), *rank_options, *step.arguments]
        (done,) = processes.run_all([command], seconds=step.seconds, env=environment())
        with log.open("a") as file:
            file.write(f"===== {step.name}: status {done.returncode} after {done.seconds:.0f} s\n{done.output}\n")
        results.append(
            {
                "step": step.name,
                "status": "passed" if done.ok else "killed at its limit" if done.returncode is None else "failed",
                "seconds": round(done.seconds, 1),
                "seen": json.loads(seen.read_text()) if place.process == 0 and seen.exists() else None,
                "output_end": "" if done.ok else done.output[-3000:],
            }
        )
        print(f"[process {place.process}] {step.name}: {results[-1]['status']} in {done.seconds:.0f} s", flush=True)
        if place.process == 0:
            write(out / "nodes.json", place, results)
    return sum(result["status"] != "passed" for result in results)


def environment() -> dict[str, str]:
    """Sets the existing network, and half of the GPU's memory for JAX unless the user has set another share."""
    kept = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"} | dict(os.environ)
    kept.pop("NCCL_HOSTID", None)  # it makes virtual nodes
    path = os.pathsep.join(filter(None, [str(pathlib.Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return kept | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def write(path: pathlib.Path, place: Place, results: list[dict]) -> None:
    """Writes the results so far, so that a run that is stopped half way leaves a report."""
    report = {section: [dataclasses.asdict(f) for f in found] for section, found in static_report().items()}
    variables = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_", "XEN_MOE_", "XLA_"))}
    summary = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "system": platform.platform(),
        "processes": place.num_processes,
        "processes_per_node": place.per_node,
        "gpus": _output(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]),
        "links": _output(["nvidia-smi", "topo", "-m"]),
        "network": _output(["ibv_devinfo", "-l"]),
        "environment": variables,
        "doctor": report,
        "steps": results,
    }
    path.write_text(json.dumps(summary, indent=1) + "\n")


def static_report() -> dict[str, list[doctor.Finding]]:
    """Returns the findings of `doctor` that do not start JAX's devices, which the steps need."""
    compiled = [*doctor.native_modules(), doctor.nvshmem_library(), doctor.nccl_library(), doctor.nccl_puts()]
    compiled.append(doctor.nccl_kernels())
    return {"Versions": doctor.versions(), "Compiled modules": compiled}


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("--nodes", "several nodes; run by one process for each GPU (tools/node_check.py)")
    group.add_argument("--nodes", action="store_true", help="nothing but the check of several nodes")
    group.add_argument("--coordinator", help="HOST:PORT of process 0 (default: from Slurm)")
    for name in ("num-processes", "process-id", "processes-per-node"):
        group.add_argument(f"--{name}", type=int, help="default: from Slurm")
    group.add_argument("--local-gpu", type=int, help="of this process on its host (default: from its number)")


def main(options: argparse.Namespace) -> int:
    names = options.steps.split(",") if options.steps else [step.name for step in STEPS]
    unknown = [name for name in names if name not in {step.name for step in STEPS}]
    if unknown:
        raise SystemExit(f"--steps: with --nodes there are {[step.name for step in STEPS]}, not {unknown}")
    try:
        place = find_place(vars(options), os.environ)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    return run(options.out, place, [step for step in STEPS if step.name in names])
