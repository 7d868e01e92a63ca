"""Inactive ranks, against the oracle: one program on any backend, run for each subset of the ranks."""

from __future__ import annotations

import itertools
import zlib

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.cases import ROUTINGS, Case
from tests.support.checks import assert_bits, assert_within_ulp
from tests.support.conformance import check_routed

CASES = (
    Case("grouped"),
    Case("ranked", layout="ranked"),
    Case("padded", layout="padded"),
    Case("grouped-short", capacity=17),
    Case("ranked-short", layout="ranked", capacity=9),
    Case("grouped-short-weight", capacity=7, drop="weight"),
    Case("grouped-align8-uneven", alignment=8, experts=lambda ranks: 2 * ranks + 3),
    Case("grouped-fp8", wire="float8_e4m3fn"),
    Case("padded-int8", layout="padded", wire="int8:ue8m0"),
    Case("grouped-two-axes", axes=2),
    Case("ranked-two-axes", layout="ranked", axes=2),
)
BY_NAME = {case.name: case for case in CASES}


def subsets(num_ranks: int) -> list[np.ndarray]:
    """bool `[R]`, every subset: the whole first, then the empty one, then by size."""
    found = [np.array(bits) for bits in itertools.product([False, True], repeat=num_ranks)]
    return sorted(found, key=lambda bits: -1 if bits.all() else bits.sum())


class Members:
    """A case on four ranks of `devices`; `check` runs it for one subset. `traces` counts how often it was traced."""

    def __init__(
        self,
        case: Case,
        config: xm.KernelConfig,
        *,
        num_tokens: int,
        hidden: int,
        exact_weighted: bool = True,
        start_done: bool = True,
    ) -> None:
        self.case, self.config, self.exact_weighted, self.traces = case, config, exact_weighted, 0
        self.start_done = start_done
        self.sizes, self.names = ((2, 2), ("node", "gpu")) if case.axes == 2 else ((4,), ("ep",))
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(self.sizes), self.names)
        self.experts = case.experts(4)
        rng = np.random.default_rng(zlib.crc32(case.name.encode()))
        self.x = rng.standard_normal((4, num_tokens, hidden)).astype(case.dtype)
        self.idx = ROUTINGS["uniform"](rng, (4, num_tokens, case.top_k), self.experts).astype(np.int32)
        self.idx[rng.random(self.idx.shape) < 0.1] = -1
        self.weights = rng.uniform(-1.5, 1.5, self.idx.shape).astype(np.float32)
        self.every = self._expected(None)
        self.y = rng.standard_normal((*self.every.specified.shape, hidden)).astype(case.dtype)
        spec = P(self.names)
        mapped = jax.shard_map(self._body, mesh=self.mesh, in_specs=(spec, P()), out_specs=spec)
        self._program = jax.jit(mapped)

    def _body(self, stacked, active):
        """Runs all operations on one rank; `y` and the other results are stacked as the conformance class stacks
        them."""
        self.traces += 1
        x, idx, weights, y = jax.tree.map(lambda a: a[0], stacked)
        options = {"layout": self.case.layout, "capacity": self.case.capacity, "alignment": self.case.alignment}
        options |= {"drop": self.case.drop}
        options |= {"num_experts": self.experts, "axis_name": self.names, "wire": self.case.wire, "config": self.config}
        combining = {"wire": self.case.wire, "config": self.config}
        routed = xm.dispatch(x, idx, weights, active=active, **options)
        handle = xm.dispatch(x, idx, weights, **options).handle  # among all ranks
        results = {
            "routed": routed,
            "combine": xm.combine(y, routed.handle, weighted=False, **combining),
            "redispatch": xm.redispatch(x, routed.handle, config=self.config),
            "combine without": xm.combine(y, handle, weighted=False, active=active, **combining),
            "redispatch without": xm.redispatch(x, handle, active=active, config=self.config),
        }
        if self.case.layout != "ranked":
            results["weighted"] = xm.combine(y, routed.handle, weighted=True, **combining)
        if self.start_done:
            flight = xm.dispatch_start(x, idx, weights, active=active, **options)
            landed = xm.dispatch_done(flight)
            results["start and done"] = landed
            flight = xm.combine_start(y, landed.handle, weighted=False, **combining)
            results["combine by start and done"] = xm.combine_done(flight)
        return jax.tree.map(lambda a: a[None], results)

    def _expected(self, active: np.ndarray | None) -> oracle.Dispatched:
        wire, scale_format = self.case.wire_parts
        return oracle.dispatch(
            self.x,
            self.idx,
            self.weights,
            num_experts=self.experts,
            layout=self.case.layout,
            capacity=self.case.capacity,
            alignment=self.case.alignment,
            wire=wire,
            scale_format=scale_format,
            active=active,
            drop=self.case.drop,
        )

    def check(self, active: np.ndarray) -> None:
        """Checks every result for this subset, bit for bit."""
        stacked = jax.device_put((self.x, self.idx, self.weights, self.y), NamedSharding(self.mesh, P(self.names)))
        placed = jax.device_put(active, NamedSharding(self.mesh, P()))
        results = jax.tree.map(np.asarray, self._program(stacked, placed))
        expected, without = self._expected(active), oracle.without(self.every, active)
        wire, scale_format = self.case.wire_parts
        combining = {"wire": wire, "scale_format": scale_format, "axis_sizes": self.sizes}
        for name in ("routed", "start and done") if self.start_done else ("routed",):
            check_routed(results[name], expected, self.case.capacity, self.case)
            assert_bits(results[name].handle.active, np.broadcast_to(active, (4, 4)), "handle.active")
        x = self.x
        assert_bits(results["redispatch"], oracle.redispatch(x, expected), "redispatch", where=expected.specified)
        where = self.every.specified
        assert_bits(results["redispatch without"], oracle.redispatch(x, without), "redispatch without", where=where)
        combined = oracle.combine(self.y, expected, weighted=False, **combining)
        assert_bits(results["combine"], combined, "combine")
        if self.start_done:
            assert_bits(results["combine by start and done"], combined, "combine by start and done")
        assert_bits(
            results["combine without"], oracle.combine(self.y, without, weighted=False, **combining), "combine without"
        )
        assert not combined[~active].any()  # an inactive rank gets nothing
        if "weighted" in results:
            weighted = oracle.combine(self.y, expected, weighted=True, **combining)
            if self.exact_weighted:
                assert_bits(results["weighted"], weighted, "weighted")
            else:
                assert_within_ulp(results["weighted"], weighted, "weighted", ulp_dtype="bfloat16")
