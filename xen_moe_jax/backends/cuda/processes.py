"""One process per GPU: memory between processes (NVSHMEM or NCCL), agreement and liveness, all started through
`jax.distributed`'s key-value store.
"""

from __future__ import annotations

import json
import os
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from xen_moe_jax import _jax_internals
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.backends.cuda import agreement, liveness, nccl, nvshmem

PREFIX = "xen_moe_jax/processes"
WAIT_MS = 120_000
MEMORY = "XEN_MOE_MEMORY"
"""Environment: "nvshmem" or "nccl", the same in all. Unset: "nvshmem" on one node, "nccl" on several."""
CHOICES = ("nvshmem", "nccl")
OTHER = f"or set {MEMORY}=nccl in every process, which takes NCCL 2.31 or later"

_starting = threading.Lock()
_started = False
_failed: Exception | None = None
_domain = 0
"""Processes that share NVLink with this one, itself included; 0: all of them, or nothing has been started."""


def start(compiled: Any) -> None:
    """Starts memory between the processes. Collective: every process of the job must call this; lowering the same
    program in all processes is enough.

    Raises:
      ValueError: the processes own several GPUs each, or ask for different memory, or for one that cannot cross nodes.
      BackendUnavailable: the library that `XEN_MOE_MEMORY` asks for will not do.
    """
    with _starting:  # programs may be loaded by several threads
        _start_once(compiled)


def started_by_a_group() -> None:
    """Memory between processes is an `elastic.Group`'s: `start` has nothing to do."""
    global _started
    with _starting:
        _started = True


def _start_once(compiled: Any) -> None:
    global _started, _failed, _domain
    if _started:
        return
    if _failed is not None:  # a second attempt would meet the keys that the first has left in the store
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
        _domain = compiled.nccl_ranks_per_node() if nccl.started() else 0
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
    """Makes the processes agree through `store` from now on; a death fails the groups that the dead process was in."""
    watcher = liveness.Watcher(store, process, count, compiled.mark_dead)
    compiled.set_agreement(agreement.Agreement(store, process, count, watcher.dead))
    return watcher


def choose(compiled: Any, client: Any, process: int, count: int) -> str:
    """Returns "nvshmem" or "nccl", the same in every process. Each process publishes its node, the provider that its
    environment asks for, and the parts missing for it; all processes decide from the same entries."""
    asked = os.environ.get(MEMORY, "").lower()
    entries = _publish(client, process, count, "asked", {"node": _node(), "asked": asked})
    provider, several = decide(entries), _nodes(entries) > 1
    lacks = _publish(client, process, count, "lacks", _lacks(compiled, provider, several))
    for p, why in enumerate(lacks):
        if why:
            other = f"; {OTHER}" if provider == "nvshmem" else ""
            raise BackendUnavailable(f"process {p} has no memory that processes can share: {why}{other}")
    return provider


def decide(entries: list[dict[str, Any]]) -> str:
    """Returns the provider that all processes use. Each entry has a process's `node` and the provider that
    its environment `asked` for, "" for none.

    Raises:
      ValueError: as `start`, in all processes alike.
    """
    for p, entry in enumerate(entries):
        if entry["asked"] and entry["asked"] not in CHOICES:
            raise ValueError(f"{MEMORY}={entry['asked']!r} in process {p}: must be one of {', '.join(CHOICES)}")
        if entry["asked"] != entries[0]["asked"]:
            raise ValueError(
                f"{MEMORY} is {entries[0]['asked']!r} in process 0 and {entry['asked']!r} in process {p}: all "
                "processes of a job share one kind of memory; set it to the same in all of them"
            )
    asked, nodes = entries[0]["asked"], _nodes(entries)
    if nodes > 1 and asked == "nvshmem":
        raise ValueError(
            f"the processes are on {nodes} nodes and {MEMORY}=nvshmem, which reaches the ranks of an axis over NVLink "
            f"alone: unset it or set {MEMORY}=nccl, put the expert-parallel axis inside a node and data parallelism "
            "across nodes, or use KernelConfig(backend='reference')"
        )
    return asked or ("nccl" if nodes > 1 else "nvshmem")


