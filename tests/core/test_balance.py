"""Placements: plans, the choice of replicas, moved weights, and results with the bits of those without replicas."""

import contextlib
import dataclasses
import functools
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import oracle
from tests.support.cases import ROUTINGS
from tests.support.checks import assert_bits
from xen_moe_jax import _home_sums, _layout, backends

R, S, E, T, K, H = 4, 4, 11, 12, 4, 16
EP = P("ep")


# -- plans -------------------------------------------------------------------------------------------------------------
def check(placement, num_experts, ranks, slots, alive):
    """Asserts the properties of every placement, by plain loops."""
    assert placement.experts.shape == (ranks, slots) and placement.slots.shape == (num_experts, ranks)
    found = [[] for _ in range(num_experts)]
    for rank in range(ranks):
        held = [e for e in placement.experts[rank].tolist() if e >= 0]
        assert len(set(held)) == len(held), "an expert twice on one rank"
        assert alive[rank] or not held
        for slot, expert in enumerate(placement.experts[rank].tolist()):
            if expert >= 0:
                found[expert].append(rank * slots + slot)
    for expert, where in enumerate(found):
        assert placement.slots[expert].tolist() == where + [-1] * (ranks - len(where))
        assert placement.num_replicas[expert] == len(where)


@given(data=st.data())
def test_every_plan_holds_every_expert_on_ranks_that_are_alive(data):
    ranks = data.draw(st.integers(1, 9))
    per_node = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    alive = np.ones(ranks, bool)
    alive[list(data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1)))] = False
    experts = data.draw(st.integers(1, 30))
    least = data.draw(st.integers(1, min(3, int(alive.sum()))))
    slots = -(-experts * least // int(alive.sum())) + data.draw(st.integers(0, 3))
    counts = data.draw(st.lists(st.integers(0, 10**6), min_size=experts, max_size=experts))
    most = data.draw(st.integers(experts * least, ranks * slots) | st.none())
    options = {"ranks_per_node": per_node, "alive": alive, "min_replicas": least, "max_replicas": most}
    placement = xm.balance.plan(counts, ranks, slots, **options)
    check(placement, experts, ranks, slots, alive)
    assert (placement.num_replicas >= least).all() and placement.num_replicas.sum() <= (most or ranks * slots)
    again = xm.balance.plan(counts, ranks, slots, **options)
    chex.assert_trees_all_equal(placement, again)


def test_home_is_where_experts_are_without_a_placement():
    placement = xm.balance.home(E, R)
    assert placement.experts.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, -1]]
    check(placement, E, R, 3, np.ones(R, bool))


def zipf(exponent, experts, rng):
    return rng.permutation(1.0 / np.arange(1, experts + 1) ** exponent)


def draw(share, tokens, top_k, rng):
    """`top_k` different experts of each token, int32 `[tokens, top_k]`."""
    noise = np.log(share) + rng.gumbel(size=(tokens, len(share)))
    return np.argpartition(-noise, top_k, axis=1)[:, :top_k].astype(np.int32)


def busiest(load, placement):
    """Rows of the busiest rank over the mean of all, if every replica takes its part."""
    each = np.append(load / placement.num_replicas, 0.0)
    ranks = each[placement.experts].sum(axis=1)
    return ranks.max() / ranks.mean()


@pytest.mark.parametrize("exponent", [1.1, 1.5])
@pytest.mark.parametrize(
    ("experts", "ranks", "slots", "most", "bound"),
    [(64, 8, 9, 72, 1.01), (256, 64, 5, 288, 1.03), (256, 64, 5, 320, 1.01)],
)
def test_plan_balances_skewed_experts_quickly(experts, ranks, slots, most, bound, exponent):
    """With 12.5% and with 25% more replicas than experts. No plan is better than `floor`, the load of the largest
    replica over the mean of the ranks."""
    for seed in range(3):
        load = zipf(exponent, experts, np.random.default_rng(seed))
        copies = np.ones(experts)
        for _ in range(most - experts):
            copies[np.argmax(load / copies)] += 1
        floor = np.max(load / copies) / load.mean() * ranks / experts
        assert (floor > 1.03) == (exponent == 1.5 and most == 288), "Zipf 1.5 takes more than 12.5% on 64 ranks"
        start = time.process_time()
        placement = xm.balance.plan(load, ranks, slots, max_replicas=most)
        spent = time.process_time() - start
        assert busiest(load, placement) <= max(bound, 1.02 * floor) and placement.num_replicas.sum() <= most
        assert busiest(load, xm.balance.home(experts, ranks)) > 1.8
        assert spent < 0.05


