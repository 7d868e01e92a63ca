"""One process per GPU: memory between processes (NVSHMEM or NCCL), agreement and liveness, all started through
`jax.distributed`'s key-value store.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax

from xen_moe_jax import _jax_internals
from xen_moe_jax.backends.availability import BackendUnavailable
from xen_moe_jax.backends.cuda import agreement, liveness, nccl, nvshmem

PREFIX = "xen_moe_jax/processes"
WAIT_MS = 120_000
MEMORY = "XEN_MOE_MEMORY"
"""Environment: "nvshmem" (the default) or "nccl", the same in all."""
CHOICES = ("nvshmem", "nccl")
OTHER = f"or set {MEMORY}=nccl in every process, which takes NCCL 2.31 or later and has not been shown to work on GPUs"

_started = False
_failed: Exception | None = None


def start(compiled: Any) -> None:
    """Collective: every process of the job must come by, as they do when all lower the same program.

    Raises:
      ValueError: the processes are on several nodes, own several GPUs each, or ask for different memory.
      BackendUnavailable: the library that `XEN_MOE_MEMORY` asks for will not do.
    """
    global _started, _failed
    if _started:
        return
    if _failed is not None:  # a second attempt would meet what the first has left in the store
        raise _failed
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
    ordinal = jax.local_devices()[0].local_hardware_id
    try:
        start_memory(compiled, client, jax.process_index(), jax.process_count(), ordinal)
    except Exception as error:
        _failed = error
        raise
    _started = True


def start_memory(compiled: Any, client: Any, process: int, count: int, ordinal: int) -> liveness.Watcher:
    """`start` with a client of the job's key-value store, for GPU `ordinal` of process `process`."""
    provider = choose(compiled, client, process, count)
    id_key = f"{PREFIX}/{provider}/unique_id"
    if process == 0:
        new = nvshmem.unique_id() if provider == "nvshmem" else compiled.nccl_unique_id()
        client.key_value_set_bytes(id_key, bytes(new))
    unique_id = bytes(client.blocking_key_value_get_bytes(id_key, WAIT_MS))
    store = agreement.JaxStore(client)
    if provider == "nvshmem":
        nvshmem.start(compiled, process, count, ordinal, unique_id)
        return watch(compiled, store, process, count)
    watcher = watch(compiled, store, process, count)
    nccl.start(compiled, process, count, ordinal, unique_id, WAIT_MS / 1000)
    return watcher


def watch(compiled: Any, store: agreement.Store, process: int, count: int) -> liveness.Watcher:
    """From now on the processes agree through `store`, and a death fails the groups that the dead process was in."""
    watcher = liveness.Watcher(store, process, count, compiled.mark_dead)
    compiled.set_agreement(agreement.Agreement(store, process, count, watcher.dead))
    return watcher


def choose(compiled: Any, client: Any, process: int, count: int) -> str:
    """ "nvshmem" or "nccl", the same in every process: each says what it can use, and all decide by what all said."""
    asked = os.environ.get(MEMORY, CHOICES[0]).lower()
    mine = {"node": _node(), "asked": asked, "lacks": _lacks(compiled, asked)}
    client.key_value_set_bytes(f"{PREFIX}/asked/{process}", json.dumps(mine).encode())
    said = [
        json.loads(bytes(client.blocking_key_value_get_bytes(f"{PREFIX}/asked/{p}", WAIT_MS))) for p in range(count)
    ]
    return decide(said)


def decide(said: list[dict[str, Any]]) -> str:
    """What all processes use, from what each has said: its `node`; what it was `asked` to use; and what it `lacks` for
    that, "" for nothing.

    Raises:
      ValueError, BackendUnavailable: as `start`, in all processes alike.
    """
    nodes = {one["node"] for one in said}
    if len(nodes) > 1:
        raise ValueError(
            f"the processes are on {len(nodes)} nodes: the CUDA backend reaches the ranks of an axis over NVLink. "
            "Put the expert-parallel axis inside a node and data parallelism across nodes, or use "
            "KernelConfig(backend='reference')"
        )
    for p, one in enumerate(said):
        if one["asked"] not in CHOICES:
            raise ValueError(f"{MEMORY}={one['asked']!r} in process {p}: must be one of {', '.join(CHOICES)}")
        if one["asked"] != said[0]["asked"]:
            raise ValueError(
                f"{MEMORY} is {said[0]['asked']!r} in process 0 and {one['asked']!r} in process {p}: all processes of "
                "a job share one kind of memory; set it to the same in all of them"
            )
    for p, one in enumerate(said):
        if one["lacks"]:
            why = one["lacks"] + (f"; {OTHER}" if one["asked"] == "nvshmem" else "")
            raise BackendUnavailable(f"process {p} has no memory that processes can share: {why}")
    return said[0]["asked"]


def _lacks(compiled: Any, asked: str) -> str:
    """Why this process cannot use what it was asked to, "" if it can."""
    try:
        if asked == "nvshmem":
            nvshmem.load()
        elif asked == "nccl":
            nccl.load(compiled)
    except BackendUnavailable as error:
        return str(error)
    return ""


def _node() -> str:
    """A name that two processes share exactly when they run on one booted kernel."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return os.uname().nodename
