"""The text as bytes: its source, the held-out part, and the batches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

BLOCK = 4096
"""Bytes of one block; every tenth block is held out, so that both parts cover the whole text."""
MIN_BYTES = 100_000


@dataclasses.dataclass(frozen=True)
class Split:
    """uint8 arrays of the two parts, and where the text came from."""

    train: np.ndarray
    held_out: np.ndarray
    source: str


def load(path: str | None) -> Split:
    """The text of a file, or the Python reference that the standard library carries (`pydoc_data.topics`)."""
    if path is None:
        from pydoc_data import topics

        data = "\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()
        source = "pydoc_data.topics"
    else:
        data, source = Path(path).read_bytes(), path
    if len(data) < MIN_BYTES:
        raise ValueError(f"--text {source}: {len(data)} bytes; needs at least {MIN_BYTES} to train and hold out")
    blocks = [np.frombuffer(data[i : i + BLOCK], np.uint8) for i in range(0, len(data), BLOCK)]
    train = [b for i, b in enumerate(blocks) if i % 10 != 9]
    held_out = [b for i, b in enumerate(blocks) if i % 10 == 9]
    return Split(np.concatenate(train), np.concatenate(held_out), source)


def random_windows(text: np.ndarray, count: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """`count` windows at random places, uint8 `[count, length + 1]`: inputs and, one byte on, targets."""
    starts = rng.integers(0, len(text) - length, size=count)
    return text[starts[:, None] + np.arange(length + 1)]


def consecutive_windows(text: np.ndarray, length: int) -> np.ndarray:
    """The text cut into windows uint8 `[n, length + 1]` whose targets cover it once; a short rest is left out."""
    count = (len(text) - 1) // length
    return text[np.arange(count)[:, None] * length + np.arange(length + 1)]
