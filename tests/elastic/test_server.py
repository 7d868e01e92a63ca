"""The example's server under fire: no wrong token, no rank lost that was not killed, no hang."""

import importlib.util
import os

import jax
import pytest

from tests.elastic import serve_chaos
from tests.support import quick_compiler, transfer


@pytest.fixture
def few_optimizations(monkeypatch):
    """Lets the ranks that a test starts compile within a second."""
    if jax.default_backend() != "cpu":
        pytest.skip("tests/gpu/test_elastic.py has these cases for GPUs")
    monkeypatch.setenv("XLA_FLAGS", f"{quick_compiler.FLAGS} --xla_backend_optimization_level=0")


def check(figures, kills):
    assert figures["kills"] >= kills and figures["joins"] >= kills // 2 and figures["tokens"] > 20 * kills
    assert figures["wrong"] == [] and not any(figures["ended"])


def test_a_few_kills_and_a_rank_that_was_never_there(few_optimizations, tmp_path):
    """Experts come from another process's memory, and then from the checkpoint."""
    transfer.require()
    plot = tmp_path / "tokens.png" if importlib.util.find_spec("matplotlib") else None
    before = dict(os.environ)
    figures = serve_chaos.run(3, 2, seed=5, transfer=True, later=1, plot=plot)
    assert dict(os.environ) == before, "programs of later tests would be kept where the ranks kept theirs"
    check(figures, 2)
    assert figures["fetched"] > 0
    assert plot is None or plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_sixty_kills_in_one_run(few_optimizations):
    check(serve_chaos.run(4, 60, seed=7), 60)
