"""Bazel's targets: every mode of the benchmarks is one, and documents name targets that are there."""

import re
import shlex

import pytest

from benchmarks import presets
from benchmarks.__main__ import MODES
from benchmarks.lib import options
from tests.support import ROOT

BUILD = ROOT / "benchmarks" / "BUILD.bazel"
COMMAND_MODES = [mode for mode, (module, _) in MODES.items() if module == "benchmarks.command"]


def declared() -> dict[str, set[str]]:
    """Returns the tags that benchmarks/BUILD.bazel gives to each mode's test."""
    if not BUILD.exists():
        pytest.skip("benchmarks/BUILD.bazel is not beside the tests")
    found: dict[str, set[str]] = {}
    for call in re.findall(r"benchmark_test\((.*?)\n\s*\)(.*?)(?=\n\n|\Z)", BUILD.read_text(), re.DOTALL):
        tags = re.search(r"tags = \[(.*?)\]", call[0], re.DOTALL)
        modes = re.findall(r'mode = "([a-z0-9-]+)"', call[0]) or re.findall(r'"([a-z0-9-]+)"', call[1])
        assert modes, call
        for mode in modes:
            assert mode not in found, f"{mode} is declared twice"
            found[mode] = set(re.findall(r'"(\w+)"', tags[1])) if tags else set()
    return found


def test_every_mode_has_a_target_and_a_preset():
    tags = declared()
    assert set(tags) == set(MODES) == set(presets.PRESETS)
    for mode, preset in presets.PRESETS.items():
        assert ("gpu" in tags[mode]) == (preset.gpu is not None), mode


@pytest.mark.parametrize("mode", COMMAND_MODES)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_mode_takes_the_arguments_of_its_preset(mode, platform, tmp_path):
    words = getattr(presets.PRESETS[mode], platform)
    if words is None:
        return
    parsed = options.parse([mode, *shlex.split(words), "--json", str(tmp_path / "out.json")])
    options.check(parsed)


def test_documents_name_targets_that_are_there():
    labels = set()
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]:
        labels |= set(re.findall(r"//(tests|benchmarks):([\w/-]+)", path.read_text()))
    if not labels:
        pytest.skip("the documents are not beside the tests")
    targets = {f"bench_{mode.replace('-', '_')}" for mode in declared()} | {"benchmark", "benchmarks", "bench_MODE"}
    for package, name in labels:
        assert name in targets if package == "benchmarks" else (ROOT / "tests" / f"{name}.py").exists(), name
