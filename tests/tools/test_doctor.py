"""The doctor and the command line: they report the parts that are there, and survive the absence of any part."""

import json
import os
import subprocess
import sys

import jax
import pytest

from tests.support import HANG_S
from xen_moe_jax import backends, cli, doctor


def by_name(findings):
    return {finding.name: finding for finding in findings}


def test_report_names_versions_devices_and_a_backend_for_every_platform():
    report = doctor.examine()
    assert by_name(report["Versions"])["jax"].detail == jax.__version__
    assert f"{jax.device_count()} x cpu" in by_name(report["Devices that JAX uses"])["platform cpu"].detail
    platforms = by_name(report["Backend by platform"])
    assert set(platforms) == {"on cpu", "on tpu", "on cuda"}
    assert platforms["on cpu"] == doctor.Finding("on cpu", True, "reference")
    text = doctor.render(report)
    assert all(section in text for section in report)


def test_an_unavailable_backend_is_explained_and_is_no_fault(monkeypatch):
    def load(name):
        if name == "cuda":
            raise backends.BackendUnavailable("this build has no CUDA module")

    monkeypatch.setattr(backends, "load", load)
    finding = by_name(doctor.backends())["on cuda"]
    assert finding.ok is None
    assert "this build has no CUDA module" in finding.detail and "reference" in finding.detail
    assert finding.remedy


def test_a_broken_backend_is_a_fault_and_does_not_hide_the_rest(monkeypatch, capsys):
    def load(name):
        if name == "pallas":
            raise ImportError("undefined symbol")

    monkeypatch.setattr(backends, "load", load)
    assert doctor.main([]) == 1
    out = capsys.readouterr().out
    assert "!! on tpu" in out and "undefined symbol" in out and "faults: on tpu" in out
    assert "on cuda" in out


@pytest.mark.parametrize("present", [True, False])
@pytest.mark.parametrize("installed", [True, False])
def test_a_platform_that_jax_cannot_start_is_not_called_ok(monkeypatch, installed, present):
    monkeypatch.setattr(backends, "load", lambda name: None)
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: ["/dev/something"] * present)
    monkeypatch.setattr(doctor, "installed_version", lambda package: "1" if installed else None)
    found = by_name(doctor.backends())
    assert found["on cpu"].ok
    for platform, package in (("tpu", "libtpu"), ("cuda", "jax-cuda13-plugin")):
        finding = found[f"on {platform}"]
        assert finding.ok == (True if installed and present else None)
        assert present or not installed or "not run" in finding.detail
        assert installed or (package in finding.detail and "pip install" in finding.remedy)


def test_a_newer_jax_than_tested_is_said(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 0))
    monkeypatch.setattr(jax, "__version__", "99.0.0")
    finding = by_name(doctor.versions())["jax version"]
    newest = doctor.tested_jax()[1]
    assert finding.ok is None and "99.0.0" in finding.detail and f"newer than {newest}" in finding.detail
    assert finding.remedy == f"pip install 'jax<={newest}' if something fails"


def test_a_tested_jax_is_in_order(monkeypatch):
    for version in doctor.tested_jax():
        monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
        monkeypatch.setattr(jax, "__version__", version)
        finding = by_name(doctor.versions())["jax version"]
        assert finding.ok and finding.remedy == "" and finding.detail.startswith(f"{version}, tested from ")


def test_devices_that_do_not_start_are_a_fault_in_jax_own_words(monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no driver")

    monkeypatch.setattr(jax, "devices", devices)
    (finding,) = doctor.devices()
    assert finding.ok is False and "no driver" in finding.detail and finding.remedy


def test_an_old_jax_is_a_fault(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (0, 4, 30))
    monkeypatch.setattr(jax, "__version__", "0.4.30")
    finding = by_name(doctor.versions())["jax version"]
    oldest = doctor.tested_jax()[0]
    assert finding.ok is False and "0.4.30" in finding.detail and finding.remedy == f"pip install 'jax>={oldest}'"


def test_gpus_without_a_cuda_jax_are_noticed(monkeypatch):
    monkeypatch.setattr(doctor.glob, "glob", lambda pattern: ["/dev/nvidia0", "/dev/nvidia1"] * ("nvidia" in pattern))
    monkeypatch.setattr(doctor, "installed_version", lambda package: None)
    gpus = by_name(doctor.accelerators())["NVIDIA GPUs"]
    assert gpus.ok and "2 device files" in gpus.detail and "[cuda13]" in gpus.remedy


@pytest.mark.parametrize("problem", ["doctor", "memory"])
def test_a_platform_that_jax_cannot_start_is_no_traceback(problem):
    """A slip of the pen in JAX_PLATFORMS is when one runs the doctor."""
    if problem == "memory":
        pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
    environment = os.environ | {"JAX_PLATFORMS": "cudaa"}
    done = subprocess.run(
        [sys.executable, "-m", "xen_moe_jax", problem], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert "Traceback" not in done.stderr
    if problem == "doctor":
        assert done.returncode == 1 and "JAX_PLATFORMS=cudaa is set" in done.stdout
        assert "Compiled modules" in done.stdout and "faults: jax.devices()" in done.stdout
    else:
        assert done.returncode == 2 and "set JAX_PLATFORMS=cpu" in done.stderr


def test_json_is_the_same_report(capsys):
    status = doctor.main(["--json"])
    report = json.loads(capsys.readouterr().out)
    assert status == int(any(finding["ok"] is False for found in report.values() for finding in found))
    assert set(report) == set(doctor.examine())


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "xen_moe_jax", "doctor"], capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode in (0, 1), done.stderr
    assert "Backend by platform" in done.stdout and "Traceback" not in done.stderr


@pytest.mark.parametrize("arguments", [[], ["examine"]], ids=["none", "unknown"])
def test_a_wrong_command_is_refused_with_the_right_ones(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert "COMMAND" in message and all(command in message for command in cli.COMMANDS)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    assert "usage" in capsys.readouterr().out
