import jax
import pytest

from tests.support import transfer
from tests.transfer import other_process


@pytest.fixture
def engine():
    transfer.require()
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