def _nodes(entries: list[dict[str, Any]]) -> int:
    return len({entry["node"] for entry in entries})


def _publish(client: Any, process: int, count: int, about: str, mine: Any) -> list[Any]:
    """Publishes `mine` under the name `about` and returns the entries of all processes, by process."""
    client.key_value_set_bytes(f"{PREFIX}/{about}/{process}", json.dumps(mine).encode())
    keys = (f"{PREFIX}/{about}/{p}" for p in range(count))
    return [json.loads(bytes(client.blocking_key_value_get_bytes(key, WAIT_MS))) for key in keys]


def _lacks(compiled: Any, provider: str, several: bool) -> str:
    """Returns the reason why this process cannot use `provider`, on `several` nodes or on one; "" if it can."""
    try:
        if provider == "nvshmem":
            nvshmem.load()
        else:
            nccl.load(compiled)
            if several:
                nccl.check_puts(compiled)
    except BackendUnavailable as error:
        return str(error)
    return ""


def _node() -> str:
    """A name that two processes share exactly when NCCL takes them to be on one host: one booted kernel, and of one
    virtual node."""
    try:
        host = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        host = os.uname().nodename
    return f"{host} {os.environ.get('NCCL_HOSTID', '')}".strip()


def ranks_per_node(compiled: Callable[[], Any], num_ranks: int) -> int | None:
    """Number of consecutive ranks of an axis that share NVLink, as the provider of memory has found. None where all
    ranks do, and where the job is not several processes with a GPU each. Starts memory between them; collective, as
    `start`.

    Raises:
      ValueError: this number does not divide the ranks of the axis. As `start`.
    """
    if num_ranks == 1 or _jax_internals.key_value_client() is None or jax.default_backend() != "gpu":
        return None
    if jax.process_count() == 1 or jax.local_device_count() != 1:
        return None
    start(compiled())
    if _domain == 0 or _domain >= num_ranks:
        return None
    if num_ranks % _domain:
        raise ValueError(
            f"an axis of {num_ranks} ranks over nodes of {_domain}: every node must have as many ranks of the axis; "
            "pass KernelConfig.ranks_per_node, with ranks numbered node by node"
        )
    return _domain


def check_neighbours(processes: np.ndarray, per_node: int, between_nodes: bool = True) -> None:
    """Checks that neighbours share NVLink: the kernels store into the memory of a neighbour through a pointer.

    Args:
      processes: int64 `[groups, ranks]`, the process of each rank of an operation's groups.
      per_node: number of consecutive ranks that are neighbours. It divides the ranks.
      between_nodes: whether `KernelConfig.ranks_per_node` lets the operation run on several nodes.

    Raises:
      ValueError: two neighbours are on different nodes.
    """
    if _domain == 0:
        return
    nodes, ranks = processes // _domain, processes.shape[1]

    def strangers(count: int) -> np.ndarray:
        """Returns bool `[groups, ranks]`: True where a rank is on another node than the first of its neighbours."""
        blocks = nodes.reshape(len(nodes), -1, count)
        return (blocks != blocks[..., :1]).reshape(nodes.shape)

    wrong = np.argwhere(strangers(per_node))
    if not len(wrong):
        return
    group, rank = wrong[0].tolist()
    first = rank // per_node * per_node
    fitting = max(n for n in range(1, ranks + 1) if ranks % n == 0 and not strangers(n).any())
    otherwise = (
        f"pass one axis and KernelConfig(ranks_per_node={fitting})"
        if between_nodes
        else "use KernelConfig(backend='reference'), which is XLA's"
    )
    raise ValueError(
        f"ranks {first} and {rank} of a group are processes {processes[group, first]} and {processes[group, rank]}, on "
        f"different nodes of {_domain} processes, and an operation takes each {per_node} consecutive ranks as "
        f"neighbours: order the mesh's devices and axes so that they are processes of one node, or {otherwise}"
    )
