"""Planted values at the sizes of DeepSeek-V3: any row in a wrong place, lost, doubled or damaged shows.

Everything is made and checked on the devices, so that no array of this size crosses to the host, and memory is what a
job would take. Values are small whole numbers: every product and sum is exact in bfloat16, whatever the order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from benchmarks.tpu import here as places
from benchmarks.tpu.here import here
from tests.tpu import chips

CODE_COLUMNS, CODE_BITS = 4, 6
"""The first columns of a token hold its number, this many bits in each."""


@dataclasses.dataclass(frozen=True)
class Planted:
    """Attributes:
    tokens: of a rank. layout: "grouped" or "padded". wire: of the dispatch; with one, rows are near what was planted.
    groups: independent groups of ranks beside each other.
    """

    tokens: int
    layout: str
    wire: str | None = None
    hidden: int = 7168
    experts: int = 256
    top_k: int = 8
    groups: int = 1

    @property
    def ranks(self) -> int:
        return here().count // self.groups

    @property
    def capacity(self) -> int | None:
        if self.layout != "grouped":
            return None
        worst = self.ranks * self.tokens * min(self.top_k, -(-self.experts // self.ranks))
        return min(worst, self.tokens * self.top_k * 5 // 4 + 512)

    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        """`topk_idx`, distinct experts and some unused slots, and weights 1 or 2; for every device."""
        rng = np.random.default_rng(self.tokens)
        shape = (here().count * self.tokens, self.top_k)
        idx = np.empty(shape, np.int32)
        for rows in np.array_split(np.arange(shape[0]), max(1, shape[0] // 4096)):
            scores = rng.random((len(rows), self.experts), np.float32)
            idx[rows] = np.argpartition(scores, self.top_k - 1, axis=1)[:, : self.top_k]
        idx[rng.random(shape) < 0.1] = -1
        return idx, rng.integers(1, 3, shape).astype(np.float32)

    def check(self, idx: jax.Array, weights: jax.Array) -> dict[str, jax.Array]:
        """Numbers of faults, on one rank: all of them are zero."""
        config, me = places.config(), jax.lax.axis_index("ep")
        x = tokens(me * self.tokens + jnp.arange(self.tokens), self.hidden)
        routed = xm.dispatch(
            x, idx, weights, num_experts=self.experts, axis_name="ep", layout=self.layout, capacity=self.capacity,
            wire=self.wire, config=config,
        )  # fmt: skip
        local = -(-self.experts // self.ranks)
        counts = routed.num_tokens_per_expert
        # comparisons with every expert: XLA compiles sorts, searches and scatters of this size for a minute and more
        named = jnp.sum(idx[..., None] == jnp.arange(local * self.ranks), axis=(0, 1), dtype=jnp.int32)
        mine = jax.lax.dynamic_slice(jax.lax.psum(named, "ep"), (me * local,), (local,))
        rows = routed.x.reshape(-1, self.hidden)
        at = jnp.arange(rows.shape[0])
        if self.layout == "grouped":
            ends = jnp.cumsum(routed.group_sizes)
            expert, live = jnp.sum(at[:, None] >= ends, axis=1), at < ends[-1]
        else:
            slab = rows.shape[0] // local
            expert = at // slab
            live = (jnp.arange(slab) < counts[:, None]).reshape(-1)
        first = jnp.concatenate([jnp.ones(1, bool), expert[1:] != expert[:-1]])
        allowed = 0.0 if self.wire is None else 0.25
        found = decoded(rows) if self.wire is None else jnp.zeros(rows.shape[0], jnp.int32)
        damaged = 0
        if self.wire is None:
            damaged = jnp.sum(live & jnp.any(rows != tokens(found, self.hidden), axis=1))
        earlier = jnp.concatenate([found[:1], found[:-1]])
        scale = (1 + expert % 2).astype(rows.dtype)
        code = jnp.arange(self.hidden) < CODE_COLUMNS
        y = jnp.where(live[:, None] & ~code, rows * scale[:, None], 0)
        out = xm.combine(y.reshape(routed.x.shape), routed.handle, config=config)
        factor = jnp.sum(jnp.where(idx >= 0, weights * (1 + idx % local % 2), 0), axis=1)
        expected = jnp.where(code, 0, x.astype(jnp.float32) * factor[:, None])
        faults = {
            "dropped": routed.num_dropped,
            "experts with a wrong number of rows": jnp.sum(counts != mine),
            "rows that no token has": damaged,
            "rows out of order": jnp.sum(live & ~first & (found < earlier)),
            "wrong elements of the combine": jnp.sum(
                jnp.abs(out.astype(jnp.float32) - expected) > allowed * jnp.abs(expected).max()
            ),
        }
        return {name: jnp.reshape(count, (1,)).astype(jnp.int32) for name, count in faults.items()}


def tokens(numbers: jax.Array, hidden: int) -> jax.Array:
    """bfloat16 `[n, hidden]` of the tokens with these numbers: whole numbers from -3 to 4 behind the code."""
    column = np.arange(hidden, dtype=np.int32)
    mixed = numbers[:, None] * 7919 + column * 104729
    values = ((mixed ^ (mixed >> 7)) & 7) - 3
    code = (numbers[:, None] >> CODE_BITS * np.minimum(column, CODE_COLUMNS - 1)) & (2**CODE_BITS - 1)
    return jnp.where(column < CODE_COLUMNS, code, values).astype(jnp.bfloat16)


def decoded(rows: jax.Array) -> jax.Array:
    """The numbers of these tokens, int32."""
    code = rows[:, :CODE_COLUMNS].astype(jnp.int32)
    return jnp.sum(code << CODE_BITS * np.arange(CODE_COLUMNS, dtype=np.int32), axis=1)


def run(planted: Planted) -> None:
    if here().slices > 1:
        pytest.skip("an operation on one axis does not leave its slice (a ValueError says so)")
    axes = ("ep",) if planted.groups == 1 else ("dp", "ep")
    sizes = (planted.ranks,) if planted.groups == 1 else (planted.groups, planted.ranks)
    mesh = chips.mesh(sizes, axes)
    program = jax.jit(jax.shard_map(planted.check, mesh=mesh, in_specs=P(axes), out_specs=P(axes), check_vma=False))
    faults: dict[str, Any] = chips.run(program, mesh, P(axes), planted.operands())
    wrong = {name: count.tolist() for name, count in faults.items() if count.any()}
    assert len(faults) == 5 and not wrong, f"{planted}: on each rank: {wrong}"


SIZES = {
    "1": Planted(1, "padded"),
    "128": Planted(128, "padded"),
    "128-grouped-fp8": Planted(128, "grouped", "float8_e4m3fn"),
    "4096": Planted(4096, "grouped"),
    "4096-fp8": Planted(4096, "grouped", "float8_e4m3fn"),
    "8192": Planted(8192, "grouped"),  # the tables of so many tokens nearly fill SMEM
}


@pytest.mark.tpu4
@pytest.mark.parametrize("name", SIZES)
def test_planted_values(name):
    run(SIZES[name])


@pytest.mark.tpu4
@pytest.mark.parametrize(("tokens", "layout"), [(1, "padded"), (24, "grouped")], ids=["1", "24"])
def test_planted_values_of_small_tokens(tokens, layout):
    """The sizes that a rehearsal runs."""
    run(Planted(tokens, layout, hidden=256, experts=10, top_k=3))


@pytest.mark.tpu8
def test_two_groups_beside_each_other():
    """Each half of the devices is a group of its own: remote DMAs stay inside it."""
    run(Planted(256, "grouped", hidden=1024, experts=32, top_k=4, groups=2))
