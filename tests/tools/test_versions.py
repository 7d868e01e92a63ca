"""The version and the supported jax stand in one place each; everything else reads them there."""

import re
import subprocess
import sys
import tomllib

import jax
import pytest

import xen_moe_jax as xm
from tests.support import ROOT
from xen_moe_jax import cli, doctor

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST, NEWEST = doctor.tested_jax()


def test_the_running_jax_is_one_that_is_supported():
    numbers = [tuple(map(int, version.split("."))) for version in (OLDEST, jax.__version__, NEWEST)]
    assert numbers == sorted(numbers)


def test_the_version_is_written_once(capsys):
    assert "version" not in PROJECT["project"] and "version" in PROJECT["project"]["dynamic"]
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.split()[-1] == xm.__version__


def test_headers_are_of_the_oldest_jaxlib():
    """A jaxlib rejects FFI handlers that were built against newer headers than its own."""
    requirements = [o["build"]["requires"] for o in PROJECT["tool"]["scikit-build"]["overrides"] if "build" in o]
    assert requirements and all(f"jaxlib=={OLDEST}" in required for required in requirements)


def test_extras_bring_no_other_jax():
    for extra in PROJECT["project"]["optional-dependencies"].values():
        assert not [r for r in extra if re.match(r"jax(lib)?\b(\[\w+\])?[<>=~]", r)]


@pytest.mark.skipif(not (ROOT / "Makefile").exists(), reason="the Makefile is not beside the tests")
def test_make_reads_the_same_line():
    done = subprocess.run(
        ["make", "--no-print-directory", "versions"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split() == [OLDEST, NEWEST], done.stderr


def remedies() -> list[str]:
    """Every line of the package and the documentation that tells to install an extra or to run a command of ours."""
    files = [*(ROOT / "xen_moe_jax").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    return [line for file in files if file.exists() for line in file.read_text().splitlines()]


def test_remedies_name_what_exists():
    extras = set(PROJECT["project"]["optional-dependencies"])
    commands = set(cli.COMMANDS)
    named = {e for line in remedies() for found in re.findall(r"(?:xen-moe-jax|'\.)\[([\w,]+)\]", line)
             for e in found.split(",")}  # fmt: skip
    ran = {c for line in remedies() for c in re.findall(r"xen-moe-jax ([a-z][\w-]+)(?=[` ]|$)", line)}
    assert {"tpu", "cuda13"} <= named <= extras, named - extras
    assert {"doctor", "benchmark"} <= ran and not {c for c in ran if c not in commands | WORDS}, ran - commands - WORDS


WORDS = {"is", "on", "and", "has", "with", "in", "command"}
"""Words that may follow the package's name in a sentence."""


def test_a_fresh_install_needs_no_newer_python():
    assert sys.version_info >= doctor.OLDEST_PYTHON
    assert PROJECT["project"]["requires-python"] == ">=" + ".".join(map(str, doctor.OLDEST_PYTHON))
