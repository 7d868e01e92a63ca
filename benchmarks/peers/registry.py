"""The MoE round trip as JAX users write it today: the peers that the library is compared with, in the same run.

Every peer presents its rows to the experts grouped or batched by expert, brings them back and reduces them with the
router's weights; none drops a row at the capacities that the benchmark gives. Quantized tokens travel with their
scales, as two arrays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from benchmarks.lib.programs import peer_combine, peer_dispatch
from benchmarks.peers.dense import gather_and_scatter, one_hot_einsum
from benchmarks.peers.ragged import sorted_ragged
from xen_moe_jax.tuning.peer import Peer, padded_all_to_all, peer_round_trip
from xen_moe_jax.tuning.programs import Program, round_trip_program
from xen_moe_jax.tuning.workload import Capacities, Workload

ANYWHERE = ("cpu", "gpu", "tpu")
NOT_CPU = ("gpu", "tpu")  # XLA has no ragged all-to-all for CPU
SEGMENTS = (1, 8, 32, 64, 128, 256)
"""Segments for each peer of `jax.lax.ragged_all_to_all`; 1 is the usual call."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """Attributes:
    make: `(work, caps) -> Peer`.
    platforms: the platforms that can run the peer.
    cost: calls in one timed loop are divided by this.
    usual: part of `--peers all`; a variant that is not must be named.
    """

    make: Callable[[Workload, Capacities], Peer]
    platforms: tuple[str, ...] = ANYWHERE
    cost: int = 1
    usual: bool = True


PEERS: dict[str, Entry] = {
    "padded all_to_all": Entry(padded_all_to_all),
    "all_gather + psum_scatter": Entry(gather_and_scatter),
    "all_gather + psum_scatter by token": Entry(functools.partial(gather_and_scatter, by_token=True), usual=False),
    "one-hot einsum": Entry(one_hot_einsum, cost=4),
} | {
    f"ragged_all_to_all k={segments}": Entry(
        functools.partial(sorted_ragged, segments=segments),
        NOT_CPU,
        cost=20 if segments == 1 else 4 if segments == 8 else 1,
        usual=segments in (1, 64),
    )
    for segments in SEGMENTS
}


def peer_programs(
    work: Workload,
    caps: Capacities,
    platform: str,
    names: tuple[str, ...] | None = None,
    operations: tuple[str, ...] = ("round trip",),
) -> list[Program]:
    """Programs of the peers that `platform` can run; `names` chooses among them, None is the usual ones."""
    unknown = set(names or ()) - set(PEERS)
    if unknown:
        raise ValueError(f"peers {sorted(unknown)}: must be among {tuple(PEERS)}")
    return [
        one_program(work, entry.make(work, caps), name, operation, entry.cost)
        for name, entry in PEERS.items()
        if platform in entry.platforms and (entry.usual if names is None else name in names)
        for operation in operations
    ]


def one_program(work: Workload, peer: Peer, name: str, operation: str, cost: int) -> Program:
    if operation == "dispatch":
        return peer_dispatch(work, peer, name, cost)
    if operation == "combine":
        return peer_combine(work, peer, name, cost)
    return round_trip_program(name, peer_round_trip(work, peer), cost)
