"""`python -m benchmarks jax-best`: the library beside JAX's own collectives, each tuned as well as XLA's flags allow.

Every setting of `jax_settings` runs in a process of its own with a time limit, and writes its figures as they come, so
that a process that hangs or dies loses only its missing figures, and is reported as such. With --lock a process may
wait long for its turn, so that only the limit of all settings ends it. In a process the round trip of every peer comes
first, in the tokens' own dtype. The fastest peers, and those of a user who does not tune, are then timed further:
dispatch and combine alone, and all operations with fp8 rows, as far as `--peer-operations` asks for them. A peer that a
setting cannot run is listed with its error, and the next peers go on.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent import futures
from typing import Any

from benchmarks.lib import options as command_options
from benchmarks.lib import report, turns
from benchmarks.peers.jax_settings import JAX_DEFAULT, OURS, SETTINGS, Setting
from tools.children import bound

TOKENS = (128, 4096)
"""The smaller size first: a setting that hangs with the larger one has a figure for the smaller."""
FP8 = "float8_e4m3fn"
FASTEST = 2
"""Peers of the default setting that are timed beyond their round trip, beside those of `JAX_DEFAULT`; every other
setting times one."""
OPERATIONS = ("dispatch", "combine", "round trip")
GOAL = 2.5
"""Times faster than the best of JAX that the round trip should be."""
MOST_OF_AN_ERROR = 1000
"""Characters of an error that a file keeps."""
FEW_TOKENS = 512
"""Most tokens for which the library's own programs use the padded layout, as a decode step does."""


# ------------------------------------------------------------------------------- the parent: a process for each setting
def main(options: argparse.Namespace, arguments: list[str]) -> int:
    """Runs the settings, writes the figures after each, prints the comparison; returns 1 if the library's own figures
    lack."""
    names = options.settings or list(SETTINGS)
    command = report.command_line(arguments)
    before = earlier(options.json)
    document: dict[str, Any] = {
        "command": command,
        "mode": options.mode,
        "settings": before["settings"],
        "left_out": [name for name in before["left_out"] if name not in names],
    }
    began = time.monotonic()
    for name in names:
        # Processes of one device each wait for one another in a collective, so that the parent takes the turn for all.
        with turns.alone(options.lock if SETTINGS[name].process_per_device else None):
            left = options.seconds - (time.monotonic() - began)
            limit = left if options.lock else min(left, SETTINGS[name].seconds or options.setting_seconds)
            if limit < 15:  # a process needs that much to start and to compile
                document["left_out"].append(name)
                continue
            report.progress(f"== {name}, {limit:.0f} s at most")
            entry, head = run_in_processes(name, options, limit)
        document["settings"][name] = entry | {
            "command": command,
            "time": head.get("time"),
            "versions": head.get("versions"),
        }
        document = document | head
        report.progress(f"   {entry['ended']}: {len(entry['results'])} figures in {entry['seconds']:.0f} s")
        for row in failures(entry):
            report.progress(f"   {failure(row)}")
        if options.json:
            report.write_json(options.json, document)
    if options.json:
        report.write_json(options.json, document)
    print(describe(document))
    return int(not document["settings"].get(OURS, {"results": True})["results"])


def earlier(path: str | None) -> dict[str, Any]:
    """Settings that a file of this command already holds, and settings that it leaves out: a run adds its figures to
    the file. They need not have been measured in one run, so each keeps its own command, time and versions."""
    if not path or not pathlib.Path(path).exists() or not pathlib.Path(path).read_text().strip():
        return {"settings": {}, "left_out": []}
    found = json.loads(pathlib.Path(path).read_text())
    settings = {name: {"command": found.get("command")} | entry for name, entry in found["settings"].items()}
    return {"settings": settings, "left_out": found.get("left_out", [])}


