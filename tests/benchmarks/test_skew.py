"""Rows of the busiest rank under skewed routing, over 8 virtual ranks: the table of docs/lab/layers.md."""

import json
import pathlib

import numpy as np
import pytest

from benchmarks.layers import skew

PAGE = pathlib.Path(__file__).parents[2] / "docs/lab/layers.md"


def test_the_trace_is_as_it_was_recorded():
    counts = np.asarray(json.loads(skew.TRACE.read_text())["counts"])
    assert counts.shape == (skew.STEPS, 1, skew.EXPERTS)
    assert (counts.sum(axis=2) == skew.WINDOWS[1] * 64 * skew.TOP_K).all()


@pytest.mark.parametrize("name", skew.traces())
def test_balance_under_skew(name):
    """Planned on one batch and measured on the next hundred, 12.5% redundancy; and balanced exactly, for each batch."""
    row = skew.measure(skew.traces()[name])
    assert row.home > 1.4, "nothing is skewed"
    assert row.planned <= 1.01
    # The demo's router still learns: over a hundred of its first steps a plan grows old, and ten it lasts.
    assert row.next_mean <= (1.20 if name.startswith("demo") else 1.10)
    assert row.replanned_mean <= 1.10
    assert row.exact_worst <= 1.0001
    assert f"| {name} |" in PAGE.read_text()


def test_the_page_has_the_table():
    assert skew.table() in PAGE.read_text()
