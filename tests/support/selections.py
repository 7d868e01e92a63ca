"""Selects the tests that are C++ alone or need another library, which have targets of their own: their folder decides,
and conftest.py marks them.

Everything else is in `make test`, `make test-thorough` or `make test-slow`, by the tables of `thorough.py`. `share`
says which cases `make test` runs on a second version of jax.
"""

KERNELS = ("native/",)
"""`make kernel-test`: the CUDA kernels on host threads, and the networks that they are tested over. A new test in this
folder is one of them."""
MEMORY = ("ffi/test_memory.py", "ffi/test_memory_nodes.py", "ffi/test_nccl.py", "ffi/test_processes.py")
"""`make memory-test`: files that need the module that it builds."""
CLIENTS = ("clients/",)
"""`make maxtext-test`: files that need another library, which uses this one."""
MARKS = {"kernels": KERNELS, "memory": MEMORY, "clients": CLIENTS}
OF_ONE_JAX = (
    *("benchmarks/", "gpu/", "tpu/", "tools/test_bazel", "tools/test_children", "tools/test_imports"),
    *("tools/test_installation", "tools/test_node_check", "tools/test_oracle", "tools/test_selections"),
    "tools/test_tpu_check",
)
"""Beginnings of paths in tests/: tests of benchmarks and tools, and tests that need accelerators. CI runs them on one
version of jax."""


def marks(nodeid: str) -> list[str]:
    """The entries of `MARKS` for a test; its path may begin with tests/ or be relative to tests/."""
    path = nodeid.split("::")[0].removeprefix("tests/")
    return [mark for mark, places in MARKS.items() if path.startswith(places)]


def share(nodeids: list[str], of: int) -> set[str]:
    """Returns the tests that run on a second version of jax (`--share`): none of `OF_ONE_JAX`, and of every other test
    its first case and about one in `of` of the others. A test without parameters is one case.

    One of each `of` neighbours is chosen, at a place that moves by one from these neighbours to the next ones, so that
    a parameter that repeats in steps of two or four is chosen with all of its values.

    What another version breaks is a function of jax, or what XLA makes of it, and most cases of a test call the same
    ones. The library's own arithmetic, by which cases differ, has met all of them on the first version.
    """
    cases: dict[str, list[str]] = {}
    for nodeid in nodeids:
        if not nodeid.removeprefix("tests/").startswith(OF_ONE_JAX):
            cases.setdefault(nodeid.split("[", 1)[0], []).append(nodeid)
    return {case for one in cases.values() for at, case in enumerate(one) if (at + at // of) % of == 0}
