"""Between two processes of one machine: stores into mapped memory, the kernel's copies, UCX, the endurance program."""

import os
import subprocess
import sys

from tests.support import HANG_S, ROOT, transfer
from tests.transfer import test_kills

transfer.require()


def run(command):
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=HANG_S, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_stores_into_mapped_memory_and_the_kernels_copies():
    run([str(ROOT / "tests" / "transfer" / "host_copies.py")])


def test_kills_and_the_adversary():
    run(["-m", "tests.transfer.endurance", "--transfers", "640", "--kills", "3"])


def test_kills_of_senders_that_use_ucx_alone(engine, others):
    test_kills.kill_senders(engine, others, range(4), 7, backend="ucx")
