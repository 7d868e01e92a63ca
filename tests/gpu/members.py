"""Programs in which ranks become inactive and active again, for tests on any backend and mesh."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.lib.verify import local_total, unequal_bits
from tests.gpu.bodies import REFERENCE, Setup, defined_rows, draw_operands, draw_outputs, draw_routing


def subsets(num_ranks: int) -> list[np.ndarray]:
    """bool `[R]`, every subset: all of them first, then none, then the rest."""
    found = [np.array(bits) for bits in itertools.product([False, True], repeat=num_ranks)]
    return sorted(found, key=lambda bits: -1 if bits.all() else bits.sum())


def outcome(setup: Setup, config: xm.KernelConfig, operands: tuple, active: jax.Array | None, idx: jax.Array) -> dict:
    """Returns every result with the mask of its specified rows. With `active` None, `idx` is masked already."""
    case = setup.case
    x, weights, seed = operands
    wire, _ = case.wire_parts
    options = {
        "num_experts": setup.experts,
        "axis_name": setup.axis_name,
        "layout": case.layout,
        "capacity": case.capacity,
        "alignment": case.alignment,
        "config": config,
        "active": active,
    }

    def layer(x, weights, start_done=False):
        if start_done:
            routed = xm.dispatch_done(xm.dispatch_start(x, idx, weights, wire=case.wire, **options))
        else:
            routed = xm.dispatch(x, idx, weights, wire=case.wire, **options)
        keep = defined_rows(case.layout, routed)
        y = draw_outputs((*keep.shape, x.shape[1]), x.dtype, seed) * jnp.where(keep[..., None], routed.x, 0)
        combining = {"weighted": case.layout != "ranked", "wire": case.wire, "config": config}
        if start_done:
            out = xm.combine_done(xm.combine_start(y, routed.handle, **combining))
        else:
            out = xm.combine(y, routed.handle, **combining)
        return out, (routed, keep)

    out, backward, (routed, keep) = jax.vjp(layer, x, weights, has_aux=True)
    dx, dweights = backward(x)
    by_start_done, backward, (landed, _) = jax.vjp(lambda *a: layer(*a, start_done=True), x, weights, has_aux=True)
    dx_start_done, dweights_start_done = backward(x)
    results: dict[str, Any] = {
        "out": (out, None),
        "out by start and done": (by_start_done, None),
        "rows by start and done": (landed.x, keep),
        "rows": (routed.x, keep),
        "positions": (routed.handle.positions, None),
        "recv_counts": (routed.handle.recv_counts, None),
        "redispatch": (xm.redispatch(x, routed.handle, config=config), keep),
    }
    if wire is None:  # a wire changes gradients, independent of `active`
        results |= {"gradient of x": (dx, None), "gradient of weights": (dweights, None)}
        results |= {
            "dx by start and done": (dx_start_done, None),
            "dweights by start and done": (dweights_start_done, None),
        }
    # a dispatch among all ranks, and a combine with an inactive rank
    every = xm.dispatch(x, idx, weights, wire=case.wire, **{**options, "active": None})
    rows = jnp.where(defined_rows(case.layout, every)[..., None], every.x, 0)
    if active is not None:
        results["combine alone"] = xm.combine(rows, every.handle, weighted=False, active=active, config=config), None
        keep = defined_rows(case.layout, every)
        results["redispatch alone"] = xm.redispatch(x, every.handle, active=active, config=config), keep
    results["dropped"] = routed.num_dropped.reshape(1), None
    return results


class Comparison:
    """`config` against plain JAX with `active`, both in one program that is traced once; `traces` counts.

    `against`: the config of plain JAX.
    """

    def __init__(self, setup: Setup, config: xm.KernelConfig, against: xm.KernelConfig = REFERENCE) -> None:
        self.setup, self.traces = setup, 0
        self.idx = draw_routing(setup, "uniform")
        x, flat, weights, seed = draw_operands(setup, self.idx)
        # The gradient of the weights is a sum over a row, which XLA adds up in another order in another program: with
        # few bits in every number each order gives the same sum.
        x = (np.clip(np.rint(x.astype(np.float32) * 4), -8, 8) / 4).astype(x.dtype)
        self.operands = [setup.place(a) for a in (x, flat, weights, seed)]

        def compare(x, idx, weights, seed, active):
            self.traces += 1
            ours = outcome(setup, config, (x, weights, seed), active, idx)
            theirs = outcome(setup, against, (x, weights, seed), active, idx)
            return {
                name: unequal_bits(ours[name][0], expected, jnp.ones((), bool) if keep is None else keep)
                for name, (expected, keep) in theirs.items()
            }

        self._program = jax.jit(
            jax.shard_map(
                compare,
                mesh=setup.mesh,
                in_specs=(setup.spec,) * 4 + (P(),),
                out_specs=setup.spec,
                check_vma=False,
            )
        )

    def wrong(self, active: np.ndarray) -> dict[str, int]:
        """Elements that differ, by result, where any do."""
        counts = self._program(*self.operands, self.setup.place(active, P()))
        totals = {name: local_total(count) for name, count in counts.items()}
        return {name: total for name, total in totals.items() if total}