def test_plan_balances_nodes_and_ranks():
    load = zipf(1.1, 64, np.random.default_rng(1))
    placement = xm.balance.plan(load, 16, 5, ranks_per_node=4, alive=np.arange(16) != 6)
    each = np.append(load / placement.num_replicas, 0.0)
    ranks = each[placement.experts].sum(axis=1)
    nodes = ranks.reshape(4, 4).sum(axis=1) / [4, 3, 4, 4]
    assert nodes.max() / nodes.mean() < 1.02 and ranks.max() / ranks[ranks > 0].mean() < 1.05


def test_a_plan_lasts_while_the_load_drifts():
    """Planned on one batch, measured on the rows of the next hundred."""
    rng = np.random.default_rng(3)
    logits = np.log(zipf(1.1, 64, rng))
    batch = functools.partial(draw, tokens=2048, top_k=8, rng=rng)
    placement = xm.balance.plan(np.bincount(batch(np.exp(logits)).ravel(), minlength=64), 8, 9)
    ratios = []
    for _ in range(100):
        logits = logits + 0.005 * rng.standard_normal(64)
        ratios.append(busiest(np.bincount(batch(np.exp(logits)).ravel(), minlength=64), placement))
    assert np.mean(ratios) <= 1.10


# -- replicas ----------------------------------------------------------------------------------------------------------
def test_route_is_even_on_each_rank_and_over_all():
    rng = np.random.default_rng(4)
    share = zipf(1.5, 64, rng)
    idx = np.stack([draw(share, 256, 8, rng) for _ in range(8)])
    placement = xm.balance.plan(np.bincount(idx.ravel(), minlength=64), 8, 9)
    route = jax.jit(lambda placement, idx, rank: placement.route(idx, rank))
    slots = np.stack([route(placement, idx[rank], rank) for rank in range(8)])
    assert (placement.experts.reshape(-1)[slots] == idx).all()
    for rank in range(8):
        for expert in range(64):
            mine = placement.slots[expert][: placement.num_replicas[expert]]
            parts = [(slots[rank] == slot).sum() for slot in mine]
            assert max(parts) - min(parts) <= 1
    rows = np.bincount(slots.ravel() // 9, minlength=8)
    assert rows.max() / rows.mean() < 1.02
    assert_bits(route(placement, idx[3], 3), slots[3], "the same again")


@pytest.mark.parametrize("size", [1, 127, 128, 300])
def test_entries_are_numbered_by_blocks_as_by_a_sort(size):
    bins = np.random.default_rng(size).integers(-2, 9, size, np.int32)
    (order, counts), (expected, their_counts) = (
        jax.jit(number, static_argnums=1)(bins, 7) for number in (_layout.order_by_blocks, _layout.order_within_bins)
    )
    used = (bins >= 0) & (bins < 7)
    assert_bits(order[used], expected[used], "order")
    assert_bits(counts, their_counts, "counts")


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32"])
def test_route_leaves_unused_slots_and_lost_experts_out(dtype):
    placement = xm.balance.from_experts(np.array([[0, 1], [2, -1]]), 4)
    idx = np.array([[0, 1, 2], [3, 4, 127]], dtype)
    assert placement.route(idx, 1).tolist() == [[0, 1, 2], [-1, -1, -1]]


def test_count_leaves_padding_out():
    idx = np.array([[0, 2], [2, -1], [1, 2], [5, 2**31 - 1]])
    assert xm.balance.count(idx, 4).tolist() == [1, 1, 3, 0]
    assert xm.balance.count(idx, 4, mask=np.array([True, False, False, True])).tolist() == [1, 0, 1, 0]


@given(seed=st.integers(0, 2**16), gone=st.integers(0, R - 1))
def test_with_two_replicas_no_single_rank_is_missed(seed, gone):
    counts = np.random.default_rng(seed).integers(0, 100, E) ** 3
    placement = xm.balance.plan(counts, R, -(-2 * E // R), min_replicas=2)
    assert (placement.without(np.arange(R) != gone).num_replicas >= 1).all()


@given(seed=st.integers(0, 2**16), gone=st.integers(0, R - 1))
def test_without_a_rank_its_replicas_serve(seed, gone):
    counts = np.random.default_rng(seed).integers(1, 100, E)
    placement = xm.balance.plan(counts, R, S)
    alive = np.arange(R) != gone
    left = placement.without(alive)
    check(left, E, R, S, alive)
    assert (left.experts[alive] == placement.experts[alive]).all()
    chex.assert_trees_all_equal(left, jax.tree.map(np.asarray, placement.without(jnp.asarray(alive))))


@given(data=st.data())
def test_repair_gives_lost_experts_a_slot_and_moves_nothing_else(data):
    ranks, experts = data.draw(st.integers(2, 6)), data.draw(st.integers(1, 20))
    alive = np.ones(ranks, bool)
    alive[list(data.draw(st.sets(st.integers(0, ranks - 1), min_size=1, max_size=ranks - 1)))] = False
    slots = -(-experts // int(alive.sum())) + data.draw(st.integers(0, 2))
    counts = np.array(data.draw(st.lists(st.integers(0, 999), min_size=experts, max_size=experts)))
    placement = xm.balance.plan(counts, ranks, slots)
    left, new = placement.without(alive), xm.balance.repair(placement, alive, counts)
    check(new, experts, ranks, slots, alive)
    assert (new.num_replicas >= 1).all()
    changed = new.experts[new.experts != left.experts]
    assert sorted(changed) == np.flatnonzero(left.num_replicas == 0).tolist()


def test_repair_takes_empty_slots_first_and_then_the_least_needed_replica():
    placement = xm.balance.from_experts([[0, 1, 2], [0, 1, 3], [0, 4, -1]], 5)
    alive = np.array([True, True, False])
    counts = [90, 10, 5, 5, 1]
    new = xm.balance.repair(placement, alive, counts)
    assert new.experts.tolist() == [[0, 4, 2], [0, 1, 3], [-1, -1, -1]]  # expert 1 needs its second replica less than 0
    alive = np.array([True, False, True])
    assert xm.balance.repair(placement, alive, counts).experts.tolist() == [[0, 1, 2], [-1] * 3, [0, 4, 3]]


# -- weights and gradients ---------------------------------------------------------------------------------------------
@functools.cache
def mesh():
    if jax.device_count() < R:
        pytest.skip(f"needs {R} devices, has {jax.device_count()}")
    return jax.make_mesh((R,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:R])


def random_placement(seed, lost=False):
    """Random slots, most of them full, every expert somewhere unless `lost`."""
    rng = np.random.default_rng(seed)
    if lost:
        return xm.balance.from_experts(np.where(np.arange(S) < 2, np.arange(R)[:, None] * 2 + np.arange(S), -1), E)
    return xm.balance.plan(rng.integers(0, 50, E) ** 2, R, S, alive=np.arange(R) != (seed % R if seed % 2 else R))


@functools.cache
def moving():
    def body(w, g, old, new):
        moved, back = jax.vjp(lambda w: new.move(w, old, new), w)
        return moved, new.reduce(g, old), back(g)[0]

    ranks = jax.shard_map(body, mesh=mesh(), in_specs=(EP, EP, P(), P()), out_specs=EP)
    return jax.jit(ranks), jax.jit(body)


@pytest.mark.parametrize("seed", range(4))
def test_move_and_reduce_equal_plain_loops_inside_shard_map_and_outside(seed):
    """Weights go to their slots; gradients are added in float32 in ascending order of the slots, rounded once."""
    rng = np.random.default_rng(seed)
    old, new = random_placement(seed), random_placement(seed + 5)
    w = rng.standard_normal((R * S, 3, 2)).astype("bfloat16")
    g = rng.standard_normal((R * S, 3, 2)).astype("bfloat16")
    source = np.full(R * S, -1)
    for slot, expert in enumerate(new.experts.reshape(-1)):
        if expert >= 0:
            where = [s for s in old.slots[expert].tolist() if s >= 0]
            own = [s for s in where if s // S == slot // S]
            source[slot] = own[0] if own else where[slot // S % len(where)]
    moved = np.where((source >= 0)[:, None, None], w[source], 0)
    total = np.zeros((R * S, 3, 2), np.float32)
    for slot in range(R * S):
        if source[slot] >= 0:
            total[source[slot]] += g[slot].astype(np.float32)
    for program in moving():
        results = program(w, g, old, new)
        for result, expected in zip(results, (moved, total.astype("bfloat16"), total.astype("bfloat16")), strict=True):
            assert_bits(result, expected, "moved, reduced, transposed")
    assert moving()[0]._cache_size() == 1
    table = xm.balance.moves(old, new)
    assert (table[:, 0] * S + table[:, 1] == source[table[:, 2] * S + table[:, 3]]).all()
    assert len(table) == (source >= 0).sum()


def test_gradients_of_many_replicas_outside_are_added_as_inside():
    """In float32 in ascending order, rounded once; and `reduce` has a gradient, which is `move`."""
    new = xm.balance.from_experts(np.stack([np.zeros(R, np.int32), 1 + np.arange(R)], axis=1), R + 1)
    w, g = np.random.default_rng(4).standard_normal((2, 2 * R, 64)).astype("bfloat16")
    moved, pull = jax.vjp(lambda w: new.move(w, None, new), w)
    assert_bits(pull(g)[0], new.reduce(g), "transposed outside")
    _, back = jax.vjp(new.reduce, g)
    assert_bits(back(w)[0], moved, "transpose of reduce")
    assert_bits(jax.vmap(lambda g: new.reduce(g))(np.stack([g, w]))[0], new.reduce(g), "a map over a batch")


@pytest.mark.parametrize("specs", [P("ep"), P(None, "tp"), P("ep", "tp")], ids=str)
def test_global_weights_on_explicit_axes(specs):
    """The axes of `jax.make_mesh` are explicit: what is moved stays sharded as it was."""
    mesh = jax.make_mesh((R, 2), ("ep", "tp"))
    new, w = random_placement(2), np.random.default_rng(2).standard_normal((R * 3, 4)).astype(np.float32)

    def there_and_back(w):
        moved = new.move(w, None, new)
        return moved, new.reduce(moved * moved), jax.grad(lambda w: jnp.sum(new.move(w, None, new) ** 2))(w)

    expected = there_and_back(w)
    for context in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        placed = jax.device_put(w, jax.NamedSharding(mesh, specs))
        with context:
            found = new.move(placed, None, new), new.reduce(new.move(placed, None, new))
    with jax.set_mesh(mesh):
        in_jit = jax.jit(there_and_back)(placed)
    for result, wanted in zip((found[0], *in_jit), (expected[0], *expected), strict=True):
        assert_bits(result, np.asarray(wanted), "on explicit axes")
        assert jax.typeof(result).sharding.spec == jax.typeof(placed).sharding.spec
    idx = jax.device_put(np.arange(24, dtype=np.int32).reshape(8, 3) % 13, jax.NamedSharding(mesh, P("ep")))
    assert_bits(new.route(idx, 1), new.route(np.asarray(idx), 1), "route")
    counted, plain = (xm.get_dispatch_layout(i, num_experts=E, num_ranks=R) for i in (idx, np.asarray(idx)))
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), "counts"), counted, plain)


def test_moved_weights_and_gathered_arrays_know_the_nodes_of_the_job(monkeypatch):
    """Where the backend finds several nodes, weights move by XLA's collectives, as with `ranks_per_node` given."""
    monkeypatch.setattr(backends, "ranks_per_node", lambda sizes, backend: 2)
    weights = jnp.zeros((R * S, 3))

    def body(weights):
        moved = new.move(weights, old, new, axis_name="ep")
        return new.reduce(moved, old, axis_name="ep"), xm.all_gather(weights, "ep")

    old, new = random_placement(0), random_placement(5)
    traced = jax.make_jaxpr(jax.shard_map(body, mesh=mesh(), in_specs=EP, out_specs=EP))(weights)
    (inner,) = (e.params["jaxpr"] for e in traced.eqns if "jaxpr" in e.params)
    found = {e.primitive.name: e.params["config"].ranks_per_node for e in inner.eqns if "config" in e.params}
    assert len(found) == 3 and set(found.values()) == {2}, found


def test_an_expert_that_is_nowhere_is_nan_and_named():
    lost, whole = random_placement(0, lost=True), random_placement(2)
    w = np.ones((R * S, 2), np.float32)
    moved = np.asarray(whole.move({"w": w}, lost, whole)["w"])
    nowhere = np.isin(whole.experts.reshape(-1), np.flatnonzero(lost.num_replicas == 0))
    assert np.isnan(moved[nowhere]).all() and np.isfinite(moved[~nowhere]).all()
    ranks = jax.shard_map(lambda w: whole.move(w, lost, whole), mesh=mesh(), in_specs=EP, out_specs=EP)
    assert_bits(jax.jit(ranks)(w), moved, "the same on ranks", any_nan=True)
    assert (np.asarray(whole.move(w.astype(np.int8), lost, whole))[nowhere] == 0).all()
    with pytest.raises(ValueError, match=r"experts \[.*10.*\] are nowhere"):
        xm.balance.moves(lost, whole)


def test_what_only_an_inactive_rank_has_is_nowhere():
    old, new = random_placement(2), random_placement(7)
    w = np.arange(R * S * 2, dtype=np.float32).reshape(R * S, 2)
    ranks = jax.shard_map(
        lambda w, active: new.move(w, old, new, active=active), mesh=mesh(), in_specs=(EP, P()), out_specs=EP
    )
    program = jax.jit(ranks)
    for active in np.eye(R, dtype=bool) ^ True:
        moved = np.asarray(program(w, active)).reshape(R, S, 2)
        left = old.without(active)
        for rank in np.flatnonzero(active):
            for slot, expert in enumerate(new.experts[rank]):
                if expert < 0:
                    assert (moved[rank, slot] == 0).all()
                elif left.num_replicas[expert] == 0:
                    assert np.isnan(moved[rank, slot]).all()
                else:
                    assert any((moved[rank, slot] == w[at]).all() for at in left.slots[expert] if at >= 0)
    with pytest.raises(ValueError, match=r"move: active is bool\[3\]: must be bool\[4\]"):
        new.move(w, old, new, active=np.ones(3, bool))


# -- dispatch and combine ----------------------------------------------------------------------------------------------
OPTIONS = {
    "grouped": {"capacity": R * T * K},  # room for tokens that name an expert several times, too
    "aligned": {"alignment": 4},
    "padded": {"layout": "padded"},
    "fp8-dispatch": {"wire": "float8_e4m3fn"},
}


def experts(rows, sizes, weights):
    """A matmul by the weights of each row's expert, computed row by row: the same bits wherever the row is."""
    if rows.ndim == 3:
        return jnp.einsum("lmh,lhf->lmf", rows, weights, precision="highest").astype(rows.dtype)
    ends = jnp.cumsum(sizes)
    of_row = jnp.minimum(jnp.sum(jnp.arange(rows.shape[0])[:, None] >= ends, axis=1), len(weights) - 1)
    return rows * weights[of_row, :, 0]


def layer(x, idx, topk_weights, weights, placement, *, start=False, **options):
    if placement is not None:
        weights = placement.move(weights, None, placement)
    options = {"num_experts": E, "axis_name": "ep", "placement": placement, **options}
    if start:
        routed = xm.dispatch_done(xm.dispatch_start(x, idx, topk_weights, **options))
    else:
        routed = xm.dispatch(x, idx, topk_weights, **options)
    sizes = routed.num_tokens_per_expert if routed.group_sizes is None else routed.group_sizes
    y = experts(routed.x, sizes, weights)
    done = xm.combine_done(xm.combine_start(y, routed.handle)) if start else xm.combine(y, routed.handle)
    by_rank = xm.combine(y, dataclasses.replace(routed.handle, placement=None))
    return done, by_rank, routed.num_tokens_per_expert


def operands(seed, routing="zipf"):
    rng = np.random.default_rng(seed)
    idx = ROUTINGS[routing](rng, (R, T, K), E).astype(np.int32).reshape(R * T, K)
    x = rng.standard_normal((R * T, H)).astype("bfloat16")
    topk_weights = rng.uniform(-1, 1, (R * T, K)).astype(np.float32)
    return x, idx, topk_weights, rng.standard_normal((R * 3, H, H)).astype("bfloat16")


@pytest.mark.parametrize("name", OPTIONS)
def test_forward_bits_are_those_without_replicas_and_nothing_is_compiled_again(name):
    run = functools.partial(layer, **OPTIONS[name])
    plain = jax.jit(
        jax.shard_map(functools.partial(run, placement=None), mesh=mesh(), in_specs=(EP,) * 4, out_specs=EP)
    )
    ranks = jax.shard_map(run, mesh=mesh(), in_specs=(EP, EP, EP, EP, P()), out_specs=EP)
    chex.clear_trace_counter()
    placed = jax.jit(chex.assert_max_traces(lambda *args: ranks(*args), n=1))
    differs = 0
    routings = ["uniform", "zipf", "out_of_range", *(["duplicates", "hammer"] if name == "grouped" else [])]
    for seed, routing in enumerate(routings):
        args = operands(seed, routing)
        placement = random_placement(seed)
        expected, _, _ = plain(*args)
        out, by_rank, counts = placed(*args, placement)
        assert_bits(out, expected, routing)
        differs += (np.asarray(by_rank) != np.asarray(expected)).sum()
        np.testing.assert_allclose(np.asarray(by_rank, "f4"), np.asarray(expected, "f4"), rtol=0.05, atol=0.1)
        used = args[1][(args[1] >= 0) & (args[1] < E)]
        per_expert = np.bincount(
            placement.experts[placement.experts >= 0], np.asarray(counts).reshape(R, S)[placement.experts >= 0], E
        )
        assert (per_expert == np.bincount(used, minlength=E)).all()
    assert differs > 0, "sums on the ranks that hold the rows have the same bits: the test shows nothing"
    assert placed._cache_size() == 1


@pytest.mark.optimized
@pytest.mark.parametrize("at_once", [4096, 4], ids=["all-slots", "slot-by-slot"])
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=["one-axis", "two-axes"])
def test_bits_equal_the_oracle_with_all_optimisations(sizes, at_once, monkeypatch):
    """Rounding where a home and where a node ends, in a program of which XLA may fuse what it likes."""
    monkeypatch.setattr(_home_sums, "AT_ONCE", at_once)
    names = ("node", "gpu")[-len(sizes) :]
    axes = names if len(names) > 1 else names[0]
    grid = jax.make_mesh(sizes, names, axis_types=(jax.sharding.AxisType.Auto,) * len(sizes), devices=jax.devices()[:R])
    x, idx, topk_weights, _ = operands(7)

    def body(x, idx, topk_weights, placement):
        routed = xm.dispatch(x, idx, topk_weights, num_experts=E, axis_name=axes, placement=placement)
        return xm.combine(routed.x, routed.handle, placement=placement)

    ranks = P(names)
    run = jax.jit(jax.shard_map(body, mesh=grid, in_specs=(ranks, ranks, ranks, P()), out_specs=ranks))
    stacked = (a.reshape(R, T, -1) for a in (x, idx, topk_weights))
    routed = oracle.dispatch(*stacked, num_experts=E)
    expected = oracle.combine(routed.rows, routed, weighted=True, axis_sizes=sizes)
    for seed in (1, 2):
        assert_bits(
            np.asarray(run(x, idx, topk_weights, random_placement(seed))), expected.reshape(R * T, H), "combine"
        )


def test_a_thousand_random_plans_against_a_dense_layer_in_float64():
    """Random routings, weights and plans, some of them without a rank, in one program."""

    def body(x, idx, topk_weights, weights, placement):
        weights = placement.move(weights, None, placement)
        routed = xm.dispatch(x, idx, topk_weights, num_experts=E, axis_name="ep", placement=placement)
        y = routed.x * weights[jnp.minimum(routed.expert_ids(), S - 1), :, 0]
        return xm.combine(y, routed.handle)

    run = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(EP, EP, EP, EP, P()), out_specs=EP))
    x, idx, topk_weights, weights = operands(0)
    x, weights = x.astype(np.float32), weights.astype(np.float32)
    rng = np.random.default_rng(1)
    for seed in range(1000):
        placement = random_placement(seed)
        idx = np.argsort(rng.random((R * T, E)) ** rng.uniform(0.2, 4, E), axis=1)[:, :K].astype(np.int32)
        idx[rng.random(idx.shape) < 0.1] = -1
        dense = np.where(idx >= 0, topk_weights, 0).astype(np.float64)[..., None] * weights[idx, :, 0] * x[:, None]
        np.testing.assert_allclose(
            run(x, idx, topk_weights, weights, placement), dense.sum(axis=1), rtol=1e-5, atol=1e-5
        )
    assert run._cache_size() == 1


