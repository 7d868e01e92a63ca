"""Between two processes of one machine: stores into mapped memory and the kernel's copies, with the loop in C++, which
the other tests may not have.
"""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT

pytest.importorskip("libucx", reason="xen_moe_jax.transfer needs UCX: pip install 'xen-moe-jax[transfer]'")


def run(command, posting_library):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XEN_MOE_TRANSFER_POSTING": str(posting_library)}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_stores_into_mapped_memory_and_the_kernels_copies(posting_library):
    run([str(ROOT / "tests" / "transfer" / "host_copies.py")], posting_library)


def test_kills_and_the_adversary(posting_library):
    run(["-m", "tests.transfer.endurance", "--transfers", "640", "--kills", "3"], posting_library)
