"""JAX arrays from one process to another, point to point: windows, one-sided writes, order-free counters.

`import xen_moe_jax.transfer as xt`. Needs `xen-moe-jax[transfer]`.
"""

from xen_moe_jax.transfer._counter import ImmCounter
from xen_moe_jax.transfer._engine import Engine
from xen_moe_jax.transfer._errors import (
    PeerLost,
    StaleWindow,
    TransferCancelled,
    TransferError,
    TransferRefused,
    TransferTimeout,
    TransferUnavailable,
)
from xen_moe_jax.transfer._layout import Layout
from xen_moe_jax.transfer._plan import Plan, plan
from xen_moe_jax.transfer._push import Push, push
from xen_moe_jax.transfer._remote import Peer, RemoteArray, RemoteTree
from xen_moe_jax.transfer._tick import Watcher, tick
from xen_moe_jax.transfer._transfer import Transfer
from xen_moe_jax.transfer._window import Published, Window

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
