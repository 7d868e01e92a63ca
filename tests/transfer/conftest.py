import shutil
import subprocess

import jax
import pytest

from tests.support import ROOT
from tests.transfer import other_process


@pytest.fixture
def engine():
    pytest.importorskip("libucx", reason="xen_moe_jax.transfer needs UCX: pip install 'xen-moe-jax[transfer]'")
    if jax.default_backend() != "cpu":
        pytest.skip("these processes move host memory; a GPU run has tools of its own")
    import xen_moe_jax.transfer as xt

    with xt.Engine(name="here") as opened:
        yield opened


@pytest.fixture
def others(engine):
    """Starts other processes that are connected to `engine`; ends them."""
    started = other_process.Others(engine)
    yield started
    started.end()


@pytest.fixture
def other(others):
    return others()


@pytest.fixture(scope="session")
def posting_library(tmp_path_factory):
    """The posting loop in C++, built from this checkout."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    path = tmp_path_factory.mktemp("posting") / "libucx_posting.so"
    names = ("ucx_posting", "cuda_copies", "host_copies")
    sources = [ROOT / "ffi" / f"{name}.cc" for name in names]
    flags = ["-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run([compiler, *flags, *sources, "-o", path], check=True)
    return path
