"""The stress run, one process driving all GPUs. 20,000 calls by default; see `stress.py`."""

import pytest

import xen_moe_jax as xm
from tests.gpu import stress

CALLS = 20_000


def check(mesh) -> None:
    config = xm.KernelConfig(backend="cuda", timeout_s=20.0)
    result = stress.run(mesh, config, calls=CALLS, seconds=120.0, compile_threads=8)
    assert result.calls == CALLS, f"only {result.calls} calls in {result.seconds:.0f} s"
    assert not result.mismatches, f"{len(result.mismatches)} wrong, the first: {result.mismatches[:5]}"


@pytest.mark.slow
@pytest.mark.gpu4
def test_stress(gpu_mesh):
    check(gpu_mesh((4,), ("ep",)))


@pytest.mark.slow
@pytest.mark.gpu8
def test_stress_eight(gpu_mesh):
    check(gpu_mesh((8,), ("ep",)))
