"""Programs by start and done, and the same programs with synchronous operations, which tests compare bit for bit.

They run on any backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

EXPERTS, TOP_K, TOKENS, HIDDEN = 16, 4, 96, 512


@dataclasses.dataclass(frozen=True)
class Way:
    """Runs an operation by start and done with work in between, or synchronously with the work behind it."""

    split: bool

    def dispatch(self, work: Callable, a: Any, *args: Any, **kw: Any) -> tuple[Any, Any]:
        if not self.split:
            return xm.dispatch(*args, **kw), work(a)
        flight, out = xm.overlap(xm.dispatch_start(*args, **kw), work, a)
        return xm.dispatch_done(flight), out

    def combine(self, work: Callable, a: Any, *args: Any, **kw: Any) -> tuple[Any, Any]:
        if not self.split:
            return xm.combine(*args, **kw), work(a)
        flight, out = xm.overlap(xm.combine_start(*args, **kw), work, a)
        return xm.combine_done(flight), out


WHOLE, SPLIT = Way(False), Way(True)


def arguments(mesh: Mesh) -> tuple[jax.Array, ...]:
    """`x`, `topk_idx`, `topk_weights`, `a`, `w`, random: the first four of every rank, `w [ranks * H, H]`.

    `a` and `w` are small integers: matmuls of them are exact, whichever algorithm runs them.
    """
    rng = np.random.default_rng(7)
    rows = mesh.size * TOKENS
    idx = np.argsort(rng.random((rows, EXPERTS)), axis=1)[:, :TOP_K].astype(np.int32)
    x = rng.standard_normal((rows, HIDDEN)).astype(np.float32)
    a = rng.integers(-4, 5, (rows, HIDDEN)).astype(np.float32)
    w = rng.integers(-4, 5, (mesh.size * HIDDEN, HIDDEN)).astype(np.float32)
    weights = rng.random((rows, TOP_K)).astype(np.float32)
    sharding = NamedSharding(mesh, P("ep"))
    return tuple(jax.device_put(v, sharding) for v in (x, idx, weights, a, w))


def _routing(config: xm.KernelConfig, **more: Any) -> dict[str, Any]:
    return {"num_experts": EXPERTS, "axis_name": "ep", "config": config, **more}


def _work(w: Any) -> Callable:
    return lambda a: jnp.clip(a @ w, -4, 4)


def one_layer(way: Way, config: Any, x: Any, idx: Any, weights: Any, a: Any, w: Any) -> Any:
    routed, a = way.dispatch(_work(w), a, x, idx, weights, **_routing(config))
    out, a = way.combine(_work(w), a, jnp.tanh(routed.x), routed.handle, config=config)
    return out, a


def quantized(way: Way, config: Any, x: Any, idx: Any, weights: Any, a: Any, w: Any) -> Any:
    values = xm.quantize(x)
    routed, a = way.dispatch(_work(w), a, values, idx, weights, **_routing(config))
    rows = xm.dequantize(routed.x, jnp.float32)
    used = routed.expert_ids() < EXPERTS // jax.lax.axis_size("ep")
    rows = jnp.where(used[:, None], rows, 0.0)
    return xm.combine(rows, routed.handle, wire="float8_e4m3fn", config=config), a


def layers_in_a_scan(way: Way, config: Any, x: Any, idx: Any, weights: Any, a: Any, w: Any) -> Any:
    def turn(carry, _):
        x, a = carry
        out, a = one_layer(way, config, x, idx, weights, a, w)
        return (jnp.tanh(x + out), a), None

    return jax.lax.scan(turn, (x, a), length=8)[0]


def two_batches(way: Way, config: Any, x: Any, idx: Any, weights: Any, a: Any, w: Any) -> Any:
    """Two operations are pending at once, with synchronous ones in between, and finish in another order than they
    started."""
    parts = [(v[: TOKENS // 2], v[TOKENS // 2 :]) for v in (x, idx, weights)]
    first, second = zip(*parts, strict=True)
    routing = _routing(config)
    if not way.split:
        routed = [xm.dispatch(*args, **routing) for args in (first, second)]
        whole = xm.dispatch(x, idx, weights, **routing)
        outs = [xm.combine(jnp.tanh(r.x), r.handle, config=config) for r in routed]
        return (*outs, xm.combine(whole.x, whole.handle, config=config), _work(w)(_work(w)(a)))
    flights = [xm.dispatch_start(*args, **routing) for args in (first, second)]
    flights, a = xm.overlap(flights, _work(w), a)
    whole = xm.dispatch(x, idx, weights, **routing)
    routed_second = xm.dispatch_done(flights[1])
    back = xm.combine_start(jnp.tanh(routed_second.x), routed_second.handle, config=config)
    routed_first = xm.dispatch_done(flights[0])
    back_first = xm.combine_start(jnp.tanh(routed_first.x), routed_first.handle, config=config)
    out = xm.combine(whole.x, whole.handle, config=config)
    (back, back_first), a = xm.overlap((back, back_first), _work(w), a)
    return xm.combine_done(back_first), xm.combine_done(back), out, a


def four_open(way: Way, config: Any, x: Any, idx: Any, weights: Any, a: Any, w: Any) -> Any:
    """Returns a program with many pending operations at once, each with its own rows."""
    rows = [x * 2.0**i for i in range(4)]
    if not way.split:
        routed = [xm.dispatch(r, idx, weights, **_routing(config)) for r in rows]
        a = _work(w)(a)
    else:
        flights = [xm.dispatch_start(r, idx, weights, **_routing(config)) for r in rows]
        flights, a = xm.overlap(flights, _work(w), a)
        routed = [xm.dispatch_done(f) for f in reversed(flights)][::-1]
    return *(xm.combine(r.x, r.handle, config=config) for r in routed), a


BODIES = {f.__name__: f for f in (one_layer, quantized, layers_in_a_scan, two_batches, four_open)}


def gradients(layout: str, remat: str, **options: Any) -> Callable:
    """The gradients of a layer in all that can have one. Those of `a` and `w` are sums of small integers too."""

    def layer(way, config, x, weights, a, w, idx):
        routed, a = way.dispatch(_work(w), a, x, idx, weights, **_routing(config, layout=layout, **options))
        y = jnp.tanh(routed.x)
        weighted = layout != "ranked"
        out, a = way.combine(_work(w), a, y, routed.handle, weighted=weighted, config=config)
        return jnp.sum(jnp.sin(out)) + jnp.sum(a)

    def body(way, config, x, idx, weights, a, w):
        f = lambda *args: layer(way, config, *args)  # noqa: E731
        if remat != "none":
            names = jax.checkpoint_policies.save_only_these_names("xen_moe_rows", "xen_moe_handle")
            f = jax.checkpoint(f, policy=names if remat == "names" else None)
        return jax.grad(f, (0, 1, 2, 3))(x, weights, a, w, idx)

    return body
