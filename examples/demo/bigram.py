"""The baseline: a byte-bigram model with interpolated Kneser-Ney smoothing."""

from __future__ import annotations

import numpy as np

DISCOUNT = 0.75


def held_out_loss(train: np.ndarray, windows: np.ndarray) -> float:
    """Nats per byte of `windows uint8 [n, length + 1]` under a bigram model of `train`.

    `p(b|a) = max(c(ab) - D, 0)/c(a) + D * N(a)/c(a) * p_continuation(b)` with `D = 0.75`, `N(a)` the number of distinct
    bytes seen after `a`, and `p_continuation` proportional to the distinct bytes before `b`, mixed with uniform for
    bytes never seen (Chen and Goodman 1999).
    """
    counts = np.zeros((256, 256))
    np.add.at(counts, (train[:-1], train[1:]), 1)
    predecessors = (counts > 0).sum(0)
    continuation = (predecessors + 1 / 256) / (predecessors.sum() + 1)
    total = counts.sum(1, keepdims=True)
    followers = (counts > 0).sum(1, keepdims=True)
    seen = np.maximum(total, 1)
    probability = np.maximum(counts - DISCOUNT, 0) / seen + DISCOUNT * followers / seen * continuation
    probability = np.where(total > 0, probability, continuation)
    if not np.allclose(probability.sum(1), 1):
        raise AssertionError("the bigram model's probabilities do not add up to 1")
    return float(-np.log(probability[windows[:, :-1], windows[:, 1:]]).mean())
