"""The newest jax that the whole test suite has run on, and the warning about a newer one.

A newer jax is not refused: that would keep users away for nothing where a release only adds to JAX, and the few places
that rest on what JAX does not promise (`_jax_internals`, the FFI) fail aloud. The oldest is the requirement in
pyproject.toml.
"""

from __future__ import annotations

import functools
import warnings

import jax

NEWEST_JAX = "0.12.0.1"
"""Written here alone: `make versions`, and so CI, read this line; `xen-moe-jax doctor` and the warning import it."""


def numbers(version: str) -> tuple[int, ...]:
    """A version as numbers, which compare as `jax.__version_info__` does."""
    return tuple(int(part) for part in version.split("."))


def newer() -> str | None:
    """Says that the running jax is newer than any that was tested; None where it is not."""
    if jax.__version_info__ <= numbers(NEWEST_JAX):
        return None
    return f"jax {jax.__version__} is newer than {NEWEST_JAX}, the newest that the test suite has run on"


@functools.cache
def warn_of_newer() -> None:
    """Warns of a newer jax than was tested, once in a process: the first lowering of an operation calls it."""
    if found := newer():
        # The stack has JAX's frames alone; the caller's line would say nothing.
        warnings.warn(f"xen_moe_jax: {found}. If something fails: pip install 'jax<={NEWEST_JAX}'", stacklevel=2)
