"""`perf_model`: the expected time of an operation, from the bytes that each link carries. Arithmetic on paper, no
device.

A token crosses to a node once (over the slow link, to the GPU with the sender's index), is forwarded there over the
fast link, and inside a node goes once to each rank that wants it. Arrived rows are placed once for each slot. All of
this goes on at the same time, so the slowest part and the fixed cost of an operation make the time. The default links
are fitted to figures measured on 2 and 4 x H200 (`ops_h200x4.json`, `jax_best_h200x2.json` and `jax_best_h200x4.json`
in `benchmarks/results`); `tests/tuning/test_perf_model.py` holds predictions against the figures of these files.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax import _exact, _home_sums, _validate
from xen_moe_jax._numbers import as_float, entries, is_one_of, known_array
from xen_moe_jax._placement import Placement
from xen_moe_jax._quantize import parse_wire

OPERATIONS = ("dispatch", "combine", "balance")
MOST_BY_HOME = 16
"""Ranks of a node up to which one kernel combines by home (`WhyNotByHome` in cuda_kernels/core/plan.cc)."""
SMALL_BATCH = 512
"""Up to this many tokens a rank the fixed cost is that of the small-batch kernels."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Speed of the links between the ranks. Bandwidths in bytes a second, one way, of one rank; times in seconds.

    Pairs are sequences of two numbers, and are kept as tuples. Raises ValueError unless rates are numbers above zero,
    and times and `lent_rows` numbers of at least zero.

    Attributes:
      fast, fast_small: bandwidth inside a node, for large batches and for batches up to `SMALL_BATCH` tokens a rank.
        The defaults are slopes of measured time over bytes on H200s over NVLink. Those for large batches are of
        bfloat16 on four GPUs. Those for small batches are of every dtype, with 32 and 128 tokens a rank on four GPUs
        and with 128 on two.
      fixed, fixed_small: seconds that an operation takes beside its bytes, for (dispatch, combine). The defaults are
        the intercepts of the same lines.
      memory: rate at which a rank places the rows of a dispatch or adds up the rows of a combine, a row's bytes counted
        once for each slot. It is the bound where ranks are few; the default is from 2 x H200.
      slow: bandwidth between nodes. The default is a 400 Gb/s network card for each GPU at nine tenths of its rate; not
        measured.
      flops: floating-point operations a second of the experts' matmuls; the default is a grouped matmul of bfloat16 on
        an H100 (`torch._grouped_mm`, 532 to 741 TFLOP/s by shape).
      exact: seconds that `balance="exact"` takes beside all bytes: it assigns slots, and its exchanges run even where
        no weights travel.
      lent: bytes of lent weights (`slots_per_rank=None`) inside a node, divided by the seconds that they add to a pass.
        The seconds include what a round costs beside its transfer.
      lent_rows: seconds that a row of a lent expert takes longer than a row at home, as a part of the time of its
        matmuls. `exact`, `lent` and `lent_rows` are fitted to forward passes on 2 x H200 (docs/lab/layers.md).
      hop, hop_small: seconds that crossing between nodes adds, for (dispatch, combine): until the first chunk is on the
        slow link, and once the last has come. The values for large batches are from a simulated link on 2 x H100
        (`slow_link_h100x2.json`), less the time of the simulation itself; small batches are not measured, and no
        network is.
    """

    fast: float = 333e9
    fast_small: float = 290e9
    fixed: tuple[float, float] = (25.8e-6, 18.8e-6)
    fixed_small: tuple[float, float] = (9.0e-6, 10.8e-6)
    memory: float = 2.09e12
    slow: float = 45e9
    hop: tuple[float, float] = (25e-6, 70e-6)
    hop_small: tuple[float, float] = (10e-6, 10e-6)
    flops: float = 600e12
    exact: float = 330e-6
    lent: float = 175e9
    lent_rows: float = 0.53

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            pair = isinstance(field.default, tuple)
            try:
                numbers = [as_float(v) for v in (entries(value) if pair else [value])]
            except TypeError:
                numbers = []
            rate = field.name in ("fast", "fast_small", "memory", "slow", "flops", "lent")
            if len(numbers) != 1 + pair or any(n is None or n < 0 or (rate and n == 0) for n in numbers):
                wanted = "two numbers of seconds >= 0" if pair else "a number > 0" if rate else "a number >= 0"
                raise ValueError(f"Links.{field.name}={value!r}: must be {wanted}")
            object.__setattr__(self, field.name, tuple(numbers) if pair else numbers[0])


H200 = Links()


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The result of `perf_model`.

    Attributes:
      rows_fast, rows_slow: rows that the busiest rank sends over the fast and over the slow link.
      row_bytes: bytes of one row on the wire, scales included.
      bytes_fast, bytes_slow: bytes that the busiest rank sends over each link.
      bytes_local: rows that the busiest rank places, or adds up, once for each slot, as they lie in memory; "balance":
        weights that it copies to a slot of its own; 0 where none are copied (`slots_per_rank` is None).
      seconds: predicted time of the operation.
      bound: "fast", "slow", "memory", "fixed" or, of lent weights, "matmul": the largest term.
      seconds_saved: "balance": what the experts of the busiest rank take less; 0 for other operations.
    """

    rows_fast: float
    rows_slow: float
    row_bytes: int
    bytes_fast: float
    bytes_slow: float
    bytes_local: float
    seconds: float
    bound: str
    seconds_saved: float = 0.0

    @property
    def pays(self) -> bool:
        """True where `balance="exact"` saves more than it costs."""
        return self.seconds_saved > self.seconds


