"""Prints the demo's progress bar and the expert load table."""

from __future__ import annotations

import sys
import time
from typing import TextIO

import numpy as np

BAR = 24


class Progress:
    """A progress bar on a terminal; elsewhere a line every twentieth of the way. Tokens/s leave out the first step."""

    def __init__(self, steps: int, tokens_per_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._steps, self._tokens = steps, tokens_per_step
        self._terminal = self._stream.isatty()
        self._every = max(1, steps // 20)
        self._started = time.monotonic()

    def show(self, step: int, loss: float, held_out: float | None) -> None:
        """After `step` (from 1) of the steps."""
        if step == 1:  # the first step compiles
            self._started = time.monotonic()
        last = step == self._steps
        if not (self._terminal or last or step == 1 or step % self._every == 0):
            return
        rate = (step - 1) * self._tokens / max(time.monotonic() - self._started, 1e-9)
        left = (self._steps - step) * self._tokens / rate if rate else 0.0
        done = BAR * step // self._steps
        line = f"[{'#' * done}{'.' * (BAR - done)}] step {step:>4}/{self._steps}  loss {loss:.3f}"
        line += f"  held-out {held_out:.3f}" if held_out is not None else ""
        line += f"  {rate:>7,.0f} tokens/s  {left:>3.0f} s left" if rate else "  compiled"
        if self._terminal:
            line = f"\r{line:<96}" + ("\n" if last else "")
        else:
            line += "\n"
        self._stream.write(line)
        self._stream.flush()


def load_table(load: np.ndarray, layers: tuple[int, ...], num_ranks: int) -> str:
    """Share of the slots that each expert got. `load` int `[MoE layers, E]`."""
    experts = load.shape[1]
    local = -(-experts // num_ranks)
    share = load / np.maximum(load.sum(1, keepdims=True), 1)
    scale = 20 / max(share.max(), 1e-9)
    head = "expert  rank  " + "  ".join(f"{f'layer {layer}':<28}" for layer in layers)
    rows = [head.rstrip()]
    for e in range(experts):
        cells = "  ".join(f"{s[e]:>6.1%} {'#' * round(s[e] * scale):<21}" for s in share)
        rows.append(f"{e:>6}  {e // local:>4}  {cells}".rstrip())
    busiest = ", ".join(f"layer {layer}: {s.max() * experts:.2f}" for layer, s in zip(layers, share, strict=True))
    rows.append(f"busiest expert over the mean (1 is perfect balance): {busiest}")
    return "\n".join(rows)
