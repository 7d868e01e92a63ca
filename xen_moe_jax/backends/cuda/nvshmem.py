"""NVSHMEM: `xen_moe_jax._nvshmem` with the host library that it needs, and its start."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import pathlib
import types
from typing import Any

from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import libraries

LIBRARY = "libnvshmem_host.so.3"
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # ranks of one axis are on one NVLink domain
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_DISABLE_NVLS": "1",  # no use is made of multicast
}
"""Defaults of environment variables; the user's own settings win."""


def find() -> pathlib.Path | None:
    """The host library that would be loaded: of NVSHMEM_HOME, or else of the package nvidia-nvshmem-cu13."""
    home = os.environ.get("NVSHMEM_HOME")
    return libraries.library(LIBRARY, [*([pathlib.Path(home)] if home else []), *libraries.folders("nvshmem")])


@functools.cache
def load() -> types.ModuleType:
    """`xen_moe_jax._nvshmem`, with the host library that it needs.

    Raises:
      BackendUnavailable: the module or the library is missing, or the library is of another version.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if (library := find()) is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the module's own reference then resolves by name
    try:
        loaded = importlib.import_module("xen_moe_jax._nvshmem")
    except ImportError as error:
        raise BackendUnavailable(
            f"a mesh axis over several processes needs xen_moe_jax._nvshmem ({error}): pip install nvidia-nvshmem-cu13 "
            "or set NVSHMEM_HOME, and use a wheel that was built with NVSHMEM"
        ) from error
    versions = loaded.versions()
    built, runtime = versions["built"], versions["runtime"]
    if runtime[0] != built[0] or runtime[1] < built[1]:
        raise BackendUnavailable(
            f"xen_moe_jax was built for NVSHMEM {'.'.join(map(str, built))} and found {'.'.join(map(str, runtime))}: "
            f"pip install 'nvidia-nvshmem-cu13=={built[0]}.{built[1]}.*'"
        )
    return loaded


def start(compiled: Any, process: int, count: int, ordinal: int, unique_id: bytes) -> None:
    """Starts NVSHMEM and gives its memory to `compiled`. Collective."""
    nvshmem = load()
    nvshmem.init(process, count, unique_id, ordinal)
    compiled.set_provider(nvshmem.provider())


def unique_id() -> bytes:
    """Returns the id that one process makes for all of them."""
    return bytes(load().unique_id())