def test_start_and_done_have_the_same_bits():
    args, placement = operands(3), random_placement(3)
    programs = [
        jax.jit(
            jax.shard_map(functools.partial(layer, start=start), mesh=mesh(), in_specs=(EP,) * 4 + (P(),), out_specs=EP)
        )
        for start in (False, True)
    ]
    one, other = (program(*args, placement) for program in programs)
    for a, b in zip(one, other, strict=True):
        assert_bits(a, b, "start and done")


def test_by_rank_rows_are_added_where_they_lie():
    args, placement = operands(3), random_placement(3)
    by_rank = dataclasses.replace(placement, sums="rank")
    program = jax.jit(jax.shard_map(layer, mesh=mesh(), in_specs=(EP,) * 4 + (P(),), out_specs=EP))
    _, expected, _ = program(*args, placement)
    out, again, _ = program(*args, by_rank)
    assert_bits(out, np.asarray(expected), "sums='rank' beside a handle without its placement")
    assert_bits(again, np.asarray(expected), "the handle has no placement")
    alive = np.arange(R) != 1
    assert by_rank.without(alive).sums == xm.balance.repair(by_rank, alive).sums == "rank"


@functools.cache
def gradients(placed):
    def body(x, topk_weights, weights, idx, target, placement):
        out, _, _ = layer(x, idx, topk_weights, weights, placement)
        return jax.lax.psum(jnp.sum(out * target), "ep")

    specs = (EP,) * 5 + (P() if placed else None,)
    ranks = jax.shard_map(body, mesh=mesh(), in_specs=specs, out_specs=P())
    return jax.jit(jax.grad(ranks, argnums=(0, 1, 2)))


