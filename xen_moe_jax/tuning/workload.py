"""`Workload`: the sizes, dtypes, and random routings of a chosen skew that a benchmark measures."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from xen_moe_jax._numbers import as_int
from xen_moe_jax._quantize import WIRES
from xen_moe_jax._spec import LAYOUTS

ROUTINGS = ("uniform", "zipf", "one-hot")
BLOCK_SCALED_DTYPES = ("float8_e4m3fn", "int8")
"""Input dtypes that travel as `BlockScaled`: values with one float32 scale per 128 elements."""
DTYPES = ("bfloat16", "float16", "float32", *BLOCK_SCALED_DTYPES)
ROW_MULTIPLE = 8
"""Capacities are rounded up to this many rows."""


@dataclasses.dataclass(frozen=True)
class Workload:
    """One benchmark problem. Sizes are per rank unless they say otherwise.

    Attributes:
      tokens: tokens per rank `T`.
      hidden: elements of a token `H`.
      experts: global number of experts `E`.
      top_k: slots per token `K`.
      ranks: `R`.
      dtype: dtype of the tokens; "float8_e4m3fn" and "int8" dispatch `BlockScaled` tokens and combine in bfloat16.
      wire: wire dtype of dispatch; None is `dtype`.
      combine_wire: wire dtype of combine; None is the dtype of the expert outputs.
      routing: "uniform": K distinct experts; "zipf": popularity 1/rank of a shuffled expert list, distinct;
        "one-hot": every token of every rank takes the same K experts.
      layout: layout of `dispatch`.
      capacity_factor: rows of capacity over the mean `T*K`; None gives every program, peers too, the smallest
        capacity that drops nothing in the routings at hand.
      pool: number of different routings that the timed calls cycle through.
      seed: seed of all random numbers.
    """

    tokens: int = 1024
    hidden: int = 1024
    experts: int = 64
    top_k: int = 8
    ranks: int = 8
    dtype: str = "bfloat16"
    wire: str | None = None
    combine_wire: str | None = None
    routing: str = "uniform"
    layout: str = "grouped"
    capacity_factor: float | None = None
    pool: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "hidden", "experts", "top_k", "ranks", "pool"):
            if (as_int(getattr(self, name)) or 0) <= 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be a positive int")
        if not 0 <= (-1 if (seed := as_int(self.seed)) is None else seed) < 2**63:
            raise ValueError(f"seed={self.seed!r}: must be an int in [0, 2**63)")
        if self.top_k > self.experts:
            raise ValueError(f"top_k={self.top_k}: must not exceed experts={self.experts}")
        for name, allowed in (("dtype", DTYPES), ("routing", ROUTINGS), ("layout", LAYOUTS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be one of {allowed}")
        for name in ("wire", "combine_wire"):
            if getattr(self, name) not in (None, *WIRES):
                raise ValueError(f"{name}={getattr(self, name)!r}: must be None or one of {tuple(WIRES)}")
        if self.block_scaled and self.wire is not None:
            raise ValueError(
                f"wire={self.wire!r}: must be None with dtype={self.dtype!r}, whose rows travel as they are"
            )
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(f"capacity_factor={self.capacity_factor}: must be positive")

    @property
    def block_scaled(self) -> bool:
        """True if the tokens are quantized before the dispatch."""
        return self.dtype in BLOCK_SCALED_DTYPES

    @property
    def compute_dtype(self) -> jnp.dtype:
        """Dtype of expert outputs, and of the tokens before any quantization."""
        return jnp.dtype("bfloat16" if self.block_scaled else self.dtype)

    @property
    def dispatch_wire(self) -> str:
        """Name of the dtype that a dispatch sends."""
        return self.wire or self.dtype

    @property
    def return_wire(self) -> str:
        """Name of the dtype that a combine sends."""
        return self.combine_wire or self.compute_dtype.name

    @property
    def local_experts(self) -> int:
        """Experts of a rank; the last ranks may own fewer."""
        return -(-self.experts // self.ranks)


def draw_topk_idx(work: Workload) -> np.ndarray:
    """Random routings: int32 `[pool, R, T, K]`, experts of a token distinct."""
    rng = np.random.default_rng(work.seed)
    shape = (work.pool, work.ranks, work.tokens)
    if work.routing == "one-hot":
        start = int(rng.integers(0, work.experts))
        return np.broadcast_to((start + np.arange(work.top_k)) % work.experts, (*shape, work.top_k)).astype(np.int32)
    log_popularity = np.zeros(work.experts, np.float32)
    if work.routing == "zipf":
        log_popularity = -np.log1p(rng.permutation(work.experts)).astype(np.float32)
    out = np.empty((*shape, work.top_k), np.int32)
    for p in range(work.pool):
        for r in range(work.ranks):
            # Gumbel top-k draws without replacement in proportion to the popularity
            score = rng.gumbel(size=(work.tokens, work.experts)).astype(np.float32) + log_popularity
            out[p, r] = np.argpartition(-score, work.top_k - 1, axis=1)[:, : work.top_k]
    return out


def draw_topk_weights(work: Workload) -> np.ndarray:
    """Positive router weights that sum to one for each token: float32 `[pool, R, T, K]`."""
    rng = np.random.default_rng(work.seed + 1)
    weights = rng.uniform(0.5, 1.5, size=(work.pool, work.ranks, work.tokens, work.top_k)).astype(np.float32)
    return weights / weights.sum(-1, keepdims=True)


def draw_tokens(work: Workload, rank: int) -> np.ndarray:
    """Rank `rank`'s tokens `[T, H]`, standard normal, in `compute_dtype`."""
    return _normal(work.seed + 2, rank, work.tokens, work.hidden, work.compute_dtype.name)