def run_in_processes(name: str, options: argparse.Namespace, limit: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """One setting: its entry of the document, and the head of the document as the process saw the machine."""
    setting = SETTINGS[name]
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        part = pathlib.Path(folder, "part.json")
        ended = wait_for(start(name, options, part), limit)
        content = json.loads(part.read_text()) if part.exists() else {"head": {}, "results": []}
        if ended != "finished":
            ended += f"; last words: {last_words(logs(part))}"
    entry = dataclasses.asdict(setting) | {
        "ended": ended,
        "seconds": round(time.monotonic() - began, 1),
        "results": content["results"],
        "failed": content.get("failed", []),
    }
    return entry, content["head"]


def log_of(part: pathlib.Path, number: int) -> pathlib.Path:
    """The log of process `number` of the setting that writes `part`."""
    return part.with_name(f"{part.name}.log{number:03}")


def logs(part: pathlib.Path) -> list[str]:
    """Logs of all processes, in their order."""
    return [path.read_text(errors="replace") for path in sorted(part.parent.glob(f"{part.name}.log*"))]


def start(name: str, options: argparse.Namespace, part: pathlib.Path) -> list[subprocess.Popen]:
    """The processes of one setting; the first of them writes `part`, each of them a log beside it."""
    setting = SETTINGS[name]
    flags = f"{os.environ.get('XLA_FLAGS', '')} {setting.flags}".strip()
    command = [sys.executable, "-m", "benchmarks", "jax-best", "--setting", name]
    command += ["--repeats", str(options.repeats), "--part", str(part)]
    given = ("platform", "ranks", "tokens", "hidden", "experts", "top_k", "inner", "routing", "peer_operations")
    for argument in given:
        if getattr(options, argument) is not None:
            command += [f"--{argument.replace('_', '-')}", str(getattr(options, argument))]
    command += ["--deepseek-v3"] if options.deepseek_v3 else []
    command += ["--lock", options.lock] if options.lock and not setting.process_per_device else []
    count = (options.ranks or visible_devices()) if setting.process_per_device else 1
    together = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", str(count)] if count > 1 else []
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment |= dict(pair.split("=", 1) for pair in setting.environment.split())
    processes = []
    for number in range(count):
        with log_of(part, number).open("w") as stream:
            processes.append(
                subprocess.Popen(
                    bound([*command, *together, *(["--process-id", str(number)] if together else [])]),
                    env=environment,
                    stdout=stream,
                    stderr=stream,
                    start_new_session=True,
                )
            )
    return processes


def wait_for(processes: list[subprocess.Popen], limit: float) -> str:
    """Ends with the last process, the first failure or the limit, whichever comes first; says which."""
    until = time.monotonic() + limit
    try:
        while True:
            states = [process.poll() for process in processes]
            failed = [state for state in states if state]
            if failed:
                return f"failed with exit status {failed[0]}"
            if None not in states:
                return "finished"
            if time.monotonic() > until:
                return f"did not finish in {limit:.0f} s"
            time.sleep(0.2)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


RAISED = re.compile(r"[\w.]*(Error|Exception|Interrupt)\b")
"""Begins the line in which Python names an uncaught exception."""


def last_words(found: list[str]) -> str:
    """Returns for each process the exception that ended it, or else the last line that speaks of an error, and the last
    line. All processes are listed: a process that loses its partner ends too, with words that do not name the cause."""
    said = []
    for number, log in enumerate(found):
        lines = [line.strip() for line in log.splitlines() if line.strip()]
        raised = [line for line in lines if RAISED.match(line)]
        telling = raised or [line for line in lines if "rror" in line or "Check fail" in line]
        words = " / ".join(dict.fromkeys([*telling[-1:], *lines[-1:]]))[: 700 // len(found)]
        said.append(words if len(found) == 1 else f"process {number}: {words or 'nothing'}")
    return "; ".join(said)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def visible_devices() -> int:
    """Number of devices of this machine, counted by a process of its own: the calling process must leave the devices
    alone."""
    program = "import jax; print(jax.device_count())"
    return int(
        subprocess.run(bound([sys.executable, "-c", program]), capture_output=True, text=True, check=True).stdout
    )


# ------------------------------------------------------------------------------------------ the child: one setting
def run_setting(options: argparse.Namespace) -> int:
    """Measures one setting in this process, where JAX has started with its flags; writes the file after every step."""
    content: dict[str, Any] = {"head": {}, "results": [], "failed": []}
    for rows in figures(options, SETTINGS[options.setting]):
        content["head"] = {k: v for k, v in report.header([], None).items() if k != "command"}
        content["results"] += [row for row in rows if "error" not in row]
        content["failed"] += [row for row in rows if "error" in row]
        if options.process_id == 0:
            part = pathlib.Path(options.part)
            part.with_suffix(".new").write_text(json.dumps(content))
            part.with_suffix(".new").replace(part)
    return 0


def figures(options: argparse.Namespace, setting: Setting) -> Iterator[list[dict[str, Any]]]:
    """Result rows, a group at a time: round trips of all sizes first. A row with an "error" is a program that could not
    run."""
    import jax

    if (options.ranks or jax.device_count()) < 2:
        raise ValueError(f"JAX sees {jax.device_count()} device: with one rank nothing travels; run it on several")
    sizes = (options.tokens,) if options.tokens else TOKENS
    asked = command_options.operations(options, "peer_operations") if setting.peers else OPERATIONS
    further: dict[int, tuple[str, ...]] = {}
    for tokens in sizes:
        rows = measure(options, tokens, "bfloat16", setting.peers, ("round trip",))
        yield rows
        timed = sorted((row for row in rows if "error" not in row), key=lambda row: row["us_median"])
        by_time = [row["name"] for row in timed]
        best = by_time[: FASTEST if options.setting == "default" else 1]
        also = JAX_DEFAULT if options.setting == "default" else ()
        further[tokens] = tuple(name for name in by_time if name in best or name in also)
    for dtype, operations in (("bfloat16", ("dispatch", "combine")), (FP8, ("dispatch", "round trip"))):
        some = tuple(operation for operation in operations if operation in asked)
        for tokens in sizes:
            if some and (further[tokens] or not setting.peers):
                yield measure(options, tokens, dtype, further[tokens] if setting.peers else (), some)


def measure(
    options: argparse.Namespace, tokens: int, dtype: str, names: tuple[str, ...], operations: tuple[str, ...]
) -> list[dict[str, Any]]:
    """Compiles side by side, checks and times: the named peers, or the library's own programs where there is none.

    A peer that does not compile or run under this setting is a row with its "error"; the library's own must run.
    """
    import jax

    import xen_moe_jax as xm
    from benchmarks.lib import accounting, verify
    from benchmarks.peers import registry as peers
    from xen_moe_jax.tuning import programs, timing
    from xen_moe_jax.tuning.problem import make_problem

    few = tokens <= FEW_TOKENS
    work = dataclasses.replace(
        command_options.workload(options, jax.device_count()),
        tokens=tokens,
        dtype=dtype,
        layout="padded" if few else "grouped",
        pool=2,
    )
    problem = make_problem(work)
    if names:
        chosen = peers.peer_programs(work, problem.caps, problem.platform, names, operations)
    else:
        config = xm.KernelConfig(mode="low_latency" if few else "throughput")
        chosen = programs.own_programs(work, problem.caps, config, operations)
    inner = options.inner or (4 if problem.platform == "cpu" else 1000 if few else 100)

    def compile_one(program: programs.Program) -> tuple[Any, Any]:
        start = timing.compile_only(program, problem, inner, unroll=4 if few else 1)
        return start, verify.compile_check(program, problem) if program.round_trip else None

    report.progress(f"{tokens} tokens, {dtype}: compiling {len(chosen)} programs")
    timed, errors, results = [], [], []

    def refused(program: programs.Program, error: Exception) -> None:
        if not names:
            raise error
        what = {"name": program.name, "operation": program.operation, "tokens": tokens, "dtype": dtype}
        results.append(what | {"error": f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]})

    with futures.ThreadPoolExecutor(8 if names else 1) as pool:
        compiling = [pool.submit(compile_one, program) for program in chosen]
    with turns.alone(options.lock):
        for program, future in zip(chosen, compiling, strict=True):
            try:
                start, check = future.result()
                report.progress(f"{tokens} tokens, {dtype}: running {program.name}, {program.operation}")
                entry = start()
                error = {"max error": verify.check_round_trip(program, problem, check)} if check else {}
            except Exception as problem_of_peer:  # XLA refuses in many ways; the table shows it
                refused(program, problem_of_peer)
                continue
            timed.append(entry)
            errors.append(error)
        if timed:
            report.progress(f"{tokens} tokens, {dtype}: timing {len(timed)} programs of {inner} calls")
            timing.measure(timed, options.repeats)
    rows = accounting.off_rank_rows(work, problem.topk_idx)
    for entry, error in zip(timed, errors, strict=True):
        try:
            verify.check_timed_result(entry, problem)
        except verify.WrongResultError as wrong:
            refused(entry.program, wrong)
            continue
        results.append(report.result_row(entry, work, rows, error) | {"tokens": tokens, "dtype": dtype})
    return results


# ----------------------------------------------------------------------------------------------- the comparison
@dataclasses.dataclass(frozen=True)
class Comparison:
    """One line of the table: the library, untuned JAX, and the best of all settings. Microseconds."""

    tokens: int
    dtype: str
    operation: str
    ours: dict[str, Any] | None
    default: tuple[dict[str, Any], ...]
    best: dict[str, Any] | None

    @property
    def ratio(self) -> float | None:
        if self.ours is None or self.best is None:
            return None
        return self.best["us_median"] / self.ours["us_median"]


def compare(document: dict[str, Any]) -> list[Comparison]:
    """Every (tokens, dtype, operation) that our own programs or a peer were timed for. A combine moves bfloat16 in any
    case, so there is one for both dtypes."""
    rows = [row | {"setting": name} for name, entry in document["settings"].items() for row in entry["results"]]
    keys = dict.fromkeys((row["tokens"], row["dtype"], row["operation"]) for row in rows)
    order = sorted(keys, key=lambda key: (-key[0], key[1], OPERATIONS.index(key[2])))
    found = []
    for key in order:
        same = [row for row in rows if (row["tokens"], row["dtype"], row["operation"]) == key]
        theirs = sorted((row for row in same if row["setting"] != OURS), key=lambda row: row["us_median"])
        default = [row for row in theirs if row["setting"] == "default" and row["name"] in JAX_DEFAULT]
        ours = next((row for row in same if row["setting"] == OURS), None)
        found.append(Comparison(*key, ours, tuple(default), theirs[0] if theirs else None))
    return found


def cells(line: Comparison) -> list[str]:
    """Cells of one line of the table, for the terminal and for the documents alike."""

    def text(row: dict[str, Any] | None) -> str:
        return "-" if row is None else f"{row['us_median']:,.0f}"

    def default_of(name: str) -> str:
        return text(next((row for row in line.default if row["name"] == name), None))

    best = "-" if line.best is None else f"{line.best['name']}; {line.best['setting']}"
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}x"
    return [
        f"{line.tokens} tokens, {line.dtype}, {line.operation}",
        text(line.ours),
        *(default_of(name) for name in JAX_DEFAULT),
        text(line.best),
        ratio,
        best,
    ]