def test_gradients_differ_by_the_order_of_additions_alone():
    for seed in range(2):
        x, idx, topk_weights, weights = operands(seed)
        target = np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)
        args = (x.astype(np.float32), topk_weights, weights.astype(np.float32), idx, target)
        expected = gradients(False)(*args, None)
        actual = gradients(True)(*args, random_placement(seed))
        for name, a, e in zip(("x", "topk_weights", "weights"), actual, expected, strict=True):
            assert np.abs(e).max() > 0.1
            np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6, err_msg=name)


def test_a_rank_that_is_out_is_replaced_by_its_replicas_in_the_same_program():
    """Tokens of the ranks that are left get what they got before, if every expert has a replica elsewhere."""
    held = np.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 0], [1, 2, 3, -1]])
    placement = xm.balance.from_experts(held, E)
    alive = np.array([False, True, True, True])
    args = operands(5)

    def body(x, idx, topk_weights, placement, active):
        routed = xm.dispatch(x, idx, topk_weights, num_experts=E, axis_name="ep", placement=placement, active=active)
        return xm.combine(routed.x, routed.handle)

    run = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(EP, EP, EP, P(), P()), out_specs=EP))
    before = np.asarray(run(*args[:3], placement, np.ones(R, bool)))
    after = np.asarray(run(*args[:3], placement.without(alive), alive))
    assert_bits(after[T:], before[T:], "tokens of the other ranks")
    assert (after[:T] == 0).all() and np.abs(before[:T].astype("f4")).max() > 1
    assert run._cache_size() == 1


