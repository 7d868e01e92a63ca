"""The version and the supported jax stand in one place each; everything else reads them there."""

import re
import subprocess
import sys
import tomllib
import warnings

import jax
import pytest

import xen_moe_jax as xm
from tests.support import HANG_S, ROOT
from xen_moe_jax import _tested_jax, cli, doctor

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OLDEST, NEWEST = doctor.tested_jax()


def test_the_running_jax_is_one_that_is_supported():
    numbers = [_tested_jax.numbers(version) for version in (OLDEST, jax.__version__, NEWEST)]
    assert numbers == sorted(numbers)


def test_a_newer_jax_is_not_refused():
    assert PROJECT["project"]["dependencies"][0] == f"jax>={OLDEST}"


@pytest.mark.parametrize(
    ("version", "said"),
    [(OLDEST, False), (NEWEST, False), ("0.12.0.dev20261101", False), ("0.12.1.dev20261101", True), ("99.0.0", True)],
)
def test_the_first_lowering_warns_of_a_newer_jax_once(monkeypatch, mesh4, version, said):
    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax, "__version_info__", tuple(int(part) for part in version.split(".") if part.isdigit()))
    _tested_jax.warn_of_newer.cache_clear()

    def lower(features):
        function = jax.shard_map(
            lambda x: xm.all_to_all(x, "ep", 0, 0), mesh=mesh4, in_specs=jax.P("ep"), out_specs=jax.P("ep")
        )
        sharding = jax.NamedSharding(mesh4, jax.P("ep"))
        jax.jit(function).lower(jax.ShapeDtypeStruct((16, features), "float32", sharding=sharding))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        lower(1)
        lower(2)
    _tested_jax.warn_of_newer.cache_clear()
    texts = [str(warning.message) for warning in found if "test suite" in str(warning.message)]
    assert len(texts) == said
    assert all(f"jax {version} " in text and f"pip install 'jax<={NEWEST}'" in text for text in texts)


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
def test_make_reads_the_same_lines():
    done = subprocess.run(
        ["make", "--no-print-directory", "versions"], cwd=ROOT, capture_output=True, text=True, timeout=HANG_S
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
