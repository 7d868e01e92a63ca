"""`balance="exact"`: no rank gets more than `T * K` rows, whatever the routing; the same bits, no drops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.cases import ROUTINGS
from tests.support.checks import assert_bits
from xen_moe_jax import _exact
from xen_moe_jax.backends import reference

R, E, T, K, H = 4, 11, 12, 4, 16
L, EP = 3, P("ep")


@functools.cache
def divide(slots, most):
    return jax.jit(functools.partial(_exact.divide, slots=slots, most=most))


@given(data=st.data())
@pytest.mark.parametrize("shape", [(4, 11, 40), (1, 3, 7), (8, 8, 24), (5, 3, 18)], ids=lambda s: f"R{s[0]}-E{s[1]}")
@pytest.mark.parametrize("more", [1, 3])
def test_every_routing_is_divided_with_one_slot_more_than_experts(shape, more, data):
    """Counts of all kinds: any mass on any expert, ranks with nothing, all rows for the experts of one rank, and ranks
    that are inactive."""
    ranks, experts, most = shape
    active = np.ones(ranks, bool)
    active[list(data.draw(st.sets(st.integers(0, ranks - 1), max_size=ranks - 1)))] = False
    slots = -(-experts // ranks) + more
    counts = np.zeros((ranks, experts), np.int32)
    for rank in range(ranks):
        heavy = data.draw(st.lists(st.integers(0, experts - 1), min_size=1, max_size=4))
        rows = data.draw(st.sampled_from([most, most, most, most // 3, 0]))
        for row in range(rows):
            counts[rank, heavy[row * row % len(heavy)] if row % 5 else row % experts] += 1
    counts[~active] = 0
    counts[:, ~active[np.arange(experts) // -(-experts // ranks)]] = 0
    parts = np.asarray(divide(slots, most)(counts, active=active))
    assert (parts.sum(axis=0) == counts.sum(axis=0)).all() and (parts >= 0).all() and (parts[~active] == 0).all()
    assert parts.sum(axis=1).max() <= most
    assert (parts > 0).sum(axis=1).max() <= slots


def test_experts_stay_at_home_where_that_is_balanced_and_few_are_lent_elsewhere():
    counts = np.full((R, 12), 4, np.int32)
    home = xm.balance.home(12, R).experts
    parts = np.asarray(divide(4, 48)(counts))
    assert all(set(np.flatnonzero(parts[rank])) == set(home[rank]) for rank in range(R))
    counts[:, 5] += 8  # rank 1 has 80 rows and the others 48: with room for 56, one expert goes to three ranks
    parts = np.asarray(divide(4, 56)(counts))
    assert np.flatnonzero((parts > 0).sum(axis=0) > 1).tolist() == [5]
    assert (parts[:, 5] > 0).all() and parts.sum(axis=1).max() <= 56


@pytest.mark.parametrize("slots", [4, 6, 7, 9])
def test_places_of_experts(slots):
    """A rank's slots hold the experts of which it has rows; with room for all, its own ones lie as without a
    placement."""
    assert _exact.slots_at_home(11, R) == 7
    counts = np.zeros((R, 11), np.int32)
    counts[:, :3] = 16
    parts = divide(slots, 48)(counts)
    place = np.asarray(_exact.places(parts, slots))
    experts = np.asarray(_exact._experts(jnp.asarray(place), slots))
    rank, expert = np.nonzero(np.asarray(parts) > 0)
    assert (experts[rank, place[rank, expert]] == expert).all() and len(set(rank)) == R
    for row, home in zip(experts, xm.balance.home(11, R).experts, strict=True):
        held = row[row >= 0]
        assert len(set(held.tolist())) == len(held)
        assert (row[:3] == home).all() if slots >= 7 else (np.diff(held) > 0).all()


# -- the layer ---------------------------------------------------------------------------------------------------------
@functools.cache
def mesh():
    if jax.device_count() < R:
        pytest.skip(f"needs {R} devices, has {jax.device_count()}")
    return jax.make_mesh((R,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:R])


def layer(x, idx, topk_weights, weights, **options):
    """Row by row, so that the bits of a row do not depend on where it lies; sizes and drops beside it."""
    options = {"num_experts": E, "axis_name": "ep", **options}
    routed = xm.dispatch(x, idx, topk_weights, **options)
    placement = routed.handle.placement
    if placement is not None:
        weights = placement.move(weights, None, placement, active=options.get("active"))
    of_row = jnp.minimum(routed.expert_ids(), len(weights) - 1)
    y = routed.x * weights[of_row, :, 0]
    return (
        xm.combine(y, routed.handle),
        routed.num_tokens_per_expert,
        routed.num_dropped[None],
        jnp.zeros(len(routed.x)),
    )


@functools.cache
def program(**options):
    body = functools.partial(layer, **options)
    return jax.jit(jax.shard_map(body, mesh=mesh(), in_specs=(EP,) * 4, out_specs=EP))


def operands(seed, routing):
    rng = np.random.default_rng(seed)
    idx = ROUTINGS[routing](rng, (R, T, K), E).astype(np.int32).reshape(R * T, K)
    x = rng.standard_normal((R * T, H)).astype("bfloat16")
    return (
        x,
        idx,
        rng.uniform(-1, 1, idx.shape).astype(np.float32),
        rng.standard_normal((R * L, H, 2)).astype("bfloat16"),
    )


@pytest.mark.parametrize(("slots", "alignment"), [(4, 1), (6, 8), (7, 2)])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_exact_has_the_bits_of_a_layer_with_room_for_all(slots, alignment, routing):
    args = operands(1, routing)
    expected, _, dropped, _ = program(capacity=R * T * K)(*args)
    assert (np.asarray(dropped) == 0).all()
    out, rows, dropped, room = program(balance="exact", slots_per_rank=slots, alignment=alignment)(*args)
    assert_bits(out, expected, routing)
    assert (np.asarray(dropped) == 0).all()
    rows = np.asarray(rows).reshape(R, slots)
    used = ((args[1] >= 0) & (args[1] < E)).sum()
    assert rows.sum() == used and rows.sum(axis=1).max() <= T * K
    if routing == "hammer":
        assert (rows.sum(axis=1) == T * K).all(), "all rows for one expert: every rank computes the same number"
    assert room.shape == (R * ((T * K + slots * (alignment - 1)) // alignment * alignment),)


@functools.cache
def program_with_active(**options):
    body = functools.partial(layer, **options)
    ranks = jax.shard_map(
        lambda *args: body(*args[:-1], active=args[-1]), mesh=mesh(), in_specs=(*(EP,) * 4, P()), out_specs=EP
    )
    return jax.jit(ranks)


@pytest.mark.parametrize("routing", ["zipf", "hammer", "out_of_range", "duplicates"])
def test_exact_among_the_active_ranks(routing):
    """Experts at home on an inactive rank are left out, the others are shared among the active ranks."""
    args = operands(3, routing)
    for active in ([True] * 4, [True, False, True, True], [False, False, True, True], [False, True, False, False]):
        active = np.array(active)
        expected, counts, dropped, _ = program_with_active(capacity=R * T * K)(*args, active)
        out, rows, left_out, _ = program_with_active(balance="exact")(*args, active)
        of_active = np.repeat(active, T)
        assert_bits(np.asarray(out)[of_active], np.asarray(expected)[of_active], f"{routing} {active}")
        assert (np.asarray(out)[~of_active] == 0).all()
        assert (np.asarray(left_out) == np.asarray(dropped)).all()
        rows = np.asarray(rows).reshape(R, -1)
        assert rows.sum() == np.asarray(counts).sum() and rows[~active].sum() == 0
        assert rows.sum(axis=1).max() <= T * K
    assert program_with_active(balance="exact")._cache_size() == 1


def test_between_nodes_inactive_ranks_have_the_placement_too(monkeypatch):
    """Weights move by collectives of all ranks there, as often as the placement says: on GPUs, whose gather gives an
    inactive rank zeros, a rank with another placement would leave the others waiting."""

    def gather(call, words, active):
        mine = active[jax.lax.axis_index("ep")]
        return jnp.where(mine, jax.lax.all_gather(words, "ep"), 0)

    monkeypatch.setattr(reference.BACKEND, "gather_words", gather)
    x, idx, topk_weights, _ = operands(3, "hammer")

    def body(x, idx, topk_weights, active, per_node):
        options = {"num_experts": E, "axis_name": "ep", "balance": "exact", "slots_per_rank": 7}
        config = xm.KernelConfig(ranks_per_node=per_node)
        routed = xm.dispatch(x, idx, topk_weights, active=active, config=config, **options)
        return routed.handle.placement.experts[None]

    def experts(per_node):
        ranks = functools.partial(body, per_node=per_node)
        program = jax.shard_map(ranks, mesh=mesh(), in_specs=(*(EP,) * 3, P()), out_specs=EP)
        return np.asarray(jax.jit(program)(x, idx, topk_weights, np.arange(R) != 2))

    found = experts(2)
    assert (found[0][:, L:] >= 0).any(), "no expert is lent"
    assert (found == found[0]).all()
    assert (experts(None)[[0, 1, 3]] == found[0]).all()


def test_gradients_go_home():
    x, idx, topk_weights, weights = operands(2, "zipf")
    target = np.random.default_rng(9).standard_normal(x.shape).astype(np.float32)

    def gradients(**options):
        def body(x, topk_weights, weights):
            out = layer(x, idx_of(), topk_weights, weights, **options)[0]
            return jax.lax.psum(jnp.sum(out * target_of()), "ep")

        def idx_of():
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(idx), jax.lax.axis_index("ep") * T, T)

        def target_of():
            return jax.lax.dynamic_slice_in_dim(jnp.asarray(target), jax.lax.axis_index("ep") * T, T)

        ranks = jax.shard_map(body, mesh=mesh(), in_specs=EP, out_specs=P())
        args = (x.astype(np.float32), topk_weights, weights.astype(np.float32))
        return jax.jit(jax.grad(ranks, argnums=(0, 1, 2)))(*args)

    for name, a, e in zip("xtw", gradients(balance="exact"), gradients(), strict=True):
        assert np.abs(e).max() > 0.1
        np.testing.assert_allclose(a, e, rtol=2e-6, atol=2e-6, err_msg=name)
