"""One process per GPU: NVSHMEM, agreement and liveness, started through `jax.distributed`'s key-value store."""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import pathlib
import types
from typing import Any

import jax

from xen_moe_jax import _jax_internals
from xen_moe_jax.backends.availability import BackendUnavailable
from xen_moe_jax.backends.cuda import agreement, liveness

LIBRARY = "libnvshmem_host.so.3"
PREFIX = "xen_moe_jax/nvshmem"
WAIT_MS = 120_000
ENVIRONMENT = {
    "NVSHMEM_REMOTE_TRANSPORT": "none",  # ranks of one axis are on one NVLink domain
    "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    "NVSHMEM_DISABLE_NVLS": "1",  # no use is made of multicast
}
"""Defaults; what the user has set stays."""


@functools.cache
def load_nvshmem() -> types.ModuleType:
    """`xen_moe_jax._nvshmem`, with the host library that it needs.

    Raises:
      BackendUnavailable: the module or the library is missing, or the library is of another version.
    """
    spec = importlib.util.find_spec("nvidia")
    roots = [pathlib.Path(root) / "nvshmem" for root in (spec.submodule_search_locations or [])] if spec else []
    home = os.environ.get("NVSHMEM_HOME")
    for root in ([pathlib.Path(home)] if home else []) + roots:
        library = root / "lib" / LIBRARY
        if library.exists():
            ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)  # the module's own reference then resolves by name
            break
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


_started = False


def start_nvshmem(compiled: Any) -> None:
    """Collective: every process of the job must come by, as they do when all lower the same program.

    Raises:
      ValueError: the processes are on several nodes, or own several GPUs each.
      BackendUnavailable: as `load_nvshmem`.
    """
    global _started
    if _started:
        return
    client = _jax_internals.key_value_client()
    if client is None:
        raise ValueError(
            "a mesh axis over several processes needs jax.distributed.initialize() before the first operation"
        )
    if jax.local_device_count() != 1:
        raise ValueError(
            f"this process owns {jax.local_device_count()} GPUs and the expert-parallel axis spans processes: start "
            "one process per GPU (jax.distributed.initialize(..., local_device_ids=[i])), or one process for all"
        )
    process, count = jax.process_index(), jax.process_count()
    _check_one_node(client, process, count)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    nvshmem = load_nvshmem()
    if process == 0:
        client.key_value_set_bytes(f"{PREFIX}/unique_id", bytes(nvshmem.unique_id()))
    unique_id = bytes(client.blocking_key_value_get_bytes(f"{PREFIX}/unique_id", WAIT_MS))
    device = jax.local_devices()[0]
    nvshmem.init(process, count, unique_id, device.local_hardware_id)
    compiled.set_provider(nvshmem.provider())
    watch(compiled, agreement.JaxStore(client), process, count)
    _started = True


def watch(compiled: Any, store: agreement.Store, process: int, count: int) -> liveness.Watcher:
    """From now on the processes agree through `store`, and a death fails the groups that the dead process was in."""
    watcher = liveness.Watcher(store, process, count, compiled.mark_dead)
    compiled.set_agreement(agreement.Agreement(store, process, count, watcher.dead))
    return watcher


def _check_one_node(client: Any, process: int, count: int) -> None:
    client.key_value_set_bytes(f"{PREFIX}/node/{process}", _node().encode())
    nodes = [bytes(client.blocking_key_value_get_bytes(f"{PREFIX}/node/{p}", WAIT_MS)).decode() for p in range(count)]
    if len(set(nodes)) > 1:
        raise ValueError(
            f"the processes are on {len(set(nodes))} nodes: the CUDA backend reaches the ranks of an axis over NVLink. "
            "Put the expert-parallel axis inside a node and data parallelism across nodes, or use "
            "KernelConfig(backend='reference')"
        )


def _node() -> str:
    """A name that two processes share exactly when they run on one booted kernel."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
