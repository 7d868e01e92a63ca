"""Finding the fastest `KernelConfig` for a problem by measuring it on the machine at hand.

Nothing is looked up behind a caller's back: `autotune` returns configs, `save` and `load` move them through a JSON
file that the caller names, and an operation runs with the config that it is given.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends import for_platform
from xen_moe_jax.benchmark import programs, timing
from xen_moe_jax.benchmark.problem import Problem
from xen_moe_jax.benchmark.workload import Workload

OPERATIONS = ("dispatch", "combine")
TUNED_FIELDS = ("mode", "num_sms", "chunk_tokens", "block_tokens")
"""Fields of `KernelConfig` that candidates vary, and that a saved result holds; the others stay the caller's."""
FORMAT = "xen_moe_jax tuned configs 1"


@dataclasses.dataclass(frozen=True)
class Measured:
    """A candidate and its time: median microseconds per call on the slowest rank, and the extremes over the repeats."""

    config: KernelConfig
    us_median: float
    us_min: float
    us_max: float


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Candidates of one operation, fastest first."""

    operation: str
    measured: tuple[Measured, ...]

    @property
    def best(self) -> KernelConfig:
        return self.measured[0].config


def candidates(base: KernelConfig, platform: str, num_tokens: int) -> list[KernelConfig]:
    """What is worth trying on a platform, the defaults first. Meaning never changes, so any candidate is a right
    answer.
    """
    backend = base.backend or for_platform({"gpu": "cuda"}.get(platform, platform))
    changes: list[dict[str, Any]] = [{}]
    if backend == "cuda":
        changes += [{"num_sms": n} for n in (8, 16, 24, 32, 48, 64, 96, 132)]
        changes += [{"mode": mode} for mode in ("throughput", "low_latency")]
    elif backend == "pallas":
        changes += [{"block_tokens": n} for n in (8, 16, 32, 64, 128, 256) if n <= num_tokens]
    else:
        changes += [{"chunk_tokens": max(1, -(-num_tokens // rounds))} for rounds in (1, 2, 4, 8, 16)]
    return list(dict.fromkeys(dataclasses.replace(base, **change) for change in changes))


def autotune(
    problem: Problem,
    *,
    base: KernelConfig | None = None,
    configs: Sequence[KernelConfig] | None = None,
    operations: Sequence[str] = OPERATIONS,
    inner: int = 20,
    repeats: int = 5,
    progress: Callable[[str], None] = lambda line: None,
) -> dict[str, Tuned]:
    """Measures candidate configs for `problem`; call it outside `jit`, before training or serving starts.

    Args:
      problem: `make_problem(Workload(...))`: shapes, dtypes, layout and routing skew, on a mesh.
      base: fields that are not tuned (backend, channel, timeout...).
      configs: candidates; None takes `candidates(...)` for the platform.
      operations: "dispatch", "combine".
      inner: dependent calls inside one compiled program, at least 1.
      repeats: timed repeats, interleaved over the candidates, at least 1.
      progress: is told after every repeat how far it is.

    Returns:
      operation -> its candidates, fastest first.

    Raises:
      ValueError: an unknown operation, no candidates, or a count below 1.
    """
    unknown = set(operations) - set(OPERATIONS)
    if unknown or not operations:
        raise ValueError(f"operations={tuple(operations)}: must be some of {OPERATIONS}")
    for name, count in (("inner", inner), ("repeats", repeats)):
        if count < 1:
            raise ValueError(f"{name}={count}: must be at least 1")
    base = base or KernelConfig()
    work = problem.work
    if configs is None:
        configs = candidates(base, problem.platform, work.tokens)
    if not configs:
        raise ValueError("configs=[]: there must be at least one candidate")
    timed = [
        (config, timing.compile_program(program, problem, inner))
        for config in configs
        for program in programs.own_programs(work, problem.caps, config, tuple(operations))
    ]
    timing.measure([entry for _, entry in timed], repeats, progress=progress)
    tuned = {}
    for operation in operations:
        measured = [
            Measured(config, entry.median, min(entry.microseconds), max(entry.microseconds))
            for config, entry in timed
            if entry.program.operation == operation
        ]
        tuned[operation] = Tuned(operation, tuple(sorted(measured, key=lambda m: m.us_median)))
    return tuned


def machine() -> dict[str, str]:
    """What a saved result is valid for, beside the workload: the device and the versions that made its programs."""
    return {
        "device": jax.devices()[0].device_kind,
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
    }


def read(path: str | pathlib.Path) -> list[dict[str, Any]]:
    """The entries of a file that `save` wrote: machine, workload, and per operation a config and its time.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is something else, or damaged.
    """
    try:
        content = json.loads(pathlib.Path(path).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']!r}, not {FORMAT!r}")
        for entry in content["entries"]:
            if set(entry) != {"machine", "workload", "operations"}:
                raise ValueError(f"an entry has the fields {sorted(entry)}")
            for operation, saved in entry["operations"].items():
                if operation not in OPERATIONS or set(saved["config"]) != set(TUNED_FIELDS):
                    raise ValueError(f"an entry for {operation!r} has the fields {sorted(saved['config'])}")
                KernelConfig(**saved["config"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: not a file of tuned configs ({error}); make it with autotune.save") from error
    return content["entries"]


def save(path: str | pathlib.Path, work: Workload, tuned: dict[str, Tuned]) -> None:
    """Adds the best configs to the JSON file at `path`, replacing those of the same machine and workload.

    Raises:
      ValueError: the file exists and is not one of tuned configs.
    """
    path = pathlib.Path(path)
    here = {"machine": machine(), "workload": dataclasses.asdict(work)}
    entries = [e for e in (read(path) if path.exists() else []) if {k: e[k] for k in here} != here]
    operations = {
        operation: {"us_median": t.measured[0].us_median, "config": {f: getattr(t.best, f) for f in TUNED_FIELDS}}
        for operation, t in tuned.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "entries": [*entries, here | {"operations": operations}]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: str | pathlib.Path, work: Workload, base: KernelConfig | None = None) -> dict[str, KernelConfig]:
    """Operation -> config saved for this machine and `work`, on top of `base`; empty where nothing was saved for
    `work`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a file that `save` wrote, or `work` was tuned on another device or with another jax only.
    """
    of_work = [e for e in read(path) if e["workload"] == dataclasses.asdict(work)]
    here = machine()
    for entry in of_work:
        if entry["machine"] == here:
            saved = entry["operations"].items()
            return {name: dataclasses.replace(base or KernelConfig(), **found["config"]) for name, found in saved}
    if of_work:
        elsewhere = "; ".join(", ".join(f"{k} {v}" for k, v in e["machine"].items()) for e in of_work)
        raise ValueError(
            f"{path}: tuned with {elsewhere}; this is {', '.join(f'{k} {v}' for k, v in here.items())}: tune again here"
        )
    return {}
