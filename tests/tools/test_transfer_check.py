"""tools/transfer_gpu_check.py beside other programs."""

import fcntl
import os
import pathlib
import subprocess
import sys
import time

import pytest

from tests.support import HANG_S, ROOT, transfer
from tools.children import bound


@pytest.mark.skipif(bool(transfer.missing()), reason=str(transfer.missing()))
def test_a_check_waits_for_a_program_that_holds_the_lock(tmp_path):
    command = [sys.executable, "tools/transfer_gpu_check.py", "--cpu", "--only", "read", "--out", str(tmp_path)]
    with open(tmp_path / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = subprocess.Popen(
            bound([*command, "--lock", lock.name]), cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
        )
        inode = os.fstat(lock.fileno()).st_ino
        waits, limit = list[str](), time.monotonic() + HANG_S
        while not waits:
            assert process.poll() is None, process.stdout.read()
            assert time.monotonic() < limit, "the check never waited for the lock"
            time.sleep(0.1)
            held = pathlib.Path("/proc/locks").read_text().splitlines()
            waits = [line for line in held if "->" in line and f":{inode} " in line]
        assert not (tmp_path / "transfer_gpu_check.json").exists()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert process.communicate(timeout=HANG_S)[0].startswith("ok      read"), process.returncode
        assert process.returncode == 0
