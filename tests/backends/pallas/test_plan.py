"""Tables of exchanges on TPU: both sides of a link agree on the place of every record."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from xen_moe_jax import _layout
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends.pallas import plan, tables
from xen_moe_jax.experts import waves
from xen_moe_jax.pallas_kernels import exchange

RANKS, TOKENS, EXPERTS, TOP_K = 4, 24, 8, 3


def planned(function, capacity, top_k=TOP_K):
    """Routing of all ranks, positions of its rows, and what `function(topk_idx, positions, spec)` returns on each."""
    spec = Spec(("ep",), (RANKS,), EXPERTS, TOKENS, top_k, "grouped", capacity, 1)
    rng = np.random.default_rng(capacity)
    idx = np.argsort(rng.random((RANKS, TOKENS, EXPERTS)) * (1 + 0.1 * np.arange(EXPERTS)), axis=2)[..., :top_k]
    idx[0, 3:5] = -1

    def body(idx):
        idx = _layout.sanitize(idx[0], EXPERTS)
        positions, _ = tables.positions_of(idx, spec)
        return jax.tree.map(lambda a: a[None], (positions, function(idx, positions, spec)))

    mesh = jax.make_mesh((RANKS,), ("ep",), devices=jax.devices()[:RANKS], axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"), check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(jnp.asarray(idx, jnp.int32)))


@pytest.mark.parametrize("top_k", [TOP_K, RANKS])
@pytest.mark.parametrize("capacity", [95, 40, 8])
def test_a_packed_combine_sends_one_sum_for_each_pair_with_rows(capacity, top_k):
    """A rank has no more sums than rows, dropped rows or not, and each sum is where its token looks for it."""

    def tables_of(idx, positions, spec):
        assert plan.packs_staging(spec) and plan.combine_sent_rows(spec) == capacity
        found = plan.combine_plan(idx, positions, spec, packed=True)
        return found.came, found.pairs.peer, found.pairs.address, found.pairs.expected, found.source

    positions, (came, peer, address, expected, source) = planned(tables_of, capacity, top_k)
    assert (came == (positions >= 0).any(-1)).all() and came.sum((1, 2)).max() <= capacity
    assert (positions == -2).any() or capacity == 95
    staged = np.full((RANKS, TOKENS * min(RANKS, top_k), 2), -1)
    for holder in range(RANKS):
        for pair in np.flatnonzero(peer[holder] >= 0):
            to, token = divmod(pair, TOKENS)
            assert peer[holder, pair] == to and staged[to, address[holder, pair], 0] < 0
            staged[to, address[holder, pair]] = holder, token
    for rank in range(RANKS):
        assert (expected[rank] == came[:, rank].sum(1)).all()
        for token in range(TOKENS):
            of = staged[rank, source[rank, token][source[rank, token] >= 0]]
            assert of[:, 0].tolist() == np.flatnonzero(came[:, rank, token]).tolist() and (of[:, 1] == token).all()


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("capacity", [95, 40])
def test_records_of_a_wave_lie_side_by_side_at_both_ends(capacity, back):
    """Each record goes in the wave of the first, or with `back` of the last, of its token's rows on a rank, and arrives
    where it is looked for."""
    cut = [(0, 8), (8, 24), (24, capacity)]

    def tables_of(idx, positions, spec):
        del idx
        first = jnp.min(jnp.where(positions >= 0, positions, capacity), axis=-1)
        row = jnp.max(positions, axis=-1) if back else jnp.where(first < capacity, first, -1)
        return waves.waves_of(row, cut, spec, back=back)

    positions, found = planned(tables_of, capacity)
    some = (positions >= 0).any(-1)
    row = np.where(some, positions.max(-1) if back else np.where(positions >= 0, positions, capacity).min(-1), -1)
    wave = np.where(some, (row[..., None] >= [8, 24]).sum(-1), 3)
    assert (found.wave == wave).all() and (found.wanted == wave.swapaxes(0, 1)).all()
    leave, arrive = (found.here, found.there) if back else (found.there, found.here)
    sent = wave if back else wave.swapaxes(0, 1)
    for number, arrays in enumerate(found.runs.transpose(1, 2, 0, 3)):
        run = dict(zip(exchange.Runs._fields[2:], arrays, strict=True))
        for rank in range(RANKS):
            for peer in range(RANKS):
                tokens = np.flatnonzero(sent[rank, peer] == number)
                first = run["input_offsets"][rank, peer]
                assert leave[rank, peer, tokens].tolist() == list(range(first, first + run["sizes"][rank, peer]))
                first = run["output_offsets"][rank, peer]
                assert arrive[peer, rank, tokens].tolist() == list(range(first, first + len(tokens)))
                assert run["expected"][peer, rank] == len(tokens)
    for rank in range(RANKS):  # no two records have one place
        places = arrive[rank][(wave[rank] if not back else found.wanted[rank]) < 3]
        assert sorted(places.tolist()) == list(range(len(places)))
