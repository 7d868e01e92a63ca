"""The conformance class against the TPU kernels in interpret mode, with race detection.

Not collected by name: `test_tpu_interpret.py` runs it in a process of its own, because a kernel that deadlocks never
returns.
"""

from __future__ import annotations

import conformance
import pytest
from jax.experimental.pallas import tpu as pltpu

import xen_moe_jax as xm

NO_FLOAT16 = "float16: the TPU kernels take float32 and bfloat16 (a TypeError says so)"


@pytest.fixture(autouse=True)
def kernels_are_clean(capfd):
    """Interpret mode only prints what it finds: a race, or a semaphore that is not back at zero when a kernel ends."""
    pltpu.reset_tpu_interpret_mode_state()
    yield
    out, err = capfd.readouterr()
    for complaint in ("RACE DETECTED", "non-zero count"):
        assert complaint not in out + err, (out + err)[-4000:]


def config(mode: str) -> xm.KernelConfig:
    params = pltpu.InterpretParams(dma_execution_mode=mode, detect_races=True)
    return xm.KernelConfig(backend="pallas", interpret=params)


class Pallas(conformance.Conformance):
    """Four ranks: more than slots in some cases (packed staging of a combine), fewer in others."""

    num_ranks = 4
    two_axis_sizes = (2, 2)
    num_tokens = 6
    hidden = 384  # three blocks of 128: the last word of a record is only partly used
    odd_hidden = 200
    excluded = dict.fromkeys(("grouped-f16", "ranked-f16", "ranked-fp8-f16"), NO_FLOAT16)


class TestOnWait(Pallas):
    config = config("on_wait")


class TestEager(Pallas):
    config = config("eager")


class TestEightRanks(Pallas):
    config = config("on_wait")
    num_ranks = 8
    two_axis_sizes = (2, 4)
