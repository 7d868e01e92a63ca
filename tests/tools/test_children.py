"""`tools.children`: a child ends with its parent, even if the parent is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.support import ROOT
from tools import children

PARENT = """
import signal, subprocess, sys, time
from tools.children import bound
signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs inherit that it is ignored
child = subprocess.Popen(bound(["sleep", "100"]), start_new_session=True)
time.sleep(0.3)  # until the child has become `sleep`
print(child.pid, flush=True)
time.sleep(100)
"""


def runs(pid: int) -> bool:
    """Returns whether the process exists and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_child_ends_with_its_parent(number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = int(parent.stdout.readline())
    assert runs(pid)
    parent.send_signal(number)
    parent.wait(20)
    until = time.monotonic() + 20
    while runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not runs(pid)


def test_the_command_keeps_its_words_output_and_status():
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(3)", "a b", 7]
    done = subprocess.run(children.bound(command), capture_output=True, text=True)
    assert done.returncode == 3 and done.stdout == "['a b', '7']\n"


def test_a_child_whose_parent_has_ended_does_not_begin():
    command = children.bound(["echo", "begun"])
    if str(os.getpid()) in command:
        command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(command, capture_output=True, text=True)
    assert not sys.platform.startswith("linux") or (done.returncode == 1 and done.stdout == "")
