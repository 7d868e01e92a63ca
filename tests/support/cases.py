"""Tables of routings and cases. Sizes are relative to the mesh: every backend runs the same table at its own size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np


# -- routings --------------------------------------------------------------------------------------
def _distinct(rng, probabilities: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """Draws top-k experts without repetition; slots beyond the number of experts are unused."""
    num_ranks, num_tokens, top_k = shape
    experts = len(probabilities)
    idx = np.full(shape, -1)
    # Gumbel top-k draws without replacement.
    noise = np.log(probabilities) + rng.gumbel(size=(num_ranks, num_tokens, experts))
    used = min(top_k, experts)
    idx[..., :used] = np.argsort(-noise, axis=-1)[..., :used]
    return idx


def uniform(rng, shape, experts):
    return _distinct(rng, np.full(experts, 1.0 / experts), shape)


def zipf(rng, shape, experts):
    weight = 1.0 / np.arange(1, experts + 1) ** 1.5
    return _distinct(rng, weight / weight.sum(), shape)


def one_hot(rng, shape, experts):
    """Every token of every rank goes to the same experts, the last ones."""
    used = min(shape[2], experts)
    idx = np.full(shape, -1)
    idx[..., :used] = experts - 1 - np.arange(used)
    return idx


def empty(rng, shape, experts):
    return np.full(shape, -1)


def one_token(rng, shape, experts):
    idx = np.full(shape, -1)
    idx[shape[0] - 1, shape[1] // 2] = uniform(rng, (1, 1, shape[2]), experts)[0, 0]
    return idx


def idle_ranks(rng, shape, experts):
    """Even ranks use none of their tokens; odd ranks use a prefix of them, and only the upper half of the experts."""
    idx = uniform(rng, shape, experts)
    idx[idx < experts // 2] = -1
    idx[::2] = -1
    idx[:, shape[1] * 2 // 3 :] = -1
    return idx


def duplicates(rng, shape, experts):
    """Slots drawn with replacement from few experts: a token names one expert twice or more."""
    return rng.integers(0, max(1, experts // 3), shape)


def hammer(rng, shape, experts):
    """Every slot of every token names expert 0."""
    return np.zeros(shape, int)


def out_of_range(rng, shape, experts):
    idx = uniform(rng, shape, experts)
    bad = np.array([-1, -7, experts, experts + 5, 2**31 - 1, -(2**31)])
    return np.where(rng.random(shape) < 0.5, rng.choice(bad, shape), idx)


ROUTINGS: dict[str, Callable] = {
    f.__name__: f for f in (uniform, zipf, one_hot, empty, one_token, idle_ranks, duplicates, hammer, out_of_range)
}


# -- cases -----------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Case:
    """One static shape of the conformance table.

    Attributes:
      experts: number of experts from the number of ranks.
      capacity: None (worst case), "exact" (the need of the routing), "one_below", "half", or a number of rows.
      drop: which rows are dropped.
      odd_hidden: a hidden size that is no multiple of 128.
      block_scaled: the input is `BlockScaled` of this dtype (as `wire` is written, ":ue8m0" included).
      axes: 1, or 2 for (slow, fast) mesh axes.
      routings: the `ROUTINGS` that run on this shape.
    """

    name: str
    layout: str = "grouped"
    experts: Callable[[int], int] = lambda ranks: 2 * ranks
    top_k: int = 4
    dtype: str = "bfloat16"
    capacity: int | str | None = None
    alignment: int = 1
    drop: str = "position"
    weights: bool = True
    wire: str | None = None
    block_scaled: str | None = None
    odd_hidden: bool = False
    axes: int = 1
    routings: tuple[str, ...] = ("uniform",)

    @property
    def wire_parts(self) -> tuple[str | None, str]:
        """(dtype, scale format) of `wire`."""
        return _split(self.wire)

    @property
    def block_scaled_parts(self) -> tuple[str | None, str]:
        return _split(self.block_scaled)


def _split(wire: str | None) -> tuple[str | None, str]:
    if wire is None:
        return None, "float32"
    dtype, _, scale_format = wire.partition(":")
    return dtype, scale_format or "float32"


EVERY_ROUTING = tuple(ROUTINGS)
LAYOUTS = ("grouped", "ranked", "padded")

CASES = (
    Case("grouped", routings=EVERY_ROUTING),
    Case("ranked", layout="ranked", routings=EVERY_ROUTING),
    Case("padded", layout="padded", routings=EVERY_ROUTING),
    Case("grouped-f32", dtype="float32", routings=("uniform", "duplicates")),
    Case("grouped-f16", dtype="float16"),
    Case("ranked-f32", layout="ranked", dtype="float32"),
    Case("ranked-f16", layout="ranked", dtype="float16"),
    Case("padded-f32", layout="padded", dtype="float32"),
    # Number of experts against number of ranks and slots
    Case("grouped-uneven", experts=lambda r: 2 * r + 3, top_k=3, routings=("uniform", "out_of_range")),
    Case("ranked-uneven", layout="ranked", experts=lambda r: 2 * r + 3, top_k=3),
    Case("padded-uneven", layout="padded", experts=lambda r: 2 * r + 3, top_k=3, routings=("uniform", "hammer")),
    Case("grouped-fewer-experts-than-ranks", experts=lambda r: max(1, r // 2), top_k=2),
    Case("ranked-fewer-experts-than-ranks", layout="ranked", experts=lambda r: max(1, r - 1), top_k=2),
    Case("padded-fewer-experts-than-ranks", layout="padded", experts=lambda r: max(1, r // 2), top_k=2),
    Case("grouped-one-expert", experts=lambda r: 1, top_k=1),
    Case("grouped-one-local-expert", experts=lambda r: r, top_k=6, routings=("uniform", "hammer")),
    Case("grouped-top1", top_k=1, routings=("uniform", "zipf")),
    Case("grouped-many-experts", experts=lambda r: 8 * r, top_k=8, routings=("uniform", "zipf")),
    # Capacity
    Case("grouped-capacity-exact", capacity="exact", routings=("uniform", "zipf")),
    Case("grouped-capacity-one-below", capacity="one_below", routings=("uniform", "zipf")),
    Case("grouped-capacity-one", capacity=1, routings=("uniform", "empty")),
    Case("grouped-capacity-zero", capacity=0),
    Case("ranked-capacity-exact", layout="ranked", capacity="exact", routings=("zipf",)),
    Case("ranked-capacity-one-below", layout="ranked", capacity="one_below", routings=("zipf",)),
    # Which rows are dropped
    Case("grouped-drop-source", capacity="half", drop="source", routings=("uniform", "out_of_range")),
    Case("grouped-drop-source-align8", capacity="half", alignment=8, drop="source", experts=lambda r: 4 * r + 3),
    Case("grouped-drop-weight", capacity="half", drop="weight", routings=("uniform", "duplicates")),
    Case("grouped-drop-weight-align8-fp8", capacity="half", alignment=8, drop="weight", wire="float8_e4m3fn"),
    Case("ranked-drop-source", layout="ranked", capacity="half", drop="source"),
    Case("ranked-drop-weight", layout="ranked", capacity="half", drop="weight", dtype="float32"),
    Case("padded-drop-weight", layout="padded", drop="weight", routings=("hammer",)),
    Case("grouped-drop-weight-two-axes", axes=2, capacity="one_below", drop="weight", wire="int8"),
    # Alignment
    Case("grouped-align8", alignment=8, routings=("uniform", "zipf", "empty", "one_token")),
    Case("grouped-align128", alignment=128, dtype="float32"),
    Case("grouped-align8-capacity-exact", alignment=8, capacity="exact"),
    Case("grouped-align8-capacity-one-below", alignment=8, capacity="one_below"),
    # Quantized wire
    Case("grouped-fp8", wire="float8_e4m3fn", routings=("uniform", "duplicates")),
    Case("grouped-fp8-ue8m0", wire="float8_e4m3fn:ue8m0"),
    Case("grouped-int8-f32", wire="int8", dtype="float32"),
    Case("grouped-int8-ue8m0", wire="int8:ue8m0"),
    Case("ranked-fp8-f16", layout="ranked", wire="float8_e4m3fn", dtype="float16"),
    Case("padded-fp8-ue8m0", layout="padded", wire="float8_e4m3fn:ue8m0"),
    Case("grouped-mxfp4", wire="mxfp4", routings=("uniform", "duplicates")),
    Case("ranked-mxfp4-f16", layout="ranked", wire="mxfp4", dtype="float16"),
    Case("padded-odd-hidden-mxfp4-f32", layout="padded", wire="mxfp4", odd_hidden=True, dtype="float32"),
    Case("grouped-two-axes-mxfp4", axes=2, wire="mxfp4", routings=("zipf",)),
    # Already quantized input
    Case("grouped-scaled-fp8", block_scaled="float8_e4m3fn"),
    Case("ranked-scaled-fp8-ue8m0", layout="ranked", block_scaled="float8_e4m3fn:ue8m0"),
    Case("padded-scaled-int8", layout="padded", block_scaled="int8"),
    # Hidden size that is no multiple of 128
    Case("grouped-odd-hidden", odd_hidden=True),
    Case("padded-odd-hidden-fp8", layout="padded", odd_hidden=True, wire="float8_e4m3fn"),
    Case("ranked-odd-hidden-scaled", layout="ranked", odd_hidden=True, block_scaled="float8_e4m3fn"),
    # Two axes
    Case("grouped-two-axes", axes=2, routings=("uniform", "zipf")),
    Case("ranked-two-axes", layout="ranked", axes=2),
    Case("padded-two-axes-fp8", layout="padded", axes=2, wire="float8_e4m3fn"),
    Case("grouped-two-axes-uneven-one-below", axes=2, experts=lambda r: 2 * r + 3, capacity="one_below"),
    # No weights
    Case("grouped-no-weights", weights=False),
    Case("ranked-no-weights", layout="ranked", weights=False),
)

CASE_ROUTINGS = tuple((case, routing) for case in CASES for routing in case.routings)
CASE_IDS = tuple(f"{case.name}/{routing}" for case, routing in CASE_ROUTINGS)
