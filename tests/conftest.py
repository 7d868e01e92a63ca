"""Eight virtual CPU devices for the whole suite, unless the caller asked for another platform; set before JAX loads."""

import gc
import os
import pathlib
import sys
import time

import pytest

# `make setup` puts libtpu beside the packages of the environment: it is for the tests that compile ahead of time, and
# would make JAX look for a TPU in every program.
if (pathlib.Path(sys.prefix) / "libtpu").is_dir():
    sys.path.append(str(pathlib.Path(sys.prefix) / "libtpu"))

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if os.environ["JAX_PLATFORMS"] == "cpu" and "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

pytest.register_assert_rewrite("tests.support.checks", "tests.support.conformance", "tests.support.memory_module")

import hypothesis  # noqa: E402
import jax  # noqa: E402

from tests.support import memory_module, quick_compiler, selections  # noqa: E402
from tests.support.thorough import SLOW, THOROUGH, is_in, not_there  # noqa: E402

# A first example compiles, which takes seconds: no deadline. The same examples every time: a failure is a failure.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25, print_blob=True)
hypothesis.settings.load_profile("suite")

TESTS = pathlib.Path(__file__).parent
LONGEST = (
    "pallas/test_interpret.py",
    "::test_readme_example_runs",
    "::test_normal_mode_end_to_end",
    "::test_training_learns",
)
"""These run first, so that no worker runs them alone at the end."""


def _mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    need = 1
    for size in sizes:
        need *= size
    if jax.device_count() < need:
        pytest.skip(f"needs {need} devices, has {jax.device_count()}")
    return jax.make_mesh(sizes, names, devices=jax.devices()[:need])


@pytest.fixture(scope="session")
def mesh():
    """Eight ranks along "ep"."""
    return _mesh((8,), ("ep",))


@pytest.fixture(scope="session")
def mesh4():
    """Four ranks along "ep": smaller programs, for tests that do not need eight."""
    return _mesh((4,), ("ep",))


@pytest.fixture(scope="session")
def node_mesh():
    """Two nodes of four ranks: the slow axis first."""
    return _mesh((2, 4), ("node", "gpu"))


@pytest.fixture(scope="session")
def dp_mesh():
    return _mesh((2, 4), ("dp", "ep"))


@pytest.fixture(scope="session")
def dp_tp_mesh():
    return _mesh((2, 2, 2), ("dp", "ep", "tp"))


@pytest.fixture
def memory():
    """The module of `make memory-test`, with one process of four devices and nothing held."""
    module = memory_module.load()
    module.clear()
    module.fail_after(-1)
    module.set_busy(False)
    deadline = time.monotonic() + 60
    while module.held() and time.monotonic() < deadline:  # workspaces of the test before are freed by a thread
        time.sleep(0.001)
    module.configure(0, 1, [0, 1, 2, 3])
    yield module
    module.fail_after(-1)
    module.set_busy(False)
    module.clear()


_frozen = None
"""The module whose first test has frozen the objects that were there before it."""


def _spare_the_collector(module) -> None:
    """Python's collector went again and again over modules, tests and compiled programs, which stay: more than a tenth
    of the suite's time. When a module's tests begin, garbage is freed, and the collector does not look at the remaining
    objects again.
    """
    global _frozen
    if module is not _frozen:
        _frozen = module
        gc.set_threshold(50_000, 20, 100)
        gc.collect()
        gc.freeze()


_few_optimizations = os.environ["JAX_PLATFORMS"] == "cpu" and "XEN_MOE_OPTIMIZED_TESTS" not in os.environ


def pytest_configure(config):
    """XLA reads its flags once in a process, so processes without `optimized` tests compile in a hurry: `make test`
    runs the optimized ones by themselves. Some modules and conftest.py files make XLA read its flags while tests are
    collected. So the flags are set before the collection if the expression of marks excludes every `optimized` test.
    """
    if _few_optimizations and "not optimized" in config.option.markexpr:
        quick_compiler.use()


def pytest_collection_finish(session):
    """Sets the flags where no collected test is `optimized`, as when tests are chosen by name and not by marks."""
    if _few_optimizations and not any(item.get_closest_marker("optimized") for item in session.items):
        quick_compiler.use()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Most of the suite's time was LLVM optimising programs that run once, on a few rows: here and in child processes.

    The marker `optimized` is for tests of behaviour that the optimisations could break. Other platforms' programs are
    left alone.
    """
    _spare_the_collector(item.module)
    few = _few_optimizations and not any(map(item.get_closest_marker, ("optimized", "tpu_aot", "gpu_aot")))
    jax.config.update("jax_disable_most_optimizations", few)
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(few))


def pytest_addoption(parser):
    parser.addoption("--share", type=int, metavar="N", help="of every selected test one case in N, and the first")


def pytest_ignore_collect(collection_path, config):
    """A share has no test of these files: nor do they have to be imported, which takes longest for tests of GPUs."""
    place = collection_path.relative_to(TESTS).as_posix() if collection_path.is_relative_to(TESTS) else ""
    return True if config.option.share and place and f"{place}/".startswith(selections.OF_ONE_JAX) else None


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config, items):
    for mark in ("optimized", "thorough"):  # as the tests themselves have it: the table is not read yet
        marked = {item.path for item in items if item.get_closest_marker(mark)}
        unsaid = [str(path) for path in marked if f"mark.{mark}" not in path.read_text()]
        if unsaid:
            raise pytest.UsageError(f"tools/run_tests.sh finds the marker `{mark}` by its text, not there: {unsaid}")
    for item in items:
        if is_in(THOROUGH, item.nodeid):
            item.add_marker(pytest.mark.thorough)
        if is_in(SLOW, item.nodeid):
            item.add_marker(pytest.mark.slow)
        for mark in selections.marks(item.nodeid):
            item.add_marker(mark)
    items.sort(key=lambda item: not any(name in item.nodeid for name in LONGEST))
    if config.args == config.getini("testpaths"):  # the whole suite: the table can be compared with it
        missing = not_there([item.nodeid for item in items])
        if missing:
            raise pytest.UsageError(f"tests/support/thorough.py names tests that are not there: {missing}")
    selected = yield  # -m and -k have selected when this comes back
    if config.option.share is not None:
        if config.option.share < 1:
            raise pytest.UsageError(f"--share={config.option.share}: N is 1 or more, of which one case runs")
        kept = selections.share([item.nodeid for item in items], config.option.share)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in kept])
        items[:] = [item for item in items if item.nodeid in kept]
    return selected
