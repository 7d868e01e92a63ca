"""Every test is in exactly one of the selections that the Makefile's targets make, and CI runs every target but one.
Programs of the tests are compiled the quick way."""

import itertools
import re
import subprocess
import sys

import pytest
from _pytest.mark.expression import Expression

from tests.support import HANG_S, ROOT, quick_compiler, selections

TARGETS = ("test", "test-thorough", "test-slow", "kernel-test", "memory-test", "maxtext-test")
NAMES = ("slow", "thorough", *selections.MARKS)

pytestmark = pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="the Makefile is not beside the tests")


def recipe(target):
    """The last line of a target of the Makefile: the one that runs tests."""
    found = re.search(rf"^{target}: .*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return found[1].splitlines()[-1]


def marks(target):
    """The expression of marks that the target gives to pytest."""
    return Expression.compile(re.search(r'"([^"]+)"', recipe(target))[1])


# no place is both: selections.py
@pytest.mark.parametrize("has", [c for n in range(len(NAMES)) for c in itertools.combinations(NAMES, n)], ids="-".join)
def test_every_test_has_one_target(has):
    for one, other in itertools.combinations([selections.MARKS[mark] for mark in has if mark in selections.MARKS], 2):
        assert not any(a.startswith(b) or b.startswith(a) for a in one for b in other)
        return
    chosen = [target for target in TARGETS if marks(target).evaluate(lambda name, **_: name in has)]
    assert len(chosen) == 1, chosen


def test_the_targets_that_name_places_name_all_of_them():
    text = (ROOT / "Makefile").read_text()
    assert re.search(r"^MEMORY_TESTS = (.*)$", text, re.MULTILINE)[1].split() == [
        f"tests/{f}" for f in selections.MEMORY
    ]
    assert "$(MEMORY_TESTS)" in recipe("memory-test")
    for target, places in (("kernel-test", selections.KERNELS), ("maxtext-test", selections.CLIENTS)):
        for place in places:
            assert f" tests/{place.rstrip('/')} " in recipe(target)
    for places in selections.MARKS.values():
        assert all((ROOT / "tests" / place).exists() for place in places)
    # marks alone select the tests of the other targets
    for target in ("test", "test-thorough", "test-slow"):
        assert " tests/" not in recipe(target) and "--ignore" not in recipe(target)


def test_where_a_test_lies_gives_its_marks(request):
    assert selections.marks("tests/native/any/test_new.py::test_a[1]") == ["kernels"]
    assert selections.marks("native/emulator/test_kernels_emulated.py::test_scenario") == ["kernels"]
    assert selections.marks("tests/ffi/test_nccl.py::test_a") == ["memory"]
    assert selections.marks("tests/clients/test_maxtext.py::test_a") == ["clients"]
    assert selections.marks("tests/gpu/test_nodes.py::test_a") == []
    for item in request.session.items:  # all that run beside this one
        assert [m for m in selections.MARKS if item.get_closest_marker(m)] == selections.marks(item.nodeid), item.nodeid


def test_a_share_has_every_test_in_some_of_its_cases():
    cases = [f"tests/core/test_a.py::TestOne::test_a[{i}[x]-y]" for i in range(16)]
    others = ["tests/core/test_a.py::TestTwo::test_a[0[x]-y]", "tests/flax/test_b.py::test_b"]
    of_one = ["tests/benchmarks/test_c.py::test_c", "tools/test_tpu_check_programs.py::test_d[1]"]
    assert selections.share([*cases, *of_one, *others], 4) == {cases[i] for i in (0, 7, 10, 13)} | {*others}
    assert selections.share(cases + others, 1) == {*cases, *others}
    for place in selections.OF_ONE_JAX:
        assert list((ROOT / "tests").glob(f"{place}*")), place


@pytest.mark.skipif(not (ROOT / ".ci" / "run").exists(), reason=".ci is not beside the tests")
@pytest.mark.parametrize("target", [target for target in TARGETS if target != "test-slow"])
def test_ci_runs_the_target(target):
    steps = re.findall(r"^\s*(?:step|beside) .*$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert any(re.search(rf"\bmake {target}(?= |$)(?!.*--(ignore|deselect|share)|.* -k )", line) for line in steps), (
        target
    )


def test_programs_of_the_targets_are_compiled_the_quick_way(request):
    """XLA takes twice as long where it has read its flags while tests were collected, and says nothing."""
    if "not optimized" not in request.config.option.markexpr or not quick_compiler.wanted():
        pytest.skip("the marks do not say that no program is `optimized`, or the programs are for another platform")
    assert quick_compiler.taken(), "XLA read its flags before tests/conftest.py set them"


def test_programs_can_set_variables_before_jax_reads_them():
    """Programs of the tests import these modules first; JAX reads JAX_PLATFORMS and others when it is imported."""
    program = "import sys, tests.elastic.serve_chaos, tests.support.quick_compiler; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S, cwd=ROOT)
