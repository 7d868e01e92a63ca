"""`autotune`: finds the fastest `KernelConfig` for a problem by measuring it on the machine at hand.

`autotune` returns configs; `save` keeps them in a profile, a JSON file; `load` gives them back. `_profiles` says how
a profile is looked up when a program is lowered.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from xen_moe_jax import _profiles
from xen_moe_jax._config import KernelConfig
from xen_moe_jax._profiles import OPERATIONS, TUNED_FIELDS
from xen_moe_jax.backends import for_platform
from xen_moe_jax.tuning import programs, timing
from xen_moe_jax.tuning.problem import Problem
from xen_moe_jax.tuning.workload import Workload

WITHIN = 1.01
COMPILING = 4
"""Programs that are compiled side by side."""
MOST_SHARED_SMS = 96
"""The most thread blocks of a candidate: a profile is used by default, and must leave thread blocks to XLA's own
collectives."""


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
        """The config to keep: among the configs within a hundredth of the fastest, the config with the fewest thread
        blocks."""
        return choose(self.measured)


def backend_of(base: KernelConfig, platform: str) -> str:
    """Returns the name of the backend that runs `base` on a platform ("cpu", "gpu", "tpu")."""
    return base.backend or for_platform({"gpu": "cuda"}.get(platform, platform))


def check_tunable(base: KernelConfig, platform: str) -> None:
    """Raises ValueError for the reference backend, which runs the same program for every config: the difference
    between two configs would be noise.
    """
    if backend_of(base, platform) == "reference":
        raise ValueError(
            f"nothing to tune on {platform}: the reference backend runs the same program for every KernelConfig; "
            "run autotune on the GPUs or TPUs that will run the model"
        )


def candidates(base: KernelConfig, platform: str, num_tokens: int) -> list[KernelConfig]:
    """Returns the configs worth trying on a platform, `base` first. A config never changes a result, so any candidate
    is a right answer.
    """
    backend = backend_of(base, platform)
    changes: list[dict[str, Any]] = [{}]
    if backend == "cuda":
        few = num_tokens <= 512
        counts = (32, 64, MOST_SHARED_SMS) if few else (24, 32, 48, 64, MOST_SHARED_SMS)
        changes += [{"num_sms": n} for n in counts]
        if few:
            changes += [{"mode": "low_latency"}, *({"mode": "low_latency", "num_sms": n} for n in counts)]
    elif backend == "pallas":
        changes += [{"block_tokens": n} for n in (8, 16, 32, 64, 128, 256) if n <= num_tokens]
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
      progress: a function, called before programs are compiled, and after every repeat with the share that is done.

    Returns:
      operation -> its candidates, fastest first, and the best: among the candidates within a hundredth of the fastest,
      the one with the fewest thread blocks.

    Raises:
      ValueError: an unknown operation, no candidates, a count below 1, or a backend that has nothing to tune.
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
    check_tunable(base, problem.platform)
    progress(f"compiling {len(configs)} configs for {', '.join(operations)}")
    with _profiles.ignored():  # a candidate's unset fields are the defaults, not the fields of an earlier profile
        chosen = [
            (config, program)
            for config in configs
            for program in programs.own_programs(work, problem.caps, config, tuple(operations))
        ]
        with futures.ThreadPoolExecutor(COMPILING) as pool:
            compiled = pool.map(lambda pair: timing.compile_only(pair[1], problem, inner), chosen)
        timed = [(config, start()) for (config, _), start in zip(chosen, compiled, strict=True)]
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


def choose(measured: Sequence[Measured]) -> KernelConfig:
    """Returns the config with the fewest thread blocks among those within a hundredth of the fastest: programs that
    run beside it can use the other thread blocks.
    """
    near = [m.config for m in measured if m.us_median <= measured[0].us_median * WITHIN]
    counted = [config for config in near if config.num_sms is not None]
    return min(counted, key=lambda config: config.num_sms or 0) if counted else near[0]


def save(path: str | pathlib.Path, work: Workload, tuned: dict[str, Tuned]) -> None:
    """Adds the best configs to the profile at `path`, replacing those of the same machine and workload.

    Raises:
      ProfileError: the file exists and is not one of tuned configs.
    """
    path = pathlib.Path(path)
    here = {"machine": _profiles.machine(), "workload": dataclasses.asdict(work)}
    entries = [e for e in (_profiles.read(path) if path.exists() else []) if {k: e[k] for k in here} != here]
    operations = {}
    for operation, found in tuned.items():
        chosen = found.best
        (us,) = [m.us_median for m in found.measured if m.config == chosen]
        operations[operation] = {
            "us_median": round(us, 2),
            "config": {field: getattr(chosen, field) for field in TUNED_FIELDS},
            "us_of_candidates": [
                {"us_median": round(m.us_median, 2), **{f: getattr(m.config, f) for f in TUNED_FIELDS}}
                for m in found.measured
            ],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": _profiles.FORMAT, "entries": [*entries, here | {"operations": operations}]}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load(path: str | pathlib.Path, work: Workload, base: KernelConfig | None = None) -> dict[str, KernelConfig]:
    """Operation -> config saved for this machine and exactly `work`, on top of `base`; empty where nothing was saved
    for `work`.

    Raises:
      FileNotFoundError: there is no such file.
      ProfileError: it is not a file that `save` wrote, or `work` was tuned on another device or with other versions
        only.
    """
    of_work = [e for e in _profiles.read(path) if e["workload"] == dataclasses.asdict(work)]
    here = _profiles.machine()
    for entry in of_work:
        if entry["machine"] == here:
            saved = entry["operations"].items()
            return {name: dataclasses.replace(base or KernelConfig(), **found["config"]) for name, found in saved}
    if of_work:
        reasons = "; ".join(_profiles.differences(entry, here) for entry in of_work)
        raise _profiles.ProfileError(f"{path}: tuned with {reasons}: tune again here")
    return {}
