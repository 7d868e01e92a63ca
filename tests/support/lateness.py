"""How late this machine lets a thread run. A test takes that off from the seconds for which the library promises a
limit: the limit holds as it is on a quiet machine, and a busy machine fails no test."""

from __future__ import annotations

import threading
import time

PAUSE_S = 0.001
PROMPT_S = 0.004
"""A pause of `PAUSE_S` that lasts this long is not late: so it is on a quiet machine."""


class Lateness:
    """While it is entered, a thread pauses again and again, and notes by how much a pause was too long."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # when a pause ended, and how late
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="lateness", daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _measure(self) -> None:
        before = time.monotonic()
        while not self._ended.is_set():
            time.sleep(PAUSE_S)
            now = time.monotonic()
            if now - before > PROMPT_S:
                self._late.append((now, now - before - PROMPT_S))
            before = now

    def most(self, seconds: float) -> float:
        """Returns for how many of `seconds` seconds the thread waited in vain to run, where these were the most."""
        most = within = 0.0
        first = 0
        for i, (when, late) in enumerate(self._late):
            within += late
            while first < i and self._late[first][0] < when - seconds:
                within -= self._late[first][1]
                first += 1
            most = max(most, within)
        return min(most, seconds)

    def without(self, seconds: float) -> float:
        """Returns what a quiet machine would have needed at most for something that took `seconds` on this one."""
        return seconds - self.most(seconds)
