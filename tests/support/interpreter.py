"""Makes Pallas's interpreter of TPU kernels take two thirds of the time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import api, callback  # noqa: TID251  the library imports nothing of it
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # noqa: TID251
from jax.experimental.pallas import tpu as pltpu

from xen_moe_jax import backends


class _Api:
    """`jax._src.api` for `jax._src.callback`, which needs `device_put` of it: operands stay NumPy arrays.

    They are copies: XLA's own buffers end with the call, and the interpreter keeps some operands for longer.
    """

    def __getattr__(self, name: str):
        return getattr(api, name)

    @staticmethod
    def device_put(operands, device):
        del device
        return [np.array(a) for a in operands]


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Inside this context, the interpreter gets the operands of its callbacks at once.

    It calls back into Python for every load, store, DMA and semaphore, tens of thousands of times in a program. JAX
    puts each operand on a device first, from where the interpreter fetches it: four fifths of a callback's time. The
    interpreter's own work, its clocks and its checks do not change.
    """
    assert callback.api is api, "entered twice, or jax._src.callback no longer has its own name for jax._src.api"
    callback.api = _Api()
    try:
        yield
    finally:
        callback.api = api


@contextlib.contextmanager
def signals_like_libtpu() -> Iterator[None]:
    """Inside this context, a signal that names no core goes to the core of the sender's own number.

    libtpu compiles it so: the bundles of `vsyncadd.remote` and of a remote DMA read the number of the core that they
    run on. The interpreter does the same for DMAs, but sends signals to core 0.
    """
    signal = interpret_pallas_call.semaphore_signal

    def from_own_core(
        token: Any, device: Any, core: Any, semaphore: Any, count: Any, to: Any, to_core: Any, **more: Any
    ):
        return signal(token, device, core, semaphore, count, to, core if to_core is None else to_core, **more)

    interpret_pallas_call.semaphore_signal = from_own_core
    try:
        yield
    finally:
        interpret_pallas_call.semaphore_signal = signal


@contextlib.contextmanager
def of_layers_alone() -> Iterator[None]:
    """Inside this context, programs are compiled with `quick` kernels of experts and whole layers, and with plain JAX
    in the place of the kernels of `dispatch`, `combine` and the other operations.

    The conformance suite holds these kernels and plain JAX to the same bits. A backward pass has half a dozen such
    kernels, and XLA compiles them three times as long as the rest of a layer.
    """
    chosen = backends.for_lowering
    backends.for_lowering = lambda *_: backends.load("reference")
    try:
        with quick():
            yield
    finally:
        backends.for_lowering = chosen


def races_found(result: Any) -> bool:
    """Waits for `result`, and returns True if the interpreter has seen a race in the last kernel of its program, which
    ran with `detect_races=True`."""
    jax.block_until_ready(result)
    return interpret_pallas_call.races.races_found


@contextlib.contextmanager
def clean(capfd: Any) -> Iterator[None]:
    """Runs kernels by `quick`, and fails where the interpreter complains: it only prints that it found a race, or a
    semaphore that is not back at zero when a kernel ends."""
    pltpu.reset_tpu_interpret_mode_state()
    with quick():
        yield
    out, err = capfd.readouterr()
    for complaint in ("RACE DETECTED", "non-zero count"):
        assert complaint not in out + err, (out + err)[-4000:]


WAYS = (("float32", "on_wait"), ("bfloat16", "eager"), ("float32", "eager"), ("bfloat16", "on_wait"))
"""A dtype, and the moment at which the interpreter runs DMAs."""


def in_turn(cases: Iterable[str], ways: int) -> list[Any]:
    """Returns a test's parameters (case, dtype, DMA mode): each case with all of `WAYS`, of which `ways` run in
    `make test` and the others are marked slow. The first way moves on from case to case, so that `make test` runs every
    way with some case."""
    params = []
    for number, name in enumerate(cases):
        for turn in range(len(WAYS)):
            dtype, mode = WAYS[(number * ways + turn) % len(WAYS)]
            marks = [pytest.mark.slow] * (turn >= ways)
            params.append(pytest.param(name, dtype, mode, id=f"{name}-{dtype}-{mode}", marks=marks))
    return params
