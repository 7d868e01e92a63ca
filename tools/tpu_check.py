"""Proves or breaks the library on TPUs, times it, and compares the times with what was counted; one file to send back.

    python tools/tpu_check.py OUT                    one host: v5e-8, v4-8, v5p-8, v6e-8, 7x; a single chip, too
    python tools/tpu_check.py OUT --coordinator auto    the same command on every host of a slice, or of several
    python tools/tpu_check.py OUT --rehearse         all of it on 4 virtual CPU devices, in the interpreter

Needs a checkout with jax[tpu], flax, pytest and hypothesis (`pip install -e '.[tpu,flax]' pytest hypothesis`). Steps:
versions and devices; the counts for this very chip; conformance with the NumPy oracle (whole, few tokens, halves, two
axes, drop-ins, gradients); a Flax layer; planted values at DeepSeek-V3's sizes; times of operations, kernels, a layer.

Each step is a process group with a limit, and a process writes into a file which program it is about to run
(`benchmarks/tpu/watch.py`). From outside the check can tell of a program that does not end:
- the program, and its kernels in the order of their traces: from that file, as soon as it has run for --hang-seconds.
  It is then killed, and the step is over.
- the kernel: the same test is run again in processes that keep only the first kernels of each program and replace
  the results of all later ones by zeros. The last of the fewest kernels that still hang is the one that hangs.
- the semaphore: that kernel is run again without one of its kinds of waits, in turn. If it ends without the wait for
  one semaphore, it hangs in that wait. It cannot tell which of the peers did not signal, or why: a rank that
  waits and the rank that is late are one SPMD program. A start half and its done half count as one kernel.
Kernels and semaphores are looked for on one host, and in steps that are tests; elsewhere the program is named.

OUT gets `tpu_check.json`, which holds everything, and `logs.txt`. The exit status is the number of steps that did not
pass.
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
import tempfile
import time
from typing import Any, TextIO

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.support import processes  # noqa: E402
from tools.steps import HUNG, KILLED, PYTEST, Outcome, Step, choose, listing, run_step, table  # noqa: E402
from xen_moe_jax.backends.pallas.hardware import GENERATIONS  # noqa: E402

PREFIX = "XEN_MOE_TPU_"
CONFORMANCE = "tests/tpu/test_conformance.py"
REHEARSED = {
    "conformance": "test_dispatch_and_combine and [grouped/uniform]",
    "few-tokens": "[padded/uniform]",
    "halves": "test_dispatch_and_combine and [ranked/uniform]",
    "two-axes": "grouped-two-axes/uniform",
    "drop-ins": "test_ragged_all_to_all_in_segments",
    "gradients": "test_gradients and grouped",
    "layer": "swiglu",
    "sizes": "small_tokens",
}
"""pytest -k of each step in a rehearsal, in place of its own."""
MESH = 4
"""Devices that a step with several ranks needs."""
SETTLE_SECONDS = 60.0
"""In which a chip must be free again after its process was killed."""


@dataclasses.dataclass(frozen=True)
class Context:
    """Attributes:
    out: folder. scratch: for files of this run. devices: of all processes. generation: of the chips, None: unknown.
    rehearse: virtual devices of each process, 0 on TPUs. processes: of the job.
    """

    out: pathlib.Path
    scratch: pathlib.Path
    devices: int
    generation: str | None
    rehearse: int
    processes: int

    def file(self, part: str) -> pathlib.Path:
        return self.scratch / f"{part}.json"


def tests(step: str, file: str, expression: str = "", *, cases: str = "") -> Any:
    """Commands of a step that runs a file of tests, or the class `cases` of it; one chip has a class of its own."""

    def commands(context: Context) -> list[list[str]]:
        chosen = REHEARSED[step] if context.rehearse else expression
        name = "TestOneChip" if context.devices < MESH and cases else cases
        return [[*PYTEST, "::".join(filter(None, [file, name])), *(["-k", chosen] if chosen else [])]]

    return commands


def part(name: str) -> Any:
    """Commands of a step that measures (`benchmarks/tpu/chip.py`)."""

    def commands(context: Context) -> list[list[str]]:
        command = [sys.executable, "-m", "benchmarks.tpu.chip", name, "--json", str(context.file(name))]
        if name.startswith("counted"):
            command += ["--generation", context.generation or "unknown", "--devices", str(context.devices)]
        return [[*command, *(["--small"] if context.rehearse else [])]]

    return commands


PLAIN_JAX = "test_dispatch_and_combine and ([grouped/uniform] or [ranked/zipf])"
WHOLE = "test_dispatch_and_combine and not two-axes"
OTHERS = "interleaved or start_and_done or non_finite"
STEPS = (
    Step("info", 120, lambda c: [[sys.executable, "-m", "xen_moe_jax.doctor"]], about="versions, backends, topology"),
    Step("plain-jax", 240, lambda c: [[*PYTEST, "tests/backends/reference", "-k", PLAIN_JAX]], default=False,
         about="the reference backend against the oracle, on CPU devices: by default in a rehearsal alone"),
    Step("counted", 240, part("counted"), about="the static estimate for this chip; nothing runs on it"),
    Step("counted-further", 240, part("counted-further"), about="that of the kernels that no dispatch or combine has"),
    Step("conformance", 400, tests("conformance", CONFORMANCE, f"({WHOLE}) or {OTHERS}", cases="TestChips"),
         about="every layout, wire, routing and capacity, bit for bit"),
    Step("sizes", 240, tests("sizes", "tests/tpu/test_sizes.py", "not small_tokens"),
         about="planted values: 1, 128, 4096, 8192 tokens"),
    Step("layer", 120, tests("layer", "tests/tpu/test_layer.py"), about="a Flax layer, forward and backward"),
    Step("gradients", 120, tests("gradients", CONFORMANCE, "gradients or tangents", cases="TestChips"),
         about="cotangents and tangents, bit for bit"),
    Step("halves", 240, tests("halves", CONFORMANCE, f"({WHOLE} and uniform) or start_and", cases="TestHalves"),
         about="start and done: no interpreter runs them"),
    Step("two-axes", 120, tests("two-axes", CONFORMANCE, "two-axes", cases="TestChips"),
         about="a slow and a fast axis, of slices where there are several"),
    Step("drop-ins", 180, tests("drop-ins", CONFORMANCE, "all_to_all", cases="TestChips"),
         about="all_to_all, ragged_all_to_all"),
    Step("few-tokens", 240, tests("few-tokens", CONFORMANCE, f"{WHOLE} and uniform", cases="TestFewTokens"),
         about="as a decode runs"),
    Step("operations", 400, part("operations"), about="times beside ragged_all_to_all and all_gather"),
    Step("kernels", 400, part("kernels"), about="time of each kernel of a dispatch and a combine, beside its count"),
    Step("further", 400, part("further"), about="time of every other kernel, beside its count"),
    Step("layer-times", 300, part("layer"), about="a layer beside the same on ragged_all_to_all"),
)  # fmt: skip
ONE_AXIS = ("conformance", "sizes", "layer", "gradients", "halves", "drop-ins", "few-tokens", "operations", "kernels",
            "further", "layer-times")  # fmt: skip
"""Steps that do not leave a slice: left out where there are several, whose step is two-axes."""
ONE_CHIP = ("info", "conformance", "gradients", "drop-ins")
"""Steps of fewer devices than `MESH`: with one rank."""


def possible(steps: list[Step], devices: int, slices: int) -> list[Step]:
    """Returns the steps that so many devices in so many slices can run."""
    if slices > 1:
        steps = [step for step in steps if step.name not in ONE_AXIS]
    return [step for step in steps if devices >= MESH or step.name in ONE_CHIP]


def describe(environment: dict[str, str], scratch: pathlib.Path, seconds: float) -> dict[str, Any]:
    """Devices, topology and versions, from a process of its own: this one never opens the chips."""
    path = scratch / "devices.json"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.tpu.devices", str(path)]
    (done,) = processes.run_all([command], seconds=seconds, env=environment)
    if not done.ok or not path.exists():
        status = KILLED if done.returncode is None else f"exit status {done.returncode}"
        return {"error": f"{status}: {done.output[-3000:]}"}
    return json.loads(path.read_text())


class Progress:
    """The last line that the process of a step has printed, and since when it runs the same program."""

    def __init__(self, path: pathlib.Path, seconds: float):
        self.path, self.seconds = path, seconds

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def read(self) -> dict[str, Any]:
        try:
            return json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}

    def hangs(self) -> bool:
        last = self.read()
        return last.get("phase") == "running" and time.time() - last["since"] > self.seconds


@dataclasses.dataclass
class Search:
    """Runs one test again and again to find the kernel and the semaphore in which it hangs."""

    test: str
    environment: dict[str, str]
    progress: Progress
    seconds: float
    log: TextIO

    def ends(self, kept: int, without: str | None = None) -> bool:
        """Returns True if the program ends, rightly or not, with `kept` kernels and without the wait `without`."""
        self.progress.clear()
        changed = {f"{PREFIX}KEEP": str(kept)} | ({f"{PREFIX}WITHOUT": without} if without else {})
        command = [*PYTEST, self.test]
        (done,) = processes.run_all(
            [command], seconds=self.seconds, env=self.environment | changed, give_up=self.progress.hangs
        )
        self.log.write(f"\n===== {self.test}, {changed}: status {done.returncode}\n{done.output[-2000:]}\n")
        self.log.flush()
        return done.returncode is not None

    def kernel(self, kernels: list[list[str]]) -> int | None:
        """The number of the kernel that hangs, or None where all of them end when run again."""
        if not self.ends(0):
            return None  # it is not one of our kernels that hangs
        fine, hung = 0, len(kernels)
        if self.ends(hung):
            return None
        while hung - fine > 1:
            middle = (fine + hung) // 2
            fine, hung = (middle, hung) if self.ends(middle) else (fine, middle)
        return fine

    def semaphore(self, number: int, waits: dict[str, str]) -> str | None:
        """The kind of wait without which the kernel of this number ends."""
        return next((wait for wait in waits if self.ends(number + 1, wait)), None)


def name_hang(outcome: Outcome, search: Search | None, last: dict[str, Any]) -> dict[str, Any]:
    """Describes a program that did not end, as far as the check can tell."""
    found: dict[str, Any] = {"program": last.get("program"), "kernels": [name for name, _ in last.get("kernels", [])]}
    if search is None or "::" not in (last.get("program") or ""):
        why = "kernels are told apart in tests, on one host"
        if last.get("phase") == "compiling":
            why = "it was being compiled when the step's time was over"
        return found | {"kernel": None, "semaphore": None, "why": why}
    number = search.kernel(last["kernels"])
    if number is None:
        return found | {
            "kernel": None,
            "semaphore": None,
            "why": "run again, it ends, or hangs without our kernels too",
        }
    name, reaches = last["kernels"][number]
    found |= {"kernel": name, "kernel_number": number + 1}
    waits = last["waits"]
    if reaches != "peer":
        return found | {"semaphore": None, "why": "the kernel stays on its chip: it waits for its own DMAs alone"}
    wait = search.semaphore(number, waits)
    return found | {"semaphore": wait, "why": waits.get(wait or "", "without any one of its waits it hangs, too")}


def environment_of(options: argparse.Namespace, progress: pathlib.Path) -> dict[str, str]:
    """Returns the environment that every step inherits."""
    changes = {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu" if options.rehearse else "tpu,cpu"}
    changes[f"{PREFIX}PROGRESS"] = str(progress)
    if options.rehearse:
        changes |= {f"{PREFIX}REHEARSE": str(options.rehearse), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        changes["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.rehearse}"
    if options.coordinator and options.coordinator != "auto":
        changes |= {f"{PREFIX}PROCESSES": str(options.num_processes), f"{PREFIX}PROCESS": str(options.process_id)}
    if options.plant:
        changes[f"{PREFIX}PLANT"] = options.plant
    return processes.environment(**changes)


def joined(options: argparse.Namespace, number: int) -> dict[str, str]:
    """Returns an address where the processes of a step meet; it uses no port again that an earlier step may hold."""
    if not options.coordinator:
        return {}
    if options.coordinator == "auto":
        return {f"{PREFIX}COORDINATOR": "auto"}
    host, port = options.coordinator.rsplit(":", 1)
    return {f"{PREFIX}COORDINATOR": f"{host}:{int(port) + number}"}


def settle(environment: dict[str, str], scratch: pathlib.Path) -> None:
    """Waits until the chips of a process that was killed can be opened again."""
    until = time.monotonic() + SETTLE_SECONDS
    while "error" in describe(environment, scratch, SETTLE_SECONDS) and time.monotonic() < until:
        time.sleep(2)


def measured(context: Context) -> dict[str, Any]:
    """Returns the measurements of the steps, beside the counts."""
    from benchmarks.tpu import chip

    parts: dict[str, Any] = {}
    for name in (*chip.COUNTED, *chip.PARTS):
        if context.file(name).exists():
            parts[name] = json.loads(context.file(name).read_text())
    rows = {name: parts.get(name, {}).get("rows", []) for name in chip.PARTS}
    estimates = [row for name in chip.COUNTED for row in parts.get(name, {}).get("rows", [])]
    if estimates:
        parts["compared"] = chip.compared(estimates, rows["kernels"] + rows["further"], rows["operations"])
        if rows["kernels"] or rows["further"] or rows["operations"]:
            parts["table"] = chip.table(parts["compared"], rows["operations"] + rows["layer"])
    return parts


def verdicts(outcomes: list[Outcome], hangs: dict[str, Any], parts: dict[str, Any]) -> list[str]:
    """A line for each thing that is wrong."""
    lines = [f"failed: {name}" for o in outcomes for name in o.failures]
    for step, hang in hangs.items():
        where = (
            f"in {hang['kernel']} (kernel {hang['kernel_number']})" if hang["kernel"] else "in a kernel not told apart"
        )
        semaphore = f", at {hang['semaphore']}" if hang["semaphore"] else ""
        lines.append(f"hung: {step}: {hang['program']} {where}{semaphore}: {hang['why']}")
    for entry in parts.get("compared", {}).get("kernels", []):
        if entry["slow"]:
            lines.append(
                f"slow: {entry['kernel']} of {entry['case']} {entry['operation']}: {entry['measured_us']:.1f} us, "
                f"{entry['ratio']:.2f} times its count, where the median is {parts['compared']['median_ratio']:.2f}"
            )
    return lines


REHEARSAL = 6
"""A step's time limit is multiplied by this number in a rehearsal, in which a machine with few cores, which may be
busy, interprets the kernels."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--steps", help=listing(STEPS))
    parser.add_argument(
        "--budget", type=float, help="seconds for everything (default 1500; none on several hosts, and in a rehearsal)"
    )
    parser.add_argument("--hang-seconds", type=float, help="in which a compiled program must end (default 60)")
    parser.add_argument("--rehearse", type=int, nargs="?", const=4, default=0, metavar="DEVICES",
                        help="on virtual CPU devices, kernels interpreted, small sizes (default 4)")  # fmt: skip
    parser.add_argument("--plant", metavar="KIND:KERNEL", help="with --rehearse: a kernel that hangs, is wrong or slow")
    group = parser.add_argument_group("several hosts: the same command on each")
    group.add_argument("--coordinator", help="'auto' (Cloud TPU and GKE say it), or HOST:PORT of the first process; as "
                       "many ports from there on as there are steps must be free")  # fmt: skip
    group.add_argument("--num-processes", type=int, default=1)
    group.add_argument("--process-id", type=int, default=0)
    return parser


