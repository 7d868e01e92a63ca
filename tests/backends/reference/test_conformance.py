"""The conformance class against the plain-JAX backend, which defines the meaning of every operation."""

import pytest

import xen_moe_jax as xm
from tests.support import conformance


class TestReference(conformance.Conformance):
    config = xm.KernelConfig(backend="reference")
    optimized = ("grouped-two-axes", "padded-two-axes-fp8")  # the other kinds are optimised in the classes below


@pytest.mark.optimized
class TestReferenceOddSizes(conformance.Conformance):
    """Three ranks, a prime number of tokens, three rows a round: nothing lines up. Every dtype and wire, since these
    programs are optimised: a multiply and an add that become one instruction would show.
    """

    config = xm.KernelConfig(backend="reference", chunk_tokens=3)
    num_ranks = 3
    two_axis_sizes = None
    num_tokens = 7
    hidden = 128
    odd_hidden = 72
    selected = (
        "grouped",
        "ranked",
        "padded",
        "grouped-f32",
        "padded-f32",
        "ranked-f16",
        "grouped-int8-f32",
        "grouped-uneven",
        "padded-uneven",
        "grouped-fewer-experts-than-ranks",
        "grouped-capacity-one-below",
        "ranked-capacity-one-below",
        "grouped-align8-capacity-one-below",
        "grouped-fp8",
        "padded-odd-hidden-fp8",
        "ranked-odd-hidden-scaled",
    )


@pytest.mark.optimized
class TestReferenceOneRank(conformance.Conformance):
    """Nothing travels: XLA drops the collectives, and must not drop the roundings with them."""

    config = xm.KernelConfig(backend="reference")
    num_ranks = 1
    two_axis_sizes = None
    num_tokens = 9
    hidden = 128
    selected = ("grouped", "ranked-f16", "padded", "grouped-fp8", "grouped-capacity-one-below")


@pytest.mark.thorough  # tests/core/test_nodes.py stays
class TestReferenceVirtualNodes(conformance.Conformance):
    """`KernelConfig.ranks_per_node` cuts one axis: sums in the order of two axes, and two axes as they are without."""

    config = xm.KernelConfig(backend="reference", ranks_per_node=2)
    num_ranks = 4
    two_axis_sizes = (2, 2)
    num_tokens = 9
    hidden = 128
    selected = ("grouped", "padded-odd-hidden-fp8", "ranked-f16", "ranked-two-axes", "padded-two-axes-fp8")
    no_exchange = "the drop-ins know no nodes: TestReference runs them"
