"""The jobs of writes: which runs of which source go where, checked before anything is written."""

from __future__ import annotations

from typing import Any

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._connection import Grant
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused
from xen_moe_jax.transfer._layout import Pages, leaves_by_path
from xen_moe_jax.transfer._remote import MAX_TEMPLATES, RemoteArray, RemoteTree, check_pages, pages_key
from xen_moe_jax.transfer._repeat import Repeat
from xen_moe_jax.transfer._transfer import Job, Runs


def write_job(
    core: Core, src: Any, target: RemoteArray | RemoteTree, pages: Any, request: str, timeout: float
) -> tuple[Job, list[object]]:
    """Returns the job of one write of `src`, an array or a tree like the target, and the sources to keep alive."""
    targets = {"": target} if isinstance(target, RemoteArray) else target.arrays
    given = {"": src} if isinstance(target, RemoteArray) else leaves_by_path(src)
    if given.keys() != targets.keys():
        raise TransferRefused(
            f"{request}: the source has {sorted(given)}, the target {sorted(targets)}", request=request
        )
    parts = [(path or "the source", array, targets[path]) for path, array in given.items()]
    if not parts:
        raise TransferRefused(f"{request}: there are no arrays to write", request=request)
    for label, array, _ in parts:
        _memory.check_array(array, f"{request}: {label}")
    checked = None if pages is None else check_pages(pages, parts, request)
    return parts_job(core, parts, checked, request, timeout)


def parts_job(
    core: Core, parts: list[tuple[str, Any, RemoteArray]], pages: Pages | None, request: str, timeout: float
) -> tuple[Job, list[object]]:
    """Returns one job for a list of (label, array, target) in one generation of one window, and its sources."""
    for label, array, target in parts:
        shape, wanted = array.shape, target.shape
        if pages is not None:
            shape, wanted = shape[1:], wanted[1:]
        if array.dtype != target.dtype or shape != wanted:
            dtype = _memory.check_dtype(array.dtype, f"{request}: {label}")
            raise TransferRefused(
                f"{request}: {label} is {dtype}{list(array.shape)}, the target {target!r}"
                f"{' (pages of equal shape)' if pages is not None else ''}",
                peer=target.peer.name,
                request=request,
            )
    parts = [(label, _memory.row_major(array), target) for label, array, target in parts]
    window = parts[0][2].target
    grant = window.grant(request, timeout)
    if core.device is not None:
        parts = [(label, _reachable(core, array, grant, target), target) for label, array, target in parts]

    def plan():
        runs: list[Runs] = []
        kept: list[object] = []
        for _, array, target in parts:
            shards, held = _memory.local_shards(array)
            kept += held
            runs += target.runs(shards, grant.leaves[target.leaf.path].shards, pages, grant.templates)
        if len(parts) == len(runs) == 1 and _memory.is_in_place(array):
            if len(target.repeats) >= MAX_TEMPLATES:
                target.repeats.clear()
            target.repeats[None if pages is None else pages_key(pages)] = Repeat(grant, request, array, runs[0])
        return runs, kept

    return Job(window.peer, grant, plan), [array for _, array, _ in parts]


def _reachable(core: Core, array: Any, grant: Grant, target: RemoteArray) -> Any:
    """Returns the source, or a copy on a GPU of this process if the wire cannot write host memory to the target."""
    shards = grant.leaves[target.leaf.path].shards
    if grant.memory[target.leaf.path] != "cuda" or _memory.is_on_gpu(array):
        return array
    with core.lock:
        if all(target.peer.link.takes_host_memory(shard.key) for shard in shards):
            return array
    return _memory.on_gpu(array, core.default_device)
