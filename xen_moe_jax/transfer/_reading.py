"""Reads arrays that a peer has published: a lease, one transfer, and a check that the arrays were there all the
time."""

from __future__ import annotations

import time
from typing import Any

import jax

from xen_moe_jax.transfer import _memory
from xen_moe_jax.transfer._checks import deadline
from xen_moe_jax.transfer._core import Core
from xen_moe_jax.transfer._errors import TransferRefused
from xen_moe_jax.transfer._layout import Leaf, distinct
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteTree
from xen_moe_jax.transfer._transfer import Job, Runs, Transfer


def fetch(
    core: Core,
    peer: Peer,
    arrays: dict[str, RemoteArray],
    leaves: dict[str, Leaf],
    blocks: dict[str, _memory.Block],
    request: str,
    timeout: float | None,
) -> None:
    """Reads each of the peer's `arrays` into the block of the same path. `leaves`: the peer's memory, by the paths that
    the arrays have there. Cancels the transfer if it does not end within `timeout` seconds."""

    def plan():
        runs: list[Runs] = []
        for path, array in arrays.items():
            runs += array.runs(blocks[path].shards, distinct(leaves[array.leaf.path].shards))
        return runs, list(blocks.values())

    transfer = Transfer(core, "get", request, [Job(peer, None, plan)], []).start()
    try:
        transfer.wait(timeout)
    except TimeoutError:
        transfer.cancel(5.0)
        raise
    finally:
        with core.lock:
            for leaf in leaves.values():
                for shard in leaf.shards:
                    if not peer.lost:
                        peer.link.forget(shard.key)


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

        fetch(core, peer, targets, leaves, blocks, request, max(0.0, until - time.monotonic()))
    finally:
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
