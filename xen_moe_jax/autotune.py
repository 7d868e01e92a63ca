"""Finding the fastest `KernelConfig` for given shapes by measuring it on the machine at hand.

Nothing is looked up behind a caller's back: `autotune` returns configs, `save` and `load` move them through a JSON
file that the caller names, and an operation runs with the config that it is given.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from xen_moe_jax._config import KernelConfig
from xen_moe_jax.backends import for_platform
from xen_moe_jax.benchmark import modes, programs, timing
from xen_moe_jax.benchmark.workload import Workload

OPERATIONS = ("dispatch", "combine")
TUNED_FIELDS = ("mode", "num_sms", "chunk_tokens", "block_tokens")
"""Fields of `KernelConfig` that candidates vary, and that a saved result holds; the others stay the caller's."""


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
    work: Workload,
    *,
    mesh: Mesh | None = None,
    base: KernelConfig | None = None,
    configs: Sequence[KernelConfig] | None = None,
    operations: Sequence[str] = OPERATIONS,
    inner: int = 20,
    repeats: int = 5,
) -> dict[str, Tuned]:
    """Measures candidate configs for `work`; call it outside `jit`, before training or serving starts.

    Args:
      work: shapes, dtypes, layout and routing skew to tune for.
      mesh: one axis named "ep" with `work.ranks` devices; None takes the first devices.
      base: fields that are not tuned (backend, channel, timeout...).
      configs: candidates; None takes `candidates(...)` for the platform.
      operations: "dispatch", "combine".
      inner: dependent calls inside one compiled program.
      repeats: timed repeats, interleaved over the candidates.

    Returns:
      operation -> its candidates, fastest first.

    Raises:
      ValueError: an unknown operation, no candidates, or more ranks than devices.
    """
    unknown = set(operations) - set(OPERATIONS)
    if unknown or not operations:
        raise ValueError(f"operations={tuple(operations)}: must be some of {OPERATIONS}")
    base = base or KernelConfig()
    problem = modes.make_problem(work, mesh)
    if configs is None:
        configs = candidates(base, problem.platform, work.tokens)
    if not configs:
        raise ValueError("configs=[]: there must be at least one candidate")
    timed = [
        (config, timing.compile_program(program, problem.mesh, problem.inputs, inner))
        for config in configs
        for program in programs.own_programs(work, problem.caps, config, tuple(operations))
    ]
    timing.measure([entry for _, entry in timed], repeats)
    tuned = {}
    for operation in operations:
        measured = [
            Measured(config, entry.median, min(entry.microseconds), max(entry.microseconds))
            for config, entry in timed
            if entry.program.operation == operation
        ]
        tuned[operation] = Tuned(operation, tuple(sorted(measured, key=lambda m: m.us_median)))
    return tuned


def key(work: Workload) -> str:
    """What a saved result is valid for: the device and the workload."""
    device = jax.devices()[0]
    return json.dumps({"device": device.device_kind, **dataclasses.asdict(work)}, sort_keys=True)


def save(path: str | pathlib.Path, work: Workload, tuned: dict[str, Tuned]) -> None:
    """Adds the best configs to the JSON file at `path`, replacing those of the same device and workload."""
    path = pathlib.Path(path)
    entries = json.loads(path.read_text()) if path.exists() else {}
    entries[key(work)] = {
        operation: {"us_median": t.measured[0].us_median, "config": {f: getattr(t.best, f) for f in TUNED_FIELDS}}
        for operation, t in tuned.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


def load(path: str | pathlib.Path, work: Workload, base: KernelConfig | None = None) -> dict[str, KernelConfig]:
    """Operation -> config saved for this device and `work`, on top of `base`; empty where nothing was saved.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is not a file that `save` wrote.
    """
    try:
        entry = json.loads(pathlib.Path(path).read_text()).get(key(work), {})
        return {name: dataclasses.replace(base or KernelConfig(), **saved["config"]) for name, saved in entry.items()}
    except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: not a file of tuned configs ({error}); make it with autotune.save") from error
