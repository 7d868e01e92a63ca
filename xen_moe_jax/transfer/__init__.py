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
from xen_moe_jax.transfer.plan import Layout, Plan, plan
from xen_moe_jax.transfer.push import Push, push
from xen_moe_jax.transfer.remote import Peer, RemoteArray, RemoteTree
from xen_moe_jax.transfer.tick import Watcher, tick
from xen_moe_jax.transfer.transfer import Transfer
from xen_moe_jax.transfer.window import Published, Window

__all__ = [
    "Engine",
    "ImmCounter",
    "Layout",
    "Peer",
    "PeerLost",
    "Plan",
    "Published",
    "Push",
    "RemoteArray",
    "RemoteTree",
    "StaleWindow",
    "Transfer",
    "TransferCancelled",
    "TransferError",
    "TransferRefused",
    "TransferTimeout",
    "TransferUnavailable",
    "Watcher",
    "Window",
    "plan",
    "push",
    "tick",
]
