"""The conformance class against the TPU kernels on real chips: whole operations, few tokens, halves, two axes."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.tpu import here as places
from benchmarks.tpu.here import here
from tests.support import conformance
from tests.tpu import chips

NO_FLOAT16 = "float16: the TPU kernels take float32 and bfloat16 (a TypeError says so)"
NO_MXFP4 = "wire='mxfp4': the TPU kernels have none (a ValueError says so)"
ACROSS_SLICES = "an operation on one axis does not leave its slice (a ValueError says so)"


class Chips(conformance.Conformance):
    """Any number of ranks, one for each device of a job.

    Attributes:
      mode: of the config. "throughput" sends each record to the ranks that need it, whatever the number of tokens.
    """

    mode = "throughput"
    hidden = 384  # three blocks of 128: the last word of a record is only partly used
    exact_weighted = False
    num_tokens = 12
    excluded = dict.fromkeys(("grouped-f16", "ranked-f16", "ranked-fp8-f16"), NO_FLOAT16)
    excluded_wires = {"mxfp4": NO_MXFP4}

    @functools.cached_property
    def config(self) -> xm.KernelConfig:  # type: ignore[override]
        return places.config(mode=self.mode)

    @property
    def num_ranks(self) -> int:  # type: ignore[override]
        return here().count

    @property
    def two_axis_sizes(self) -> tuple[int, int] | None:  # type: ignore[override]
        slow = max(2, here().slices)
        return (slow, self.num_ranks // slow) if self.num_ranks % slow == 0 else None

    def mesh(self, count: int = 1) -> jax.sharding.Mesh:
        if count == 1 and here().slices > 1:
            pytest.skip(ACROSS_SLICES)
        names, sizes = self.axes(count)
        return chips.mesh(sizes, names)

    def run(self, body, *stacked: Any, axes: int = 1, key: Any = None) -> Any:
        names, _ = self.axes(axes)
        mesh = self.mesh(axes)
        keyed = body if key is None else conformance._Keyed(body, key)
        arrays = jax.tree.map(np.asarray, stacked)
        return chips.run(conformance._compiled(keyed, mesh, names), mesh, P(names), arrays)


@pytest.mark.tpu1
class TestOneChip(Chips):
    """All but the way to other ranks."""

    num_ranks = 1  # type: ignore[assignment]
    two_axis_sizes = None  # type: ignore[assignment]


@pytest.mark.tpu4
class TestChips(Chips):
    """All devices of the job."""


@pytest.mark.tpu4
class TestFewTokens(Chips):
    """Configs of a decode: small blocks, and, where ranks are no more than slots, records that go to every rank."""

    mode = "auto"


@pytest.mark.tpu4
class TestHalves(Chips):
    """Every dispatch and combine as start and done, which no interpreter runs: on chips for the first time."""

    @pytest.fixture(autouse=True)
    def in_halves(self, monkeypatch):
        monkeypatch.setattr(xm, "dispatch", lambda *a, **k: xm.dispatch_done(xm.dispatch_start(*a, **k)))
        monkeypatch.setattr(xm, "combine", lambda *a, **k: xm.combine_done(xm.combine_start(*a, **k)))

    @functools.cached_property
    def config(self) -> xm.KernelConfig:  # type: ignore[override]
        """Not a config of the classes above: programs are cached by it."""
        return places.config(mode=self.mode, channel=1)
