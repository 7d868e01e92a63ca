"""Inactive ranks, against the oracle: one program on any backend, run for each subset of the ranks."""

from __future__ import annotations

import collections
import functools
import itertools
import zlib
from collections.abc import Callable
from typing import Any

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
    """A case on four ranks; `check` runs it for one subset.

    `apart`: each operation is a program of its own, since XLA's passes take more than twice as long for a program of
    twice the length. `traces` says how often a program was traced, and is the largest such number.
    """

    def __init__(
        self,
        case: Case,
        config: xm.KernelConfig,
        *,
        num_tokens: int,
        hidden: int,
        exact_weighted: bool = True,
        start_done: bool = True,
        apart: bool = False,
    ) -> None:
        self.case, self.config, self.exact_weighted = case, config, exact_weighted
        self.start_done, self._traced = start_done, collections.Counter[int]()
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
        steps = self._steps()
        self._programs = []
        for group in [{name: step} for name, step in steps.items()] if apart else [steps]:
            body = functools.partial(self._body, group, len(self._programs))
            mapped = jax.shard_map(body, mesh=self.mesh, in_specs=(spec, P(), spec), out_specs=spec)
            self._programs.append(jax.jit(mapped))

    @property
    def traces(self) -> int:
        return max(self._traced.values())

    def _body(self, steps, number, stacked, active, before):
        """Runs operations on one rank, with the results of those `before` them; `y` and the other results are stacked
        as the conformance class stacks them."""
        self._traced[number] += 1
        operands, results = jax.tree.map(lambda a: a[0], (stacked, before))
        for name, step in steps.items():
            results[name] = step(*operands, active, results)
        return jax.tree.map(lambda a: a[None], {name: results[name] for name in steps})

    def _steps(self) -> dict[str, Callable[..., Any]]:
        """Name to an operation of `(x, idx, weights, y, active, results so far)`."""
        options = {"layout": self.case.layout, "capacity": self.case.capacity, "alignment": self.case.alignment}
        options |= {"drop": self.case.drop}
        options |= {"num_experts": self.experts, "axis_name": self.names, "wire": self.case.wire, "config": self.config}
        combining = {"wire": self.case.wire, "config": self.config}
        steps = {
            "routed": lambda x, idx, w, y, active, _: xm.dispatch(x, idx, w, active=active, **options),
            # among all ranks
            "handle": lambda x, idx, w, y, active, _: xm.dispatch(x, idx, w, **options).handle,
            "combine": lambda x, idx, w, y, active, r: xm.combine(y, r["routed"].handle, weighted=False, **combining),
            "redispatch": lambda x, idx, w, y, active, r: xm.redispatch(x, r["routed"].handle, config=self.config),
            "combine without": lambda x, idx, w, y, active, r: xm.combine(
                y, r["handle"], weighted=False, active=active, **combining
            ),
            "redispatch without": lambda x, idx, w, y, active, r: xm.redispatch(
                x, r["handle"], active=active, config=self.config
            ),
        }
        if self.case.layout != "ranked":
            steps["weighted"] = lambda x, idx, w, y, active, r: xm.combine(
                y, r["routed"].handle, weighted=True, **combining
            )
        if self.start_done:
            steps["start and done"] = lambda x, idx, w, y, active, _: xm.dispatch_done(
                xm.dispatch_start(x, idx, w, active=active, **options)
            )
            steps["combine by start and done"] = lambda x, idx, w, y, active, r: xm.combine_done(
                xm.combine_start(y, r["start and done"].handle, weighted=False, **combining)
            )
        return steps

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
        results: dict[str, Any] = {}
        for program in self._programs:
            results |= program(stacked, placed, results)
        results = jax.tree.map(np.asarray, results)
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
