import jax
import pytest

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
