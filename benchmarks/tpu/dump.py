"""Reads libtpu's dump of the kernels that it compiles: their final VLIW bundles, and the loops in them.

libtpu writes one file for every kernel, a bundle a line. A loop begins at a bundle that is tagged `LB` and ends with a
branch back to it, whose delay slots belong to it too: those that every branch has, and further bundles with as many `>`
as the loop. (The rows of `>` before a bundle alone say less: an empty bundle has none, and the branch back may show
outside of its loop.)
"""

from __future__ import annotations

import collections
import dataclasses
import os
import pathlib
import re
from collections.abc import Iterator

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?\s*:\s*(>*)\s*\{(.*)")
OPERATION = re.compile(r"(dma\.[a-z_.]+|vld|vst|vsel|sld|sst|vpop|vrot|vperm|vpack|vunpack)\b")
BRANCH = re.compile(r"\bsbr\.rel (?:\(!?%\w+\) )?target = \$region(\d+)")
REGION = re.compile(r"\bStart(?:/End empty)? region (\d+)")
MEETING = re.compile(r"\bvwait\b")
"""Waits on a semaphore of another rank; a DMA is waited for by another operation."""
SIGNAL = re.compile(r"\bvsyncadd\.remote\b")
"""Signals a semaphore of another rank."""
KERNEL = re.compile(r"-(?:jvp_|transpose_)*(xen_moe_\w+?)_*(?:\.\d+)*(?:\.\w+)*-\d+-final_bundles\.txt$")
"""A kernel's name in that of a file. Of a kernel in a derivative JAX writes `jvp(name)`, and XLA `_` for brackets."""
SHARED = ("BarrierMegacore", "barrier-megacore")
"""Names in a kernel whose grid is divided between two cores: the cores meet when it begins (the second name is
v4's)."""


@dataclasses.dataclass
class Loop:
    """A loop's own bundles, their operations, and the loops inside it.

    Attributes:
      signals: of a kernel's bundles those of one turn of the loops that signal every rank.
      waits: of a kernel's bundles those of one turn of the loop that waits for the records of every semaphore.
      cores: TensorCores that share a kernel's steps.
    """

    depth: int
    bundles: int = 0
    operations: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    inner: list[Loop] = dataclasses.field(default_factory=list)
    signals: int = 0
    waits: int = 0
    cores: int = 1

    def all_inner(self) -> Iterator[Loop]:
        for loop in self.inner:
            yield loop
            yield from loop.all_inner()


def loops(text: str, delay: int | None = None) -> Loop:
    """The loops of a kernel; the grid is the first of them.

    Bundles that a loop runs under a condition in order to meet other ranks, at the beginning and at the end of a
    kernel, are counted once, outside of all loops.

    Args:
      delay: `delay_slots` of the generation; None is those of this kernel.

    Raises:
      ValueError: a loop has no branch back: this parser does not know the format of the text.
    """
    lines = _bundles(text)
    bodies = [body for _, body in lines]
    begins = [i for i, (tag, _) in enumerate(lines) if tag == "LB"]
    branches = {i: int(match[1]) for i, match in enumerate(map(BRANCH.search, bodies)) if match}
    delay = delay_slots(text) or 0 if delay is None else delay
    regions = {int(number): i for i, body in enumerate(bodies) for number in REGION.findall(body)}
    inside = [len(match[2]) for match in map(BUNDLE.match, text.splitlines()) if match]
    back = {}
    for at, to in branches.items():
        if (begin := regions.get(to, at + 1)) <= at:
            end = at + delay
            while end + 1 < len(lines) and inside[end + 1] >= inside[begin] and not lines[end + 1][0]:
                end += 1
            back[begin] = end
    if lost := [f"{i:#x}" for i in begins if i not in back]:
        raise ValueError(f"no branch leads back to the loops that begin at {', '.join(lost)}")
    once = _meetings(bodies, branches, regions, begins, delay)
    signals, waits = _loops_over_ranks(bodies, back, once)
    once |= signals

    top = Loop(0, cores=2 if any(mark in text for mark in SHARED) else 1)
    stack, ends = [top], [len(lines)]
    for i, body in enumerate(bodies):
        while i > ends[-1]:
            stack.pop()
            ends.pop()
        if i in once:
            top.bundles += 1
            top.signals += i in signals
            top.waits += i in waits
            continue
        if i in back:
            stack[-1].inner.append(Loop(len(stack)))
            stack.append(stack[-1].inner[-1])
            ends.append(back[i])
        stack[-1].bundles += 1
        stack[-1].operations.update(OPERATION.findall(body))
    return top


def delay_slots(text: str) -> int | None:
    """Bundles behind a branch that run before it is taken, 4 on v5p, 1 on tpu7x; None where a kernel does not show it.

    A tagged bundle, to which a branch leads or in which a loop begins, follows some branch directly behind them.
    """
    gaps, last = [], None
    for i, (tag, body) in enumerate(_bundles(text)):
        if tag and last is not None:
            gaps.append(i - last - 1)
        if BRANCH.search(body):
            last = i
    return min(gaps, default=None)


def _bundles(text: str) -> list[tuple[str | None, str]]:
    """Tag and operations of every bundle."""
    return [(match[1], match[3]) for match in map(BUNDLE.match, text.splitlines()) if match]


def _meetings(
    bodies: list[str], branches: dict[int, int], regions: dict[int, int], begins: list[int], delay: int
) -> set[int]:
    """Bundles that a branch inside a loop skips unless it is time to wait for other ranks."""
    skipped = [(at + delay + 1, regions[to]) for at, to in branches.items() if regions.get(to, 0) > at]
    found: set[int] = set()
    for i, body in enumerate(bodies):
        around = [region for region in skipped if region[0] <= i < region[1]]
        if MEETING.search(body) and around:
            begin, end = min(around, key=lambda region: region[1] - region[0])
            if begins and begins[0] < begin:  # else it is the grid itself that is skipped
                found |= set(range(begin, end))
    return found


def _loops_over_ranks(bodies: list[str], back: dict[int, int], once: set[int]) -> tuple[set[int], set[int]]:
    """Bundles of the loops that signal every rank; and of the loops that wait for the records of every semaphore: they
    have loops inside, and stand in a branch that meets other ranks.
    """
    signals, waits = set(), set()
    for begin, end in back.items():
        bundles = set(range(begin, end + 1))
        innermost = not any(begin < other <= end for other in back)
        outermost = not any(other < begin <= until for other, until in back.items() if other in once)
        if innermost and any(SIGNAL.search(bodies[i]) for i in bundles):
            signals |= bundles
        if not innermost and outermost and begin in once:
            waits |= bundles
    return signals, waits


def request_dump(folder: str) -> None:
    """Makes libtpu write bundles to `folder`: before it is loaded, hence before JAX has devices.

    Only the final ones: all passes of a program with matmuls are gigabytes.
    """
    arguments = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
    os.environ["LIBTPU_INIT_ARGS"] = " ".join(filter(None, [os.environ.get("LIBTPU_INIT_ARGS"), arguments]))


def take_dump(folder: str) -> list[tuple[str, Loop]]:
    """The library's kernels in the dump of one compilation, with their names, which several may share; the dump is
    removed.

    Raises:
      RuntimeError: there is none: libtpu was loaded before `request_dump`.
    """
    files = list(pathlib.Path(folder).iterdir())
    if not files:
        raise RuntimeError(f"libtpu wrote no bundles to {folder}: request_dump must come before JAX makes its devices")
    texts = []
    for path in files:
        match = KERNEL.search(path.name)
        if match and "analysis" not in path.name:
            texts.append((match[1], path.read_text(errors="replace")))
        path.unlink()
    delay = min((slots for _, text in texts if (slots := delay_slots(text)) is not None), default=0)
    return [(name, loops(text, delay)) for name, text in texts]
