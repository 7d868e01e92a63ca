"""The conformance class against the CUDA kernels, one process driving all GPUs."""

import pytest

import xen_moe_jax as xm
from tests.support import conformance


class GpuConformance(conformance.Conformance):
    """By itself a small batch takes the low-latency kernels, where they take it."""

    config = xm.KernelConfig(backend="cuda", timeout_s=20.0)


@pytest.mark.gpu1
class TestOneRank(GpuConformance):
    """Runs the class with one rank: everything but the way to other ranks (arguments, layouts, dtypes, gradients)."""

    num_ranks = 1
    two_axis_sizes = None


@pytest.mark.gpu2
class TestTwoRanks(GpuConformance):
    num_ranks = 2
    two_axis_sizes = None


@pytest.mark.gpu4
class TestFourRanks(GpuConformance):
    num_ranks = 4
    two_axis_sizes = (2, 2)


@pytest.mark.gpu1
class TestOneRankThroughput(GpuConformance):
    config = xm.KernelConfig(backend="cuda", mode="throughput", timeout_s=20.0)
    num_ranks = 1
    two_axis_sizes = None


@pytest.mark.gpu2
class TestTwoRanksThroughput(GpuConformance):
    config = xm.KernelConfig(backend="cuda", mode="throughput", timeout_s=20.0)
    num_ranks = 2
    two_axis_sizes = None


@pytest.mark.gpu4
class TestFourRanksThroughput(GpuConformance):
    config = xm.KernelConfig(backend="cuda", mode="throughput", timeout_s=20.0)
    num_ranks = 4
    two_axis_sizes = (2, 2)


@pytest.mark.gpu4
class TestThreeRanksOddSizes(GpuConformance):
    """Three of four GPUs, a prime number of tokens, small chunks: nothing lines up."""

    config = xm.KernelConfig(backend="cuda", chunk_tokens=3, num_sms=5, timeout_s=20.0)
    num_ranks = 3
    two_axis_sizes = None
    num_tokens = 7
    hidden = 128
    odd_hidden = 72


@pytest.mark.gpu4
class TestFourRanksLowLatency(GpuConformance):
    config = xm.KernelConfig(backend="cuda", mode="low_latency", timeout_s=20.0)
    num_ranks = 4
    two_axis_sizes = (2, 2)


@pytest.mark.gpu8
class TestEightRanks(GpuConformance):
    num_ranks = 8
    two_axis_sizes = (2, 4)