def test_tokens_of_a_rank_that_leaves_before_the_combine_are_zero():
    """Even where their router weights are NaN."""
    alive, placement = np.array([False, True, True, True]), xm.balance.home(E, R)
    x, idx, topk_weights, _ = operands(5)
    topk_weights = np.where(np.repeat(alive, T)[:, None], topk_weights, np.float32(np.nan))

    def body(x, idx, topk_weights, active):
        routed = xm.dispatch(x, idx, topk_weights, num_experts=E, axis_name="ep", placement=placement)
        return xm.combine(routed.x, routed.handle, active=active)

    run = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(EP, EP, EP, P()), out_specs=EP))
    out = np.asarray(run(x, idx, topk_weights, alive))
    assert (out[:T] == 0).all() and out[T:].any() and not np.isnan(out.astype("f4")).any()


def test_a_rank_dies_and_comes_back_in_one_program():
    """A step without the rank that died, a step with its experts fetched, and a step with the rank back have the bits
    of a group that never failed, for every token of a rank that takes part, and nothing is compiled again."""
    x, idx, topk_weights, weights = operands(6)
    counts = np.bincount(idx.ravel(), minlength=E)
    whole = xm.balance.plan(counts, R, S, alive=np.arange(R) != 2)
    checkpoint = np.pad(weights, ((0, R * 3 - len(weights)), (0, 0), (0, 0)))

    def body(x, idx, topk_weights, held, placement, active):
        routed = xm.dispatch(x, idx, topk_weights, num_experts=E, axis_name="ep", placement=placement, active=active)
        y = routed.x * held[jnp.minimum(routed.expert_ids(), S - 1), :, 0]
        return xm.combine(y, routed.handle)

    run = jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(EP,) * 4 + (P(), P()), out_specs=EP))

    def step(held, placement, active):
        return np.asarray(run(x, idx, topk_weights, held, placement, active))

    everyone, alive = np.ones(R, bool), np.arange(R) != 1
    held = np.array(whole.move(checkpoint, None, whole))
    expected = step(held, whole, everyone)
    assert np.abs(expected.astype("f4")).max() > 1

    left = whole.without(alive)
    lost = np.flatnonzero(left.num_replicas == 0)
    held[S : 2 * S] = np.nan  # what the rank held is gone
    at_once = step(held, left, alive).reshape(R, T, H)
    whole_tokens = ~np.isin(idx, lost).any(axis=1).reshape(R, T) & alive[:, None]
    assert lost.size and whole_tokens.any()
    assert_bits(at_once[whole_tokens], expected.reshape(R, T, H)[whole_tokens], "tokens whose experts have replicas")

    repaired = xm.balance.repair(whole, alive, counts)
    for rank, slot in np.argwhere(repaired.experts != left.experts):
        held[rank * S + slot] = checkpoint[repaired.experts[rank, slot]]
    assert_bits(step(held, repaired, alive).reshape(R, T, H)[alive], expected.reshape(R, T, H)[alive], "fetched")

    again = xm.balance.plan(counts, R, S)
    assert (again.experts[1] >= 0).any()
    held = np.asarray(again.move(held, repaired, again))
    assert_bits(step(held, again, everyone), expected, "the rank is back, and another that was never there")
    assert run._cache_size() == 1


