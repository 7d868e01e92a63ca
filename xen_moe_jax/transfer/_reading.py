"""Reads arrays that a peer has published: a lease, one transfer, and a check that the arrays were there all the
time."""

from __future__ import annotations

import time
from typing import Any

import jax

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import deadline
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused, TransferTimeout
from xen_moe_jax.transfer._layout import Leaf, distinct
from xen_moe_jax.transfer._remote import RemoteArray, RemoteTree
from xen_moe_jax.transfer._transfer import Job, Runs, Transfer


def read(
    core: Core,
    target: RemoteArray | RemoteTree,
    sharding: jax.sharding.Sharding | None,
    timeout: float,
    request: str,
) -> Any:
    """Returns the arrays of `target`; see `Engine.read`."""
    until = deadline(timeout, request)
    peer = target.peer
    lease = peer.ask({"t": "lease", "name": target.target.name}, timeout, request)
    leaves = {record["p"]: Leaf.from_json(record) for record in lease["leaves"]}
    give_back = {"t": "release", "l": lease["l"]}
    try:
        targets = {"": target} if isinstance(target, RemoteArray) else target.arrays
        blocks = {}
        for path, array in targets.items():
            there = leaves.get(array.leaf.path)
            if there is None or (there.shape, there.dtype) != (array.leaf.shape, array.leaf.dtype):
                raise TransferRefused(
                    f"{request}: {array!r} is not what the peer has now; take peer[...] again", peer=peer.name
                )
            blocks[path] = _memory.Block(array.shape, array.dtype, sharding, on_host=there.on_host)

        def plan():
            runs: list[Runs] = []
            for path, array in targets.items():
                runs += array.runs(blocks[path].shards, distinct(leaves[array.leaf.path].shards))
            return runs, list(blocks.values())

        transfer = Transfer(core, "get", request, [Job(peer, None, plan)], []).start()
        try:
            transfer.wait(max(0.0, until - time.monotonic()))
        except TransferTimeout:
            transfer.cancel(5.0)
            raise
    finally:
        with core.lock:
            for leaf in leaves.values():
                for shard in leaf.shards:
                    if not peer.lost:
                        peer.link.forget(shard.key)
        # Also after an error: the lease ends. A peer that died cannot say whether the arrays were there all the time.
        verdict = None if peer.lost else peer.ask(give_back, max(1.0, until - time.monotonic()), request)
    if verdict is None:
        raise peer.lost_error(request, request)
    if not verdict["intact"]:
        raise TransferRefused(
            f"{request}: the peer donated or deleted the arrays meanwhile", peer=peer.name, request=request
        )
    arrays = {path: block.array() for path, block in blocks.items()}
    return arrays[""] if isinstance(target, RemoteArray) else arrays
