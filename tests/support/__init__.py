"""Code that the tests share. Imported as `tests.support`; the repository's root is the only path that it needs.

`cases` and `conformance` are the contract as a table and a class, `oracle` its expected values in NumPy, `checks` the
comparisons, `processes` a runner with a hard time limit, `forked` programs that begin with their imports made,
`lateness` what a busy machine adds to a time, `quick_compiler` XLA with its quickest way, `multiprocess_worker` the
program of one process, `layers` and `dense_moe` the Flax layer's small sizes and its dense equal.
"""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[2]
"""The root of the repository."""
HANG_S = 800
"""Seconds after which a test ends a program that should have ended by itself. On a slow machine, or beside others, a
program takes minutes. pytest ends a test later than that (`faulthandler_timeout`)."""