def check(options: argparse.Namespace) -> None:
    """Raises SystemExit for arguments that do not go together."""
    if options.plant and not options.rehearse:
        raise SystemExit("--plant: only with --rehearse; a faulty kernel on a chip may write where it should not")
    if options.num_processes > 1 and not options.coordinator:
        raise SystemExit(f"--num-processes {options.num_processes}: needs --coordinator HOST:PORT")


def main(arguments: list[str] | None = None) -> int:
    options = build_parser().parse_args(arguments)
    check(options)
    several = bool(options.coordinator)
    budget = options.budget or (float("inf") if several or options.rehearse else 1500.0)
    began = time.monotonic()
    everything = [dataclasses.replace(s, default=True) if options.rehearse else s for s in STEPS]
    steps = choose(everything, options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, open(options.out / "logs.txt", "a") as log:
        scratch = pathlib.Path(folder)
        progress = Progress(scratch / "progress.json", options.hang_seconds or (120.0 if options.rehearse else 60.0))
        environment = environment_of(options, progress.path)
        found = describe(environment | joined(options, 0), scratch, 300)
        if "error" in found:
            (options.out / "tpu_check.json").write_text(json.dumps({"devices": found}, indent=1) + "\n")
            print(f"JAX could not start {'the rehearsal' if options.rehearse else 'a TPU'}: {found['error']}")
            return 1
        print(found["summary"], flush=True)
        known = GENERATIONS.get(found["device_kind"])
        generation = "v5e" if options.rehearse else known.name if known else None
        context = Context(options.out, scratch, found["devices"], generation, options.rehearse, found["processes"])
        steps = possible(steps, found["devices"], found["slices"])
        outcomes: list[Outcome] = []
        hangs: dict[str, Any] = {}
        for number, step in enumerate(steps, 1):
            left = budget - (time.monotonic() - began)
            print(f"[{time.monotonic() - began:5.0f} s] {step.name}: {step.about}", flush=True)
            if left < 10:
                outcomes.append(Outcome(step.name, "left out, no time", 0.0))
                continue
            progress.clear()
            own = environment | joined(options, number)
            limit = min(step.seconds * (REHEARSAL if options.rehearse else 1), left)
            outcome = run_step(step, context, limit, log, own, hangs=progress.hangs)
            outcomes.append(outcome)
            if outcome.status in (HUNG, KILLED):
                last = progress.read()
                if not options.rehearse and not several:
                    settle(own, scratch)
                search = None
                if not several and outcome.status == HUNG:
                    search = Search(last.get("program", ""), own, progress, progress.seconds + 180, log)
                hangs[step.name] = name_hang(outcome, search, last)
            print(f"          {outcome.status}", flush=True)
            report(options, found, outcomes, hangs, measured(context), began)
        parts = measured(context)
    if parts.get("table"):
        if options.rehearse:
            print("Times of the interpreter beside counts of a v5e: the rehearsal shows the table, not a speed.")
        print(parts["table"])
    print(table(outcomes))
    wrong = verdicts(outcomes, hangs, parts)
    print("\n".join(line for line in wrong if not line.startswith("failed")))
    if options.process_id == 0:
        print(f"send back {options.out / 'tpu_check.json'}")
    return sum(o.status != "passed" for o in outcomes)


def report(
    options: argparse.Namespace, found: dict[str, Any], outcomes: list[Outcome], hangs: dict, parts: dict, began: float
) -> None:
    """Writes what there is so far: a check that is stopped half way leaves a file."""
    variables = {k: v for k, v in os.environ.items() if k.startswith(("XLA_", "LIBTPU_", "TPU_", "JAX_"))}
    document = {
        "when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "rehearsal": bool(options.rehearse),
        "commit": commit(),
        "system": platform.platform(),
        "environment": variables,
        "devices": found,
        "seconds": round(time.monotonic() - began, 1),
        "steps": [dataclasses.asdict(o) for o in outcomes],
        "hangs": hangs,
        "verdicts": verdicts(outcomes, hangs, parts),
        "measured": {name: value for name, value in parts.items() if name != "table"},
    }
    name = "tpu_check.json" if not options.process_id else f"tpu_check-{options.process_id}.json"
    (options.out / name).write_text(json.dumps(document, indent=1) + "\n")


def commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


if __name__ == "__main__":
    sys.exit(main())
