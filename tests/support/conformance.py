"""The contract as tests: one class, run against every backend.

A backend subclasses `Conformance`, names itself in `config` and picks its sizes; the tables are in `cases.py`, the
expected values come from `oracle.py`. Everything that the contract fixes is compared bit for bit; rows that it leaves
unspecified are poisoned (`y`) or not looked at (results).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import ml_dtypes  # noqa: F401  registers bfloat16 and float8 with NumPy
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import cases, oracle
from tests.support.cases import CASE_IDS, CASE_ROUTINGS, ROUTINGS, Case
from tests.support.checks import assert_bits, assert_within_ulp
from tests.support.ragged import in_pieces, ragged_operands

ALL_TO_ALL = (  # shape of a rank's x from R, split_axis, concat_axis, tiled, groups of consecutive ranks, dtype
    (lambda r: (r, 3, 5), 0, 0, False, 1, "float32"),
    (lambda r: (3, r, 5), 1, 2, False, 1, "bfloat16"),
    (lambda r: (3, 5, r), 2, 0, False, 1, "int32"),
    (lambda r: (2 * r, 3), 0, 0, True, 1, "bfloat16"),
    (lambda r: (2, 3 * r, 5), 1, 0, True, 1, "float32"),
    (lambda r: (r // 2, 6), 0, 0, False, 2, "float32"),
    (lambda r: (r, 6), 0, 1, True, 2, "float16"),
)
ALL_GATHER = (  # shape of a rank's x, axis, tiled, groups of consecutive ranks, dtype
    ((24, 16), 0, True, 1, "bfloat16"),
    ((3, 5), 0, False, 1, "float32"),
    ((3, 5), -1, False, 1, "int8"),
    ((2, 3, 7), 1, True, 1, "float8_e4m3fn"),
    ((), 0, False, 1, "float32"),
    ((16,), 0, True, 1, "int32"),
    ((40, 8), 0, True, 2, "float32"),
    ((6, 3), 1, False, 2, "bool"),
)


class Conformance:
    """Subclass it, set the attributes, run it.

    Attributes:
      config: passed to every call; names the backend.
      num_ranks: ranks along a single axis.
      two_axis_sizes: (slow, fast) for the two-axis cases; None skips them.
      num_tokens: tokens per rank.
      hidden: a multiple of 128. `odd_hidden` is the other kind.
      exact_weighted: False where the backend cannot keep multiply and add apart (TPU): one unit in the last place is
        then allowed.
      selected: names of the cases to run; None runs all of them.
      optimized: names of the cases that get the whole compiler on CPU; a class may have the marker for all of them.
      excluded: case name -> reason: skipped.
      excluded_wires: wire -> reason: its cases are skipped.
      no_exchange: why the drop-ins are not run; empty: they are.
    """

    config: ClassVar[xm.KernelConfig] = xm.KernelConfig()
    num_ranks: ClassVar[int] = 8
    two_axis_sizes: ClassVar[tuple[int, int] | None] = (2, 4)
    num_tokens: ClassVar[int] = 20
    hidden: ClassVar[int] = 256
    odd_hidden: ClassVar[int] = 200
    exact_weighted: ClassVar[bool] = True
    selected: ClassVar[tuple[str, ...] | None] = None
    optimized: ClassVar[tuple[str, ...]] = ()
    excluded: ClassVar[dict[str, str]] = {}
    excluded_wires: ClassVar[dict[str, str]] = {}
    no_exchange: ClassVar[str] = ""

    @classmethod
    def pytest_generate_tests(cls, metafunc) -> None:
        """Parametrises the tests by the case table of the class."""
        if "case" in metafunc.fixturenames:
            table = zip(CASE_ROUTINGS, CASE_IDS, strict=True)
            chosen = [(c, i) for c, i in table if cls.selected is None or c[0].name in cls.selected]
            full = pytest.mark.optimized
            rows = [pytest.param(*c, marks=[full] * (c[0].name in cls.optimized), id=i) for c, i in chosen]
            metafunc.parametrize(("case", "routing"), rows)

    # -- set-up ------------------------------------------------------------------------------------
    def axes(self, count: int) -> tuple[tuple[str, ...], tuple[int, ...]]:
        if count == 1:
            return ("ep",), (self.num_ranks,)
        if self.two_axis_sizes is None:
            pytest.skip(f"{type(self).__name__} runs no two-axis cases")
        return ("node", "gpu"), self.two_axis_sizes

    def levels(self, count: int = 1) -> tuple[int, ...]:
        """Sizes of the levels in which a combine adds, the slow one first."""
        _, sizes = self.axes(count)
        nodes = self.config.ranks_per_node
        return sizes if nodes is None or nodes == self.num_ranks else (int(np.prod(sizes)) // nodes, nodes)

    def mesh(self, count: int = 1) -> jax.sharding.Mesh:
        names, sizes = self.axes(count)
        need = int(np.prod(sizes))
        if jax.device_count() < need:
            pytest.skip(f"needs {need} devices, has {jax.device_count()}")
        return jax.make_mesh(sizes, names, devices=jax.devices()[:need])

    def run(self, body, *stacked: Any, axes: int = 1, key: Any = None) -> Any:
        """Runs `body` on every rank. Arrays are stacked (`[R, ...]`), the results too; equal `key`s share a program."""
        names, _ = self.axes(axes)
        mesh = self.mesh(axes)
        program = _compiled(body if key is None else _Keyed(body, key), mesh, names)
        placed = jax.device_put(stacked, jax.NamedSharding(mesh, P(names)))
        return jax.tree.map(np.asarray, program(*placed))

    # -- dispatch and combine ----------------------------------------------------------------------
    def test_dispatch_and_combine(self, case: Case, routing: str):
        if reason := self.excluded.get(case.name) or self.excluded_wires.get(case.wire or ""):
            pytest.skip(reason)
        problem = self.problem(case, routing)
        results = self.results(problem)
        check_routed(results["routed"], problem.expected, problem.capacity, case)
        expected = problem.expected
        assert_bits(results["rows"], oracle.redispatch(problem.x2, expected), "redispatch", where=expected.specified)
        wire, scale_format = case.wire_parts
        for weighted in (False, True):
            if (name := f"combined_{weighted}") not in results:
                continue
            out = oracle.combine(
                problem.y,
                expected,
                weighted=weighted,
                wire=wire,
                scale_format=scale_format,
                axis_sizes=self.levels(case.axes),
            )
            if weighted and not self.exact_weighted:
                ulp = {"float8_e4m3fn": "bfloat16", "int8": "bfloat16", None: problem.y.dtype}[wire]
                assert_within_ulp(results[name], out, name, ulp_dtype=ulp)
            else:
                assert_bits(results[name], out, name)

    def results(self, problem: Problem) -> dict[str, Any]:
        """Runs all operations of a case in one program."""
        return self.run(problem.body, *problem.operands, axes=problem.case.axes, key=problem.key)

    def results_one_by_one(self, problem: Problem) -> dict[str, Any]:
        """Runs each operation of a case in a program of its own. Cases share equal programs, and XLA's passes take more
        than twice as long for a program of twice the length."""
        x, idx, weights, y, x2 = problem.operands
        case, config, axes = problem.case, problem.config, problem.case.axes
        routed = self.run(problem.dispatch, x, idx, weights, axes=axes, key=("dispatch", problem.key))
        key = ("redispatch", config, problem.axis_name)
        out = {"routed": routed, "rows": self.run(problem.redispatch, x2, routed.handle, axes=axes, key=key)}
        for weighted in problem.combines:
            combine = functools.partial(problem.combine, weighted=weighted)
            key = ("combine", weighted, case.wire, config, problem.axis_name)
            out[f"combined_{weighted}"] = self.run(combine, y, routed.handle, axes=axes, key=key)
        return out

    def problem(self, case: Case, routing: str) -> Problem:
        """Random operands and expected results of one case."""
        _, sizes = self.axes(case.axes)
        ranks = int(np.prod(sizes))
        rng = np.random.default_rng(zlib.crc32(f"{case.name}/{routing}".encode()))
        hidden = self.odd_hidden if case.odd_hidden else self.hidden
        experts = case.experts(ranks)
        idx = ROUTINGS[routing](rng, (ranks, self.num_tokens, case.top_k), experts).astype(np.int32)
        x = rng.standard_normal((ranks, self.num_tokens, hidden)).astype(case.dtype)
        scales = None
        if case.block_scaled:
            x, scales = oracle.quantize(x, *case.block_scaled_parts)
        weights = rng.uniform(-1.5, 1.5, idx.shape).astype(np.float32) if case.weights else None
        capacity = case.capacity
        if isinstance(capacity, str):
            need = oracle.needed_rows(idx, experts, case.layout, case.alignment)
            capacity = {"exact": need, "one_below": need - 1, "half": need // 2}[capacity]
        wire, scale_format = case.wire_parts
        expected = oracle.dispatch(
            x,
            idx,
            weights,
            num_experts=experts,
            layout=case.layout,
            capacity=capacity,
            alignment=case.alignment,
            drop=case.drop,
            wire=wire,
            scale_format=scale_format,
            scales=scales,
        )
        y = rng.standard_normal((*expected.specified.shape, hidden)).astype(case.dtype)
        # Code that reads a row without a token reads a NaN.
        owned = np.zeros(expected.specified.shape, bool).reshape(ranks, -1)
        for rank in range(ranks):
            owned[rank, expected.positions[rank][expected.positions[rank] >= 0]] = True
        y[~owned.reshape(expected.specified.shape)] = np.nan
        x2 = rng.standard_normal((ranks, self.num_tokens, 128)).astype(case.dtype)
        if case.capacity in ("one_below", "half"):
            assert expected.num_dropped.sum() > 0
        return Problem(
            case, self.config, self.axes(case.axes)[0], experts, capacity, x, scales, idx, weights, y, x2, expected
        )

    # -- several at a time -------------------------------------------------------------------------
    def test_two_layers_interleaved_and_handle_reuse(self):
        """Two dispatches before the first combine, combines in the opposite order, and a handle that serves twice."""
        first = self.problem(Case("interleaved-a"), "uniform")
        second = self.problem(Case("interleaved-b", layout="padded", top_k=3), "zipf")
        names, config = first.axis_name, self.config

        def body(x1, idx1, w1, y1, x2, idx2, w2, y2):
            one = xm.dispatch(x1, idx1, w1, num_experts=first.experts, axis_name=names, config=config)
            two = xm.dispatch(x2, idx2, w2, num_experts=second.experts, axis_name=names, layout="padded", config=config)
            out2 = xm.combine(y2, two.handle, weighted=False, config=config)
            out1 = xm.combine(y1, one.handle, weighted=False, config=config)
            again = xm.combine(y1 * 2, one.handle, weighted=False, config=config)
            return one.x, two.x, out1, out2, again, xm.redispatch(x2, one.handle, config=config)

        operands = [a for p in (first, second) for a in (p.x, p.idx, p.weights, p.y)]
        rows1, rows2, out1, out2, again, redispatched = self.run(body, *operands)
        e1, e2, levels = first.expected, second.expected, self.levels()
        assert_bits(rows1, e1.rows, "layer 1 rows", where=e1.specified)
        assert_bits(rows2, e2.rows, "layer 2 rows", where=e2.specified)
        assert_bits(out1, oracle.combine(first.y, e1, weighted=False, axis_sizes=levels), "layer 1")
        assert_bits(out2, oracle.combine(second.y, e2, weighted=False, axis_sizes=levels), "layer 2")
        doubled = (first.y.astype("f4") * 2).astype(first.y.dtype)
        assert_bits(again, oracle.combine(doubled, e1, weighted=False, axis_sizes=levels), "reuse")
        assert_bits(redispatched, oracle.redispatch(second.x, e1), "reuse by redispatch", where=e1.specified)

    def test_start_and_done_equal_the_whole(self):
        """Start and done with other work in between, and two operations pending at once, give the synchronous
        results."""
        problem = self.problem(Case("halves"), "uniform")
        names, config = problem.axis_name, self.config
        other = np.random.default_rng(5).standard_normal((self.num_ranks, 64, 64)).astype(np.float32)

        def body(x, idx, weights, y, other):
            options = {"num_experts": problem.experts, "axis_name": names, "config": config}
            flight = xm.dispatch_start(x, idx, weights, **options)
            between = jnp.matmul(other, other, precision="highest")  # GPUs would round to TF32
            routed = xm.dispatch_done(flight)
            flight = xm.combine_start(y, routed.handle, weighted=False, config=config)
            between = jnp.matmul(between, other, precision="highest")
            return routed, xm.combine_done(flight), between

        routed, out, between = self.run(body, problem.x, problem.idx, problem.weights, problem.y, other)
        check_routed(routed, problem.expected, None, problem.case)
        combined = oracle.combine(problem.y, problem.expected, weighted=False, axis_sizes=self.levels())
        assert_bits(out, combined, "combine_done")
        np.testing.assert_allclose(between, other @ other @ other, rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("wire", [None, "float8_e4m3fn", "mxfp4"])
    def test_non_finite_values_travel_unharmed(self, wire):
        """NaN payloads, infinities, negative zeros in `x`: bit for bit, and only to their own rows or blocks."""
        if reason := self.excluded_wires.get(wire or ""):
            pytest.skip(reason)
        problem = self.problem(Case("non-finite", dtype="float32"), "uniform")
        x = problem.x.copy()
        x[0, 0, :4] = [np.nan, np.inf, -np.inf, -0.0]
        x.view(np.uint32)[min(1, self.num_ranks - 1), 1, 5] = 0x7FC12345
        x[-1, -1] = np.nan
        names, config = problem.axis_name, self.config

        def body(x, idx, weights):
            routed = xm.dispatch(
                x, idx, weights, num_experts=problem.experts, axis_name=names, wire=wire, config=config
            )
            return routed.x, xm.combine(routed.x, routed.handle, weighted=False, wire=wire, config=config)

        rows, out = self.run(body, x, problem.idx, problem.weights)
        expected = oracle.dispatch(x, problem.idx, problem.weights, num_experts=problem.experts, wire=wire)
        assert_bits(rows, expected.rows, "rows", where=expected.specified, any_nan=wire is not None)
        combined = oracle.combine(expected.rows, expected, weighted=False, wire=wire, axis_sizes=self.levels())
        assert_bits(out, combined, "combined", any_nan=True)
        assert np.isnan(out[-1, -1]).all() and not np.isnan(out[2:-1]).any() and not np.isnan(out[:, 2:-1]).any()

    @pytest.mark.parametrize("layout", cases.LAYOUTS)
    def test_gradients_are_the_transposed_operation(self, layout):
        """`dispatch`'s cotangents return through a combine, `combine`'s through a redispatch: bit for bit."""
        case = Case("gradients", layout=layout, dtype="float32")
        problem = self.problem(case, "uniform")
        rng = np.random.default_rng(7)
        weighted = layout != "ranked"
        routed, names, config = problem.expected, problem.axis_name, self.config
        rows_bar = rng.standard_normal(routed.rows.shape).astype(np.float32)
        rows_bar[~routed.specified] = np.nan  # a gradient that reads an unspecified row shows it
        out_bar = rng.standard_normal(problem.x.shape).astype(np.float32)
        weights_bar = rng.standard_normal(routed.weights.shape).astype(np.float32)
        weights_bar[~routed.specified] = np.nan

        def body(x, idx, weights, y, rows_bar, out_bar, weights_bar):
            options = {"num_experts": problem.experts, "axis_name": names, "layout": layout, "config": config}
            _, pull = jax.vjp(lambda x, w: _rows_and_weights(xm.dispatch(x, idx, w, **options)), x, weights)
            dx, dweights = pull((rows_bar, weights_bar))
            handle = xm.dispatch(x, idx, weights, **options).handle
            _, pull = jax.vjp(lambda y: xm.combine(y, handle, weighted=weighted, config=config), y)
            return dx, dweights, *pull(out_bar)

        dx, dweights, dy = self.run(
            body, problem.x, problem.idx, problem.weights, problem.y, rows_bar, out_bar, weights_bar
        )
        assert_bits(dx, oracle.combine(rows_bar, routed, weighted=False, axis_sizes=self.levels()), "gradient of x")
        assert_bits(dweights, oracle.weights_from_rows(weights_bar, routed), "gradient of weights")
        expected = oracle.redispatch(out_bar, routed)
        if weighted:
            expected = expected * np.where(routed.specified, routed.weights, 0)[..., None]
        assert_bits(np.abs(dy), np.abs(np.where(routed.specified[..., None], expected, 0)), "gradient of y")
        assert_bits(dy, expected, "gradient of y", where=routed.specified & (routed.weights != 0 if weighted else True))

    @pytest.mark.parametrize("layout", cases.LAYOUTS)
    def test_tangents_of_weights_travel_without_rows(self, layout):
        """A tangent of router weights arrives at the rows as weights do."""
        problem = self.problem(Case("tangents", layout=layout, dtype="float32"), "uniform")
        dots = np.random.default_rng(9).standard_normal(problem.weights.shape).astype(np.float32)
        options = {"axis_name": problem.axis_name, "layout": layout, "config": self.config}

        def body(x, idx, weights, dots):
            def weights_of(w):
                return _rows_and_weights(xm.dispatch(x, idx, w, num_experts=problem.experts, **options))[1]

            return jax.jvp(weights_of, (weights,), (dots,))[1]

        found = self.run(body, problem.x, problem.idx, problem.weights, dots)
        expected = oracle.dispatch(problem.x, problem.idx, dots, num_experts=problem.experts, layout=layout)
        assert_bits(found, expected.weights, "tangent of the weights", where=expected.specified)

    # -- experts in slots --------------------------------------------------------------------------
    def test_a_placement_changes_no_bit(self):
        """Replicas on several ranks, and an exact balance: tokens get what they get with experts at home. Weights move
        to their slots, and what lies there is added up at home."""
        ranks = self.num_ranks
        problem = self.problem(Case("placement", experts=lambda r: 2 * r + 1, top_k=3), "zipf")
        names, config, experts = problem.axis_name, self.config, problem.experts
        local = -(-experts // ranks)
        placement = xm.balance.plan(np.bincount(problem.idx.ravel(), minlength=experts), ranks, local + 1)
        held = np.random.default_rng(23).integers(-8, 8, (ranks, local, 2, 128)).astype(np.float32)

        def body(x, idx, weights, held):
            outs, rows = [], []
            for options in ({"placement": placement}, {"balance": "exact", "slots_per_rank": local + 1}):
                routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name=names, config=config, **options)
                outs.append(xm.combine(routed.x, routed.handle, config=config))
                rows.append(routed.num_tokens_per_expert.sum())
            moved = placement.move(held, None, placement, config=config)
            return outs, rows, moved, placement.reduce(moved, config=config)

        outs, rows, moved, back = self.run(body, problem.x, problem.idx, problem.weights, held)
        expected = oracle.combine(problem.expected.rows, problem.expected, weighted=True, axis_sizes=self.levels())
        assert_bits(outs[0], expected, "with a placement")
        assert_bits(outs[1], expected, "with an exact balance")
        assert rows[0].sum() == rows[1].sum() == (problem.idx >= 0).sum()
        assert rows[1].max() <= self.num_tokens * 3
        flat = held.reshape(ranks * local, 2, 128)
        assert_bits(moved, np.where(placement.experts[..., None, None] < 0, 0, flat[placement.experts]), "moved")
        copies = np.pad(placement.num_replicas, (0, ranks * local - experts)).reshape(ranks, local, 1, 1)
        assert_bits(np.abs(back), np.abs(held * copies.astype(np.float32)), "added up at home")

    # -- tokens that every rank has ----------------------------------------------------------------
    @pytest.mark.parametrize("layout", ["grouped", "padded"])
    def test_replicated_tokens(self, layout):
        """Each rank's rows are those of a dispatch among one rank. Small integers: every sum is exact in any order."""
        rng, ranks, tokens = np.random.default_rng(19), self.num_ranks, self.num_tokens
        experts, local, align = 2 * ranks + 3, -(-(2 * ranks + 3) // ranks), 4 if layout == "grouped" else 1
        x = rng.integers(-8, 8, (tokens, 128)).astype("bfloat16")
        idx = ROUTINGS["out_of_range"](rng, (1, tokens, 3), experts)[0].astype(np.int32)
        weights = rng.integers(-8, 8, idx.shape).astype(np.float32) / 8
        expected = [
            oracle.dispatch(
                x[None],
                np.where(oracle.sanitize(idx, experts) // local == rank, idx - rank * local, -1)[None],
                weights[None],
                num_experts=local,
                layout=layout,
                alignment=align,
            )
            for rank in range(ranks)
        ]
        y = rng.integers(-8, 8, (ranks, *expected[0].specified.shape[1:], 128)).astype("bfloat16")
        total = np.zeros(x.shape, np.float32)
        for rank, part in enumerate(expected):
            total += oracle.combine(y[rank][None].astype(np.float32), part, weighted=True)[0]
            owned = np.zeros(part.specified.size, bool)
            owned[part.positions[part.positions >= 0]] = True
            y[rank].reshape(owned.size, -1)[~owned] = np.nan

        def body(x, idx, weights, y):
            routed = xm.dispatch_replicated(
                x, idx, weights, num_experts=experts, axis_name="ep", layout=layout, alignment=align
            )
            return routed, xm.combine_replicated(y, routed.handle)

        everywhere = [np.broadcast_to(a, (ranks, *a.shape)) for a in (x, idx, weights)]
        routed, out = self.run(body, *everywhere, y)
        for rank, part in enumerate(expected):
            mine = jax.tree.map(lambda a, rank=rank: a[rank], routed)
            where = part.specified[0]
            assert_bits(mine.x, part.rows[0], "rows", where=where)
            assert_bits(mine.weights, part.weights[0], "weights", where=where)
            assert_bits(mine.num_tokens_per_expert, part.num_tokens_per_expert[0], "num_tokens_per_expert")
            assert_bits(mine.num_dropped, part.num_dropped[0], "num_dropped")
            if layout == "grouped":
                assert_bits(mine.group_sizes, part.group_sizes[0], "group_sizes")
            assert_bits(mine.handle.positions, part.positions[0, 0], "handle.positions")
            assert_bits(out[rank], total.astype(y.dtype), "combined")

    # -- drop-ins ----------------------------------------------------------------------------------
    def needs_exchange(self) -> None:
        if self.no_exchange:
            pytest.skip(self.no_exchange)

    @pytest.mark.parametrize(("shape", "split", "concat", "tiled", "groups", "dtype"), ALL_TO_ALL)
    def test_all_to_all(self, shape, split, concat, tiled, groups, dtype):
        self.needs_exchange()
        ranks = self.num_ranks
        if ranks < 4 and groups > 1:
            pytest.skip("groups of one rank")
        index_groups = None if groups == 1 else np.arange(ranks).reshape(groups, -1).tolist()
        x = np.random.default_rng(11).integers(-100, 100, (ranks, *shape(ranks))).astype(dtype)

        def body(x):
            ours = xm.all_to_all(
                x, "ep", split, concat, axis_index_groups=index_groups, tiled=tiled, config=self.config
            )
            theirs = jax.lax.all_to_all(x, "ep", split, concat, axis_index_groups=index_groups, tiled=tiled)
            return ours, theirs

        ours, theirs = self.run(body, x)
        assert_bits(ours, oracle.all_to_all(x, split, concat, groups=index_groups, tiled=tiled), "all_to_all")
        assert_bits(ours, theirs, "all_to_all against jax.lax")

    @pytest.mark.parametrize(("shape", "axis", "tiled", "groups", "dtype"), ALL_GATHER)
    def test_all_gather(self, shape, axis, tiled, groups, dtype):
        """Bits of `jax.lax.all_gather` and of its gradient."""
        if groups > 1:
            self.needs_exchange()
        if self.num_ranks < 4 and groups > 1:
            pytest.skip("groups of one rank")
        index_groups = None if groups == 1 else np.arange(self.num_ranks).reshape(groups, -1).tolist()
        x = np.random.default_rng(11).integers(-8, 8, (self.num_ranks, *shape)).astype(dtype)

        def body(x):
            call = {"axis": axis, "tiled": tiled, "axis_index_groups": index_groups}
            results = []
            for gather in (functools.partial(xm.all_gather, config=self.config), jax.lax.all_gather):
                out = gather(x, "ep", **call)
                grad = ()
                if dtype in ("float32", "bfloat16"):
                    weights = jnp.arange(out.size).reshape(out.shape).astype(out.dtype) % 16
                    grad = jax.grad(lambda x, g=gather, w=weights: jnp.sum(g(x, "ep", **call) * w))(x)
                results.append((out, grad))
            return results

        ours, theirs = self.run(body, x)
        assert_bits(ours[0], theirs[0], "all_gather")
        if dtype in ("float32", "bfloat16"):
            assert_bits(ours[1], theirs[1], "gradient of all_gather")

    @pytest.mark.parametrize("wire", ["float8_e4m3fn", "int8:ue8m0"])
    def test_all_gather_through_a_wire(self, wire):
        """Every rank's part is rounded, this rank's too; the gradient is that without a wire."""
        x = np.random.default_rng(12).standard_normal((self.num_ranks, 6, 200)).astype("bfloat16")
        dtype, _, scales = wire.partition(":")

        def body(x):
            def loss(x, wire):
                out = xm.all_gather(x, "ep", axis=1, tiled=True, wire=wire, config=self.config)
                return jnp.sum(out.astype(jnp.float32) * jnp.arange(out.shape[1])), out

            (_, out), grad = jax.value_and_grad(loss, has_aux=True)(x, wire)
            rounded = xm.dequantize(xm.quantize(x, dtype, scales or "float32"), x.dtype)
            plain = jax.grad(lambda x: loss(x, None)[0])(x)
            return out, jax.lax.all_gather(rounded, "ep", axis=1, tiled=True), grad, plain

        out, expected, grad, plain = self.run(body, x)
        assert_bits(out, expected, "all_gather through a wire")
        assert_bits(grad, plain, "its gradient")

    def test_all_gather_matmul(self):
        """Bits of the composition, forward and backward: every sum is exact. All rows of a rank are multiplied by
        themselves where the backend can do so."""
        rng = np.random.default_rng(14)
        x = rng.integers(-4, 4, (self.num_ranks, 24, 128)).astype("bfloat16")
        w = rng.integers(-4, 4, (self.num_ranks, 128, 40)).astype("bfloat16")
        config = dataclasses.replace(self.config, mode="throughput")

        def body(x, w):
            results = []
            for product in (
                lambda x, w: xm.all_gather_matmul(x, w, "ep", config=config),
                lambda x, w: jnp.matmul(jax.lax.all_gather(x, "ep", tiled=True), w),
            ):
                out, back = jax.vjp(product, x, w)
                results.append((out, back(jnp.ones_like(out))))
            return results

        ours, theirs = self.run(body, x, w)
        assert_bits(ours[0], theirs[0], "all_gather_matmul")
        for mine, expected, name in zip(ours[1], theirs[1], "xw", strict=True):
            assert_bits(mine, expected, f"its gradient of {name}")

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
    @pytest.mark.parametrize("trailing", [(128,), (), (3, 5)], ids=str)
    @pytest.mark.parametrize("kind", ["random", "empty", "one_pair"])
    def test_ragged_all_to_all(self, kind, trailing, dtype):
        self.needs_exchange()
        operands = ragged_operands(np.random.default_rng(13), self.num_ranks, kind, trailing, dtype)

        def body(*operands):
            return xm.ragged_all_to_all(*operands, axis_name="ep", config=self.config)

        out = self.run(body, *operands, key=("ragged", trailing, dtype, self.config))
        assert_bits(out, oracle.ragged_all_to_all(*operands), "ragged_all_to_all")

    def test_rows_outside_are_left_out_of_a_ragged_all_to_all(self):
        """Segments that begin before the operand or the output, or end behind them; and their gradients."""
        self.needs_exchange()
        ranks, last = self.num_ranks, 2**31 - 1
        operand, output, *segments = ragged_operands(np.random.default_rng(13), ranks, "empty", (128,), "float32")
        begin, sizes, to, recv = segments
        cases = ((-1, 3, 0), (operand.shape[1] - 1, last, 2), (0, 3, output.shape[1] - 1), (last, last, 0), (0, 4, -2))
        for source in range(ranks):
            dest = (source + 1) % ranks
            begin[source, dest], sizes[source, dest], to[source, dest] = cases[source % len(cases)]
        recv[:] = sizes.T

        def body(operand, output, *segments):
            exchange = lambda a, b: xm.ragged_all_to_all(a, b, *segments, axis_name="ep", config=self.config)  # noqa: E731
            out, back = jax.vjp(exchange, operand, output)
            return out, *back(jnp.ones_like(out))

        out, operand_ct, output_ct = self.run(body, operand, output, *segments)
        assert_bits(out, oracle.ragged_all_to_all(operand, output, *segments), "ragged_all_to_all")
        zeros, ones = np.zeros_like(output), np.ones_like(operand)
        assert_bits(output_ct, 1 - oracle.ragged_all_to_all(ones, zeros, *segments), "the gradient of the output")
        returned = oracle.ragged_all_to_all(zeros + 1, ones * 0, to.T, recv, begin.T, sizes)
        assert_bits(operand_ct, returned, "the gradient of the operand")

    def test_ragged_all_to_all_in_segments(self):
        """Three segments for each peer, one of them empty."""
        self.needs_exchange()
        operands = in_pieces(*ragged_operands(np.random.default_rng(17), self.num_ranks, "random", (128,), "float32"))

        def body(*operands):
            return xm.ragged_all_to_all(*operands, axis_name="ep", config=self.config)

        assert_bits(self.run(body, *operands), oracle.ragged_all_to_all(*operands), "ragged_all_to_all in segments")


# -- machinery -------------------------------------------------------------------------------------
@dataclasses.dataclass
class Problem:
    """Operands of one case on all ranks, the program that runs it, and the oracle's results."""

    case: Case
    config: xm.KernelConfig
    axis_name: tuple[str, ...]
    experts: int
    capacity: int | None
    x: np.ndarray
    scales: np.ndarray | None
    idx: np.ndarray
    weights: np.ndarray | None
    y: np.ndarray
    x2: np.ndarray
    expected: oracle.Dispatched

    @property
    def key(self) -> Any:
        return (self.case, self.capacity, self.config, self.axis_name)

    @property
    def operands(self) -> tuple[Any, ...]:
        x = self.x if self.scales is None else xm.BlockScaled(self.x, self.scales)
        return x, self.idx, self.weights, self.y, self.x2

    @property
    def combines(self) -> tuple[bool, ...]:
        """Values of `weighted`."""
        return (False,) if self.case.layout == "ranked" else (False, True)

    def dispatch(self, x, idx, weights) -> xm.Routed:
        case = self.case
        return xm.dispatch(
            x,
            idx,
            weights,
            num_experts=self.experts,
            axis_name=self.axis_name,
            layout=case.layout,
            capacity=self.capacity,
            alignment=case.alignment,
            drop=case.drop,
            wire=case.wire,
            config=self.config,
        )

    def redispatch(self, x2, handle):
        return xm.redispatch(x2, handle, config=self.config)

    def combine(self, y, handle, weighted: bool):
        return xm.combine(y, handle, weighted=weighted, wire=self.case.wire, config=self.config)

    def body(self, x, idx, weights, y, x2) -> dict[str, Any]:
        routed = self.dispatch(x, idx, weights)
        out = {"routed": routed, "rows": self.redispatch(x2, routed.handle)}
        return out | {f"combined_{weighted}": self.combine(y, routed.handle, weighted) for weighted in self.combines}


class _Keyed:
    """A function that equals another with the same key: the compiled program is then shared."""

    def __init__(self, body, key):
        self.body, self.key = body, key

    def __call__(self, *args):
        return self.body(*args)

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return isinstance(other, _Keyed) and self.key == other.key


@functools.lru_cache(maxsize=64)
def _compiled(body, mesh: jax.sharding.Mesh, axis_name: tuple[str, ...]):
    def on_each_rank(*stacked):
        return jax.tree.map(lambda a: a[None], body(*jax.tree.map(lambda a: a[0], stacked)))

    return jax.jit(jax.shard_map(on_each_rank, mesh=mesh, in_specs=P(axis_name), out_specs=P(axis_name)))


def _rows_and_weights(routed: xm.Routed):
    return routed.x, routed.topk_weights if routed.weights is None else routed.weights


def check_routed(routed: xm.Routed, expected: oracle.Dispatched, capacity: int | None, case: Case) -> None:
    """Checks every field of `Routed` and of its handle against the oracle."""
    where = expected.specified
    x = routed.x
    if case.block_scaled:
        assert_bits(x.scales, expected.row_scales, "routed.x.scales", where=where)
        x = x.values
    assert_bits(x, expected.rows, "routed.x", where=where)
    if capacity is not None and case.layout != "padded":
        assert x.shape[1] == capacity
    assert_bits(routed.num_tokens_per_expert, expected.num_tokens_per_expert, "num_tokens_per_expert")
    assert_bits(routed.num_dropped, expected.num_dropped, "num_dropped")
    if case.layout == "grouped":
        assert_bits(routed.group_sizes, expected.group_sizes, "group_sizes")
    else:
        assert routed.group_sizes is None
    if case.layout == "ranked":
        assert_bits(routed.topk_idx, expected.local_idx, "topk_idx")
        assert routed.weights is None
        assert_bits(routed.topk_weights, expected.weights, "topk_weights")
    else:
        assert routed.topk_idx is None and routed.topk_weights is None
        assert_bits(routed.weights, expected.weights, "weights", where=where)
    assert_bits(routed.handle.topk_idx, expected.topk_idx, "handle.topk_idx")
    assert_bits(routed.handle.positions, expected.positions, "handle.positions")
    assert_bits(routed.handle.recv_counts, expected.recv_counts, "handle.recv_counts")