def test_a_placement_is_saved_with_an_exported_program():
    placement = random_placement(1)
    exported = jax.export.export(jax.jit(lambda placement, idx: (placement.route(idx, 1), placement)))(
        placement, np.zeros((2, 2), np.int32)
    )
    again = jax.export.deserialize(exported.serialize())
    idx = np.array([[1, 2], [3, 10]], np.int32)
    slots, same = again.call(placement, idx)
    assert_bits(slots, np.asarray(placement.route(idx, 1)), "slots")
    chex.assert_trees_all_equal(jax.tree.map(np.asarray, same), placement)


# -- errors ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: xm.balance.plan([1, 2, 3], 2, 1), ValueError, "slots_per_rank must be at least 2"),
        (lambda: xm.balance.plan([1, 2], 2, 1, alive=[True, False]), ValueError, "1 ranks .* must be at least 2"),
        (lambda: xm.balance.plan([1, 2], 2, 1, alive=[False, False]), ValueError, "alive is False for all 2 ranks"),
        (lambda: xm.balance.repair(xm.balance.home(2, 2), np.zeros(2, bool)), ValueError, "True for at least one"),
        (lambda: xm.balance.plan([1, 2], 2, 1, 2, [True, False], 2), ValueError, "at most the 1 ranks"),
        (lambda: xm.balance.plan([1, 2], 2, 1, min_replicas=2), ValueError, "2 slots for 4 replicas"),
        (lambda: xm.balance.plan([1], 2, 9, min_replicas=3), ValueError, "at most the 2 ranks"),
        (lambda: xm.balance.plan([1, 2], 2, 9, min_replicas=2, max_replicas=3), ValueError, "max_replicas=3"),
        (lambda: xm.balance.plan([1, -2], 2, 1), ValueError, "negative or infinite"),
        (lambda: xm.balance.plan([1, np.nan], 2, 1), ValueError, "negative or infinite"),
        (lambda: xm.balance.plan(3, 2, 1), ValueError, r"must be numbers \[E\]"),
        (lambda: xm.balance.plan([1, 2], 3, 1, ranks_per_node=2), ValueError, "must divide num_ranks=3"),
        (lambda: xm.balance.plan([1, 2], 2, 1, alive=[1, 0]), ValueError, r"must be bool\[2\]"),
        (lambda: xm.balance.plan([1, 2], 0, 1), ValueError, "num_ranks=0"),
        (lambda: xm.balance.from_experts([[0, 0]], 1), ValueError, "rank 0 holds an expert twice"),
        (lambda: xm.balance.from_experts([[0, 4]], 4), ValueError, r"outside \[-1, 4\)"),
        (lambda: xm.balance.from_experts([0, 1], 4), ValueError, r"must be integers \[R, S\]"),
        (lambda: xm.balance.count(np.zeros((2, 1), int), 4, mask=np.ones(3, bool)), ValueError, r"must be bool\[2\]"),
        (lambda: xm.balance.home(4, 2).move(np.zeros((3, 2)), None, xm.balance.home(4, 2)), ValueError, r"\[4, ...\]"),
        (lambda: xm.balance.home(4, 2).move(np.zeros((4, 2)), None, None), ValueError, "both placements are None"),
        (lambda: xm.balance.home(4, 2).move(np.zeros(4), None, 3), TypeError, "got a int"),
        (
            lambda: xm.balance.home(4, 2).move(np.zeros(4), xm.balance.home(4, 2), xm.balance.home(4, 4)),
            ValueError,
            "of the same experts and ranks",
        ),
        (lambda: xm.balance.home(4, 2).reduce(np.zeros((4, 2), int)), TypeError, "must be floating point"),
        (
            lambda: xm.balance.home(4, 2).move(jax.random.split(jax.random.key(0), 4), None, xm.balance.home(4, 2)),
            TypeError,
            "move: an array has dtype key<fry>: pass jax.random.key_data",
        ),
        (lambda: xm.balance.home(4, 2).reduce(np.zeros(4), axis_name="ep"), ValueError, "inside jax.shard_map"),
        (lambda: xm.balance.home(4, 2).without(np.ones(3, bool)), ValueError, r"must be bool\[2\]"),
        (lambda: xm.balance.moves(None, None), TypeError, "must be a Placement"),
        (lambda: xm.balance.repair(None, np.ones(2, bool)), TypeError, "must be a Placement"),
        (lambda: xm.balance.repair(xm.balance.home(4, 2), np.array([True, False])), ValueError, "must be at least 4"),
        (lambda: xm.balance.repair(xm.balance.home(4, 2), np.ones(2, bool), [1, 2]), ValueError, "they must be equal"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_and_the_remedy(call, error, text):
    with pytest.raises(error, match=text):
        call()
