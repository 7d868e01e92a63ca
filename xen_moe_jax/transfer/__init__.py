"""JAX arrays from one process to another, point to point: windows, one-sided writes, order-free counters.

`import xen_moe_jax.transfer as xt`. Needs `xen-moe-jax[transfer]`.
"""

from xen_moe_jax.transfer.counter import ImmCounter
from xen_moe_jax.transfer.engine import Engine
from xen_moe_jax.transfer.errors import (
    PeerLost,
    StaleWindow,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferTimeout,
    TransferUnavailable,
)
from xen_moe_jax.transfer.remote import Peer, RemoteArray, RemoteTree
from xen_moe_jax.transfer.transfer import Transfer
from xen_moe_jax.transfer.window import Published, Window

__all__ = [
    "Engine",
    "ImmCounter",
    "Peer",
    "PeerLost",
    "Published",
    "RemoteArray",
    "RemoteTree",
    "StaleWindow",
    "Transfer",
    "TransferCancelled",
    "TransferError",
    "TransferRefused",
    "TransferTimeout",
    "TransferUnavailable",
    "Window",
]
