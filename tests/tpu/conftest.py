"""Skips tests that need more TPUs than JAX sees, by the marks tpu1 to tpu8; the reason gives both numbers.

Run with `JAX_PLATFORMS=tpu python -m pytest tests/tpu`, or `python tools/tpu_check.py OUT`, which gives every part a
time limit. `benchmarks.tpu.here` says what else the tests can run on.
"""

from __future__ import annotations

import os
import pathlib

import pytest

from benchmarks.tpu import here as places
from benchmarks.tpu import watch
from tests.support import interpreter

MARKS = {"tpu1": 1, "tpu4": 4, "tpu8": 8}

if any(os.environ.get(name) for name in (places.REHEARSE, places.COMPILE_FOR, places.COORDINATOR, watch.FILE)):
    places.join()
    watch.install()  # elsewhere other tests share the process: its kernels are left alone


def pytest_collection_modifyitems(items):
    folder = pathlib.Path(__file__).parent
    for item in items:
        if folder not in pathlib.Path(item.path).parents:
            continue
        here = places.here()
        for mark, need in MARKS.items():
            if item.get_closest_marker(mark) and (here.kind == "none" or here.count < need):
                found = f"JAX sees {here.count} {here.devices[0].platform} device(s)"
                item.add_marker(pytest.mark.skip(reason=f"needs {need} TPU device(s) of one job; {found}"))


@pytest.fixture(autouse=True)
def interpreted_quickly():
    """The interpreter of kernels, where it is used, in two thirds of its time."""
    if not places.here().interpreted:
        yield
        return
    from jax.experimental.pallas import tpu as pltpu

    pltpu.reset_tpu_interpret_mode_state()
    with interpreter.quick():
        yield
