"""Pulling what a peer has published: a lease, one transfer, and the question whether all was there until its end."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jax

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import deadline
from xen_moe_jax.transfer._errors import TransferRefused, TransferTimeout
from xen_moe_jax.transfer._layout import Leaf, distinct
from xen_moe_jax.transfer._remote import RemoteArray, RemoteTree
from xen_moe_jax.transfer._transfer import Job, Runs, Transfer

if TYPE_CHECKING:
    from xen_moe_jax.transfer._engine import Engine


def read(
    engine: Engine,
    target: RemoteArray | RemoteTree,
    sharding: jax.sharding.Sharding | None,
    timeout: float,
    request: str,
) -> Any:
    """The arrays of `target`, as `Engine.read` gives them."""
    until = deadline(timeout, request)
    peer = target.peer
    lease = engine._call(peer, {"t": "lease", "name": target.target.name}, timeout, request)
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

        transfer = engine._start(Transfer(engine, "get", request, [Job(peer, None, plan)], []))
        try:
            transfer.wait(max(0.0, until - time.monotonic()))
        except TransferTimeout:
            transfer.cancel(5.0)
            raise
    finally:
        with engine._lock:
            for leaf in leaves.values():
                for shard in leaf.shards:
                    if not peer.lost:
                        peer.link.forget(shard.key)
        verdict = None if peer.lost else engine._call(peer, give_back, max(1.0, until - time.monotonic()), request)
    if verdict is not None and not verdict["intact"]:
        raise TransferRefused(
            f"{request}: the peer donated or deleted the arrays meanwhile", peer=peer.name, request=request
        )
    arrays = {path: block.array() for path, block in blocks.items()}
    return arrays[""] if isinstance(target, RemoteArray) else arrays