def perf_model(
    operation: str = "dispatch",
    *,
    num_tokens: int,
    hidden: int,
    num_ranks: int,
    num_experts: int,
    top_k: int,
    ranks_per_node: int | None = None,
    dtype: Any = "bfloat16",
    wire: Any = None,
    nodes_per_token: int | None = None,
    topk_idx: Any = None,
    placement: Placement | None = None,
    intermediate: int | None = None,
    slots_per_rank: int | None = None,
    links: Links = H200,
) -> Prediction:
    """Predicts bytes per link and the time of a dispatch or combine, or of the weights that `balance="exact"` fetches.

    Args:
      operation: "dispatch" or "combine"; or "balance": rows are then the experts that the busiest rank fetches,
        `row_bytes` the weights of one (three matrices `[H, F]`), and `seconds_saved` is the time by which the experts
        of the busiest rank get shorter, in a forward pass. Needs `topk_idx` and `intermediate`.
      num_tokens, hidden, num_ranks, num_experts, top_k: `T` per rank, `H`, `R`, `E`, `K`.
      ranks_per_node: ranks that the fast link joins; None is all of them. Must divide `num_ranks`.
      dtype: dtype of the rows; float8_e4m3fn and int8 travel with one float32 scale per 128 elements.
      wire: as in `xm.dispatch`; the format that travels instead of `dtype`.
      nodes_per_token: group-limited routing: the token's experts are on this many nodes at most. None: anywhere.
      topk_idx: integer `[R, T, K]`, the routing itself; None is `K` distinct experts drawn uniformly, in expectation.
      placement: as in `xm.dispatch`; needs `topk_idx`. Each row of a combine then travels by itself.
      intermediate: "balance": features `F` inside an expert.
      slots_per_rank: "balance": as in `xm.dispatch`.
      links: bandwidths and fixed costs.

    Returns:
      `Prediction`.

    Raises:
      ValueError: a size is not positive, `ranks_per_node` does not divide `num_ranks`, `topk_idx` has another shape,
        `dtype` or `wire` is unknown, or `intermediate` or `slots_per_rank` is given to another operation than
        "balance". TypeError: `topk_idx` holds no integers, it or `placement` is traced, or `links` is no `Links`.
    """
    caller = "perf_model"
    if not is_one_of(operation, OPERATIONS):
        raise ValueError(f"{caller}: operation={operation!r}: must be one of {OPERATIONS}")
    ranks = _validate.integer(num_ranks, "num_ranks", caller, minimum=1)
    tokens = _validate.integer(num_tokens, "num_tokens", caller, minimum=1)
    hidden = _validate.integer(hidden, "hidden", caller, minimum=1)
    experts = _validate.integer(num_experts, "num_experts", caller, minimum=1)
    top_k = _validate.integer(top_k, "top_k", caller, minimum=1)
    if top_k > experts:
        raise ValueError(f"{caller}: top_k={top_k}: must be at most num_experts={experts}")
    per_node = _validate.ranks_per_node(ranks_per_node, ranks, caller)
    if not isinstance(links, Links):
        raise TypeError(f"{caller}: links={links!r}: must be an xm.Links")
    dtype, small, calls = _validate.dtype(dtype, caller), tokens <= SMALL_BATCH, 1
    held = _validate.exact_slots(slots_per_rank, experts, ranks, caller) if slots_per_rank is not None else None
    most = nodes = ranks // per_node
    if nodes_per_token is not None:
        most = min(nodes, _validate.integer(nodes_per_token, "nodes_per_token", caller, minimum=1))
    row = _row_bytes(hidden, dtype, wire, caller)
    if placement is not None:
        _validate.placement(placement, experts, ranks, caller)
    if operation != "balance" and (held is not None or intermediate is not None):
        raise ValueError(
            f"{caller}: operation={operation!r} with intermediate={intermediate!r}, slots_per_rank={slots_per_rank!r}: "
            "these belong to operation='balance': leave them None"
        )
    if operation == "balance":
        inner = _validate.integer(intermediate, "intermediate", caller, minimum=1)
        if topk_idx is None:
            raise ValueError(
                f"{caller}: operation='balance' with topk_idx=None: the cost follows from the routing; pass it"
            )
        counts = _counts(topk_idx, tokens, experts, top_k, ranks)
        once = sum(_expected_rows(tokens, experts, top_k, ranks, per_node, nodes)[:2])
        by_home = (tokens * top_k * (1 - 1 / ranks) - once) * hidden * jnp.dtype(dtype).itemsize
        fixed = links.fixed[0] + links.exact + max(by_home, 0.0) / links.fast
        return _fetched_weights(counts, tokens * top_k, held, per_node, hidden, inner, dtype, links, fixed)
    if placement is not None:
        if topk_idx is None:
            raise ValueError(
                f"{caller}: placement with topk_idx=None: which replica gets a row follows from the routing"
            )
        placement = jax.tree.map(lambda array: known_array(array, caller, "placement"), placement)
        given = _check_routing(topk_idx, tokens, top_k, ranks)
        with jax.ensure_compile_time_eval():  # a caller may be traced
            topk_idx = np.stack([np.asarray(placement.route(idx, rank)) for rank, idx in enumerate(given)])
        experts = ranks * placement.slots_per_rank
        if operation == "combine" and placement.sums == "home":
            if per_node < ranks or ranks > MOST_BY_HOME:
                calls = top_k // _home_sums.slots_at_once(tokens, top_k)
            topk_idx, tokens, top_k = topk_idx.reshape(ranks, -1, 1), tokens * top_k, 1
    if topk_idx is None:
        fast, slow, slots = _expected_rows(tokens, experts, top_k, ranks, per_node, most)
    else:
        fast, slow, slots = _counted_rows(topk_idx, tokens, experts, top_k, ranks, per_node)
    local = slots * _row_bytes(hidden, dtype, None, caller)
    which = OPERATIONS.index(operation)
    fixed, hop = (links.fixed_small, links.hop_small) if small else (links.fixed, links.hop)
    terms = {
        "fixed": calls * (fixed[which] + (hop[which] if slow else 0.0)),
        "fast": fast * row / (links.fast_small if small else links.fast),
        "slow": slow * row / links.slow,
        "memory": local / links.memory,
    }
    seconds = terms["fixed"] + max(terms[name] for name in terms if name != "fixed")
    bound = max(terms, key=lambda name: terms[name])
    return Prediction(fast, slow, row, fast * row, slow * row, local, seconds, bound)


