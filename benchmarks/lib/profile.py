"""Every kernel of a program by the profiler."""

from __future__ import annotations

import collections
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax


def kernels(call: Callable[[], Any], calls: int = 3) -> dict[str, float]:
    """Returns the time of each kernel of a call on the first GPU in us, the longest first, behind the time from the
    first kernel's start to the last one's end, and the number of kernels.

    Args:
      call: returns arrays that are ready when the call has run.
      calls: how many are profiled: the figures are their mean.
    """
    found: collections.Counter[str] = collections.Counter()
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        file = next(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = [p for p in jax.profiler.ProfileData.from_file(str(file)).planes if "GPU:" in p.name]
        for line in min(planes, key=lambda plane: plane.name).lines:
            for event in line.events if "Stream" in line.name else ():
                found[event.name.split("<")[0]] += event.duration_ns / 1e3 / calls
                ends += [event.start_ns, event.start_ns + event.duration_ns]
    whole = {
        "from the first to the last": round((max(ends) - min(ends)) / 1e3 / calls, 1),
        "kernels": len(ends) / 2 / calls,
    }
    return whole | {name: round(us, 1) for name, us in found.most_common()}