@functools.lru_cache(maxsize=16)  # a suite asks for the same tokens again and again, and large ones take seconds
def _normal(seed: int, rank: int, rows: int, columns: int, dtype: str) -> np.ndarray:
    values = np.random.default_rng((seed, rank)).standard_normal((rows, columns), np.float32).astype(jnp.dtype(dtype))
    values.flags.writeable = False
    return values


def round_up(rows: float, multiple: int = ROW_MULTIPLE) -> int:
    return max(multiple, int(-(-rows // multiple)) * multiple)


def rows_per_expert(work: Workload, topk_idx: np.ndarray) -> np.ndarray:
    """Rows that each source sends to each expert: int64 `[pool, R, L*R]` for `topk_idx [pool, R, T, K]`."""
    padded_experts = work.local_experts * work.ranks
    flat = topk_idx.reshape(work.pool * work.ranks, -1)
    counts = np.stack([np.bincount(row[row >= 0], minlength=padded_experts) for row in flat])
    return counts.reshape(work.pool, work.ranks, padded_experts)


@dataclasses.dataclass(frozen=True)
class Capacities:
    """Static row counts of every program, from the same routings.

    Attributes:
      grouped: rows of the grouped layout on a rank (ours, all-gather and ragged peers).
      ranked: rows of the ranked layout on a rank.
      per_source_expert: most rows that one source sends to one expert (the padded peers).
    """

    grouped: int
    ranked: int
    per_source_expert: int


def capacities(work: Workload, topk_idx: np.ndarray) -> Capacities:
    if work.capacity_factor is not None:
        mean = work.capacity_factor * work.tokens * work.top_k
        ranked = min(mean, work.ranks * work.tokens)
        return Capacities(round_up(mean), round_up(ranked), round_up(mean / work.experts))
    counts = rows_per_expert(work, topk_idx)
    received = counts.reshape(work.pool, work.ranks, work.ranks, work.local_experts).sum((1, 3))
    reached = ranks_reached(work, topk_idx).sum((1, 2))
    return Capacities(round_up(received.max()), round_up(reached.max()), round_up(counts.max()))


def ranks_reached(work: Workload, topk_idx: np.ndarray) -> np.ndarray:
    """True where a token has an expert on a rank: bool `[pool, R, T, R]`."""
    reached = np.zeros((*topk_idx.shape[:3], work.ranks), bool)
    np.put_along_axis(reached, topk_idx // work.local_experts, True, axis=-1)
    return reached
