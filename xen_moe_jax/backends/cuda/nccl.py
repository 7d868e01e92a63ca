"""NCCL as memory between processes: finds the library and starts it. ffi/nccl_memory.cc makes the memory."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from typing import Any

from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import libraries

LIBRARY = "libnccl.so.2"
OLDEST = (2, 31)
"""The first version whose communicators can be told to leave NVLink's multicast alone; the host can ask for peers'
pointers since 2.29."""
REMEDY = (
    f"pip install 'nvidia-nccl-cu13>={OLDEST[0]}.{OLDEST[1]}', or set NCCL_HOME to a folder that has lib/{LIBRARY} of "
    "such a version; JAX's own NCCL may stay what it is"
)

PUTS_SINCE = (2, 32)
"""The first version with the device interface that cuda_kernels/node/nccl_transport.cuh is compiled for."""
BUILD = (
    f"build it again in a checkout with nvidia-nccl-cu13 {PUTS_SINCE[0]}.{PUTS_SINCE[1]} or later there, or NCCL_HOME "
    "set (docs/design/nodes.md)"
)
_SMALLEST_QUEUE = 32
"""`kMostPuts` of that file: NCCL would wait without a limit in a queue with less room."""


def find() -> pathlib.Path | None:
    """The library that would be loaded: of NCCL_HOME where it is set, else of the package nvidia-nccl-cu13."""
    home = os.environ.get("NCCL_HOME")
    if home:
        return pathlib.Path(home) / "lib" / LIBRARY
    return libraries.library(LIBRARY, libraries.folders("nccl"))


def version(path: pathlib.Path) -> tuple[int, int, int]:
    """The version that the library reports.

    Raises:
      BackendUnavailable: it is missing, cannot be loaded, or is not NCCL.
    """
    try:
        library = ctypes.CDLL(str(path))  # RTLD_LOCAL: JAX has an NCCL of its own
        number = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(number)) != 0:
            raise OSError(f"{path}: ncclGetVersion failed")
    except (OSError, AttributeError) as error:
        raise BackendUnavailable(f"NCCL cannot be loaded ({error}): {REMEDY}") from error
    return parts(number.value)


def parts(number: int) -> tuple[int, int, int]:
    """A version as NCCL writes it in one number."""
    return number // 10_000, number // 100 % 100, number % 100


@functools.cache
def usable() -> tuple[pathlib.Path, tuple[int, int, int]]:
    """The library and its version, once it is known to be new enough.

    Raises:
      BackendUnavailable: there is no library, or none that is new enough.
    """
    path = find()
    if path is None:
        raise BackendUnavailable(f"NCCL was not found: {REMEDY}")
    found = version(path)
    if found < OLDEST:
        raise BackendUnavailable(f"NCCL {'.'.join(map(str, found))} in {path} is too old: {REMEDY}")
    return path, found


def load(compiled: Any) -> None:
    """Opens it in the compiled module.

    Raises:
      BackendUnavailable: as `usable`, or the library lacks a function.
    """
    path, _ = usable()
    try:
        compiled.nccl_load(str(path))
    except RuntimeError as error:
        raise BackendUnavailable(f"{error}. {REMEDY}") from error


def check_puts(compiled: Any) -> None:
    """Checks that NCCL can put to other nodes from a kernel.

    Raises:
      BackendUnavailable: the compiled module has no kernels that put to other nodes, or the library is older than they.
    """
    headers = getattr(compiled, "nccl_headers", 0)
    if not headers:
        raise BackendUnavailable(f"xen_moe_jax._cuda was built without NCCL's headers: {BUILD}")
    path, found = usable()
    if found < (needed := max(PUTS_SINCE, parts(headers)[:2])):
        wanted = ".".join(map(str, needed))
        raise BackendUnavailable(
            f"NCCL {'.'.join(map(str, found))} in {path}: between nodes the kernels need {wanted} or later: "
            f"pip install 'nvidia-nccl-cu13>={wanted}', or set NCCL_HOME to such a one"
        )


_started = False


def started() -> bool:
    """True if this process has memory from NCCL."""
    return _started


def start(compiled: Any, process: int, count: int, ordinal: int, unique_id: bytes, seconds: float) -> None:
    """Starts NCCL and gives its memory to `compiled`. Collective, within `seconds`.

    Raises:
      RuntimeError: NCCL did not start; the error says why.
    """
    global _started
    compiled.set_provider(compiled.nccl_provider())  # first, so that a death ends the wait below
    compiled.nccl_start(ordinal, process, count, unique_id, seconds)
    _started = True


def hindrances() -> list[str]:
    """Variables of the environment with which NCCL has no windows, or no puts from kernels to other nodes."""
    found = [f"{name}=0" for name in ("NCCL_CUMEM_ENABLE", "NCCL_GIN_ENABLE") if os.environ.get(name) == "0"]
    queue = os.environ.get("NCCL_GIN_PROXY_QUEUE_SIZE", "")
    if queue.isdigit() and 0 < int(queue) < _SMALLEST_QUEUE:
        found.append(f"NCCL_GIN_PROXY_QUEUE_SIZE={queue} (at least {_SMALLEST_QUEUE})")
    return found