def _fetched_weights(
    counts: np.ndarray,
    most: int,
    held: int | None,
    per_node: int,
    hidden: int,
    inner: int,
    dtype: Any,
    links: Links,
    fixed: float,
) -> Prediction:
    """Returns the cost and the gain of `balance="exact"`.

    Args:
      counts: int `[R, E]`, slots of each rank's tokens that name each expert.
      most: rows that a rank computes at most, `T * K`.
      held: slots of a rank to which weights are copied; None where weights are lent.
      per_node: ranks that the fast link joins.
      hidden, inner: `H` and `F` of an expert.
      dtype: of the weights.
      links: bandwidths.
      fixed: seconds that it takes where no weights are fetched.
    """
    ranks, experts = counts.shape
    slots = _exact.slots_at_home(experts, ranks) if held is None else held
    matrix, itemsize = hidden * inner, jnp.dtype(dtype).itemsize
    divide = jax.jit(_exact.divide, static_argnames=("slots", "most"))
    with jax.ensure_compile_time_eval():  # a caller may be traced
        parts = np.asarray(divide(jnp.asarray(counts, jnp.int32), slots=slots, most=most))
    home = np.arange(experts) // -(-experts // ranks)
    rank = np.arange(ranks)[:, None]
    far = (parts > 0) & (home // per_node != rank // per_node)
    near = (parts > 0) & (home != rank) & ~far
    size = 3 * matrix * itemsize
    fast, slow = float(near.sum(axis=1).max()), float(far.sum(axis=1).max())
    local = 0.0 if held is None else float(((parts > 0) & (home == rank)).sum(axis=1).max()) * size
    of_row = 6 * matrix / links.flops
    lent_rows = float(np.where(home != rank, parts, 0).sum(axis=1).max()) if held is None else 0.0
    terms = {
        "fixed": fixed,
        "fast": fast * size / (links.lent if held is None else links.fast),
        "slow": slow * size / links.slow,
        "memory": local / links.memory,
        "matmul": lent_rows * links.lent_rows * of_row,
    }
    before = np.bincount(home, counts.sum(axis=0), ranks).max()
    saved = float(before - parts.sum(axis=1).max()) * of_row
    seconds = sum(terms.values())  # one after another
    bound = max(terms, key=lambda name: terms[name])
    return Prediction(fast, slow, size, fast * size, slow * size, local, seconds, bound, saved)


def _counts(topk_idx: Any, tokens: int, experts: int, top_k: int, ranks: int) -> np.ndarray:
    """Returns `[R, E]`, the slots of each rank's tokens that name each expert."""
    topk_idx = _check_routing(topk_idx, tokens, top_k, ranks)
    used = np.where((topk_idx >= 0) & (topk_idx < experts), topk_idx, experts).reshape(ranks, -1)
    return np.stack([np.bincount(row, minlength=experts + 1)[:experts] for row in used])


def _check_routing(topk_idx: Any, tokens: int, top_k: int, ranks: int) -> np.ndarray:
    """Returns int64 `[R, T, K]`; raises ValueError or TypeError for a routing that is not integers of this shape."""
    topk_idx = known_array(topk_idx, "perf_model", "topk_idx")
    if topk_idx.shape != (ranks, tokens, top_k):
        raise ValueError(
            f"perf_model: topk_idx has shape {topk_idx.shape}: must be [R, T, K] = {[ranks, tokens, top_k]}"
        )
    if not np.issubdtype(topk_idx.dtype, np.integer):
        raise TypeError(f"perf_model: topk_idx has dtype {topk_idx.dtype}: must be an integer dtype")
    return topk_idx.astype(np.int64)


def _row_bytes(hidden: int, dtype: Any, wire: Any, caller: str) -> int:
    """Returns the bytes of a row of `hidden` elements on the wire, scales included."""
    parsed = _validate.wire(wire, caller) or (parse_wire(dtype) if jnp.dtype(dtype).itemsize == 1 else None)
    return hidden * jnp.dtype(dtype).itemsize if parsed is None else parsed.row_bytes(hidden)


def _expected_rows(
    tokens: int, experts: int, top_k: int, ranks: int, per_node: int, nodes_per_token: int
) -> tuple[float, float, float]:
    """Rows over the fast and the slow link of the busiest rank of each, and slots of the rank that has most experts;
    `top_k` distinct experts drawn uniformly.

    With fewer than all nodes allowed, the token's node set is uniform among the nodes that hold experts, and its
    experts are uniform inside it.
    """
    block = -(-experts // ranks)
    held = np.clip(experts - block * np.arange(ranks), 0, block).reshape(-1, per_node)  # [node, rank in it]
    of_node = held.sum(axis=1)
    nodes, holding = len(held), int(np.count_nonzero(of_node))
    chosen = min(nodes_per_token, holding) / holding
    allowed = experts * chosen

    def reached(share: float) -> float:
        """Probability that at least one of a token's experts is in a `share` of the allowed experts."""
        if share == 0:
            return 0.0
        if allowed - share < top_k:
            return 1.0
        miss = math.lgamma(allowed - share + 1) - math.lgamma(allowed - share - top_k + 1)
        return 1.0 - math.exp(miss - math.lgamma(allowed + 1) + math.lgamma(allowed - top_k + 1))

    by_share = {share: chosen * reached(share) for share in {*held.ravel().tolist(), *of_node.tolist()}}
    rank_hit = np.vectorize(by_share.__getitem__, otypes=[float])(held)
    node_hit = np.vectorize(by_share.__getitem__, otypes=[float])(of_node)
    slow = tokens * float((node_hit.sum() - node_hit).max())
    # every rank gets its tokens over the fast link, except its own tokens and the tokens that come straight from its
    # rail
    fast = tokens * nodes * float((rank_hit.sum(axis=1, keepdims=True) - rank_hit).max())
    return fast, slow, tokens * top_k * ranks * block / experts


def _counted_rows(
    topk_idx: Any, tokens: int, experts: int, top_k: int, ranks: int, per_node: int
) -> tuple[float, float, float]:
    """Counts the rows of a given routing: those of the busiest rank of each link, and the slots of the rank that has
    most."""
    topk_idx = _check_routing(topk_idx, tokens, top_k, ranks)
    owner = np.where((topk_idx >= 0) & (topk_idx < experts), topk_idx // -(-experts // ranks), -1)
    hit = (owner[..., None] == np.arange(ranks)).any(axis=2)  # [source, token, rank]
    by_node = hit.reshape(ranks, tokens, ranks // per_node, per_node)
    fast, slow = np.zeros(ranks), np.zeros(ranks)
    for source in range(ranks):
        home, index = divmod(source, per_node)
        for node in range(ranks // per_node):
            sender = node * per_node + index  # the source itself, or its rail in the other node
            others = by_node[source, :, node].copy()
            others[:, index] = False
            fast[sender] += others.sum()
            if node != home:
                slow[source] += by_node[source, :, node].any(axis=1).sum()
    slots = np.bincount(owner[owner >= 0], minlength=ranks)
    return float(fast.max()), float(slow.max()), float(slots.max())