COLUMNS = [
    "what",
    "ours, us",
    "JAX default: all_to_all",
    "JAX default: ragged",
    "JAX best",
    "best / ours",
    "the best is",
]


def goal_line(document: dict[str, Any]) -> str:
    """Says if every round trip meets `GOAL`, and names the ones that miss it with their ratio."""
    trips = [line for line in compare(document) if line.operation == "round trip" and line.ratio is not None]
    if not trips:
        return f"The goal of {GOAL} times the best of JAX on the round trip: not measured."
    missed = [f"{line.tokens} tokens {line.dtype} {line.ratio:.2f}x" for line in trips if (line.ratio or 0) < GOAL]
    met = f"The goal of {GOAL} times the best of JAX on the round trip is "
    return met + (f"missed: {', '.join(missed)}." if missed else f"met in all {len(trips)} cases.")


def failures(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Peers that a setting could not run; older files do not list them."""
    return entry.get("failed", [])


def failure(row: dict[str, Any]) -> str:
    """One line: the program that could not run, and the beginning of its error."""
    why = " ".join(row["error"].split())[:300]
    return f"{row['name']}, {row['tokens']} tokens, {row['dtype']}, {row['operation']} does not run: {why}"


def describe(document: dict[str, Any]) -> str:
    """The comparison, how each setting ended, and the goal."""
    ends = [[name, entry["ended"], f"{entry['seconds']:.0f}"] for name, entry in document["settings"].items()]
    failed = [f"{name}: {failure(row)}" for name, entry in document["settings"].items() for row in failures(entry)]
    parts = [report.VIRTUAL_DEVICES, ""] if document.get("machine", {}).get("platform") == "cpu" else []
    parts += [report.format_table(COLUMNS, [cells(line) for line in compare(document)]), ""]
    parts += [report.format_table(["setting", "how it ended", "s"], ends), ""]
    parts += failed
    if document["left_out"]:
        parts.append("left out, no time: " + "; ".join(document["left_out"]))
    return "\n".join([*parts, goal_line(document)])
