"""Tells the host, from inside a compiled program, that a value has been computed; the program goes on meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from xen_moe_jax.transfer import _device
from xen_moe_jax.transfer._checks import optional_deadline
from xen_moe_jax.transfer._errors import TransferRefused, TransferTimeout


class Watcher:
    """Receives ticks. `callback(index, data)` runs in a thread of the runtime, once for each tick, in any order: it
    should start transfers, not wait for them. An exception in it is kept, and raised by `wait`; the program goes on.
    """

    def __init__(self, callback: Callable[[int, Any], object] | None = None):
        self._callback = callback
        self._changed = threading.Condition()
        self._ticks = 0
        self._error: BaseException | None = None

    @property
    def ticks(self) -> int:
        """The number of ticks whose callback has ended."""
        return self._ticks

    def wait(self, ticks: int, timeout: float | None = None) -> None:
        """Returns after `ticks` ticks since this watcher was made. Raises the callback's first exception, or
        `TransferTimeout`.
        """
        deadline = optional_deadline(timeout, "tick")
        with self._changed:
            while self._ticks < ticks and self._error is None:
                remaining = None if deadline is None else deadline - time.monotonic()
                if remaining is not None and remaining <= 0:
                    raise TransferTimeout(f"{self._ticks} of {ticks} ticks after {timeout} s", request="tick")
                self._changed.wait(remaining)
            if self._error is not None:
                raise self._error

    def on_tick(self, index: np.ndarray, data: Any, _: Any) -> None:
        try:
            if self._callback is not None:
                # The runtime takes its buffers back when this returns; a buffer that the callback sends must outlive
                # it.
                with _device.context_kept():
                    self._callback(int(index), jax.tree.map(np.array, data))
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        finally:
            with self._changed:
                self._ticks += 1
                self._changed.notify_all()


def tick(y, watcher: Watcher, index: jax.typing.ArrayLike = 0, data=None):
    """Returns `y` as it is; when it has been computed, `watcher` gets a call, without waiting for the rest of the
    program.

    Args:
        y: pytree of arrays; use the result, or the tick alone remains.
        index: passed to the callback: a layer's number, may be traced.
        data: pytree of arrays that the callback gets as NumPy arrays (one copy to the host), computed by then, too.

    Inside `shard_map` every device ticks. Gradients pass through `y` as if there were no tick, and none through `index`
    and `data`. Raises `TransferRefused` where JAX has no CPU device: it hands `data` over on one, also on GPUs;
    `TypeError` or `ValueError` for a watcher or an index that is none.
    """
    if not isinstance(watcher, Watcher):
        raise TypeError(f"tick: watcher is a {type(watcher).__name__}: must be an xt.Watcher(callback)")
    if jnp.ndim(index):
        raise ValueError(f"tick: index has shape {jnp.shape(index)}: must be a number")
    _check_callbacks()
    y, data = jax.lax.optimization_barrier((y, data))
    done = [leaf[(slice(1),) * leaf.ndim] for leaf in jax.tree.leaves(y)]
    told = jax.lax.stop_gradient((jnp.asarray(index), data, done))  # JAX has no derivative of a callback.
    io_callback(watcher.on_tick, None, *told, ordered=False)
    return y


def _check_callbacks() -> None:
    """Raises while the program is traced: in the middle of its run the error would stop one of several devices, and the
    other devices would wait for it.
    """
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as cause:
        chosen = jax.config.jax_platforms  # type: ignore[attr-defined]
        raise TransferRefused(
            f"tick: JAX has no CPU device for what it hands to the host, with JAX_PLATFORMS={chosen!r}: name the CPU "
            f"behind it, JAX_PLATFORMS={chosen},cpu, or do not set it",
            request="tick",
        ) from cause
