"""A wheel, installed where there is nothing else: it works with its own requirements and the newest tested jax.

`XEN_MOE_WHEEL` names the wheel, `XEN_MOE_WHEEL_CUDA=1` says that it must have the CUDA modules. Building one takes
minutes and downloads a compiler: CI does it once and runs this file afterwards.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support import ROOT
from xen_moe_jax._tested_jax import NEWEST_JAX

BESIDE_OTHERS = 2400
"""Seconds for what compiles for minutes: CI runs this file with a low priority, beside steps that keep cores busy."""
PROGRAM = ROOT / "tests" / "support" / "installed_package.py"
WHEEL = os.environ.get("XEN_MOE_WHEEL", "")


def run(*command: str, folder: pathlib.Path, timeout: float = 900) -> str:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "XLA_FLAGS")}
    done = subprocess.run(command, cwd=folder, env=clean, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


NO_WHEEL = "XEN_MOE_WHEEL names no wheel; CI's packaging step builds one and does"
CUDA = bool(os.environ.get("XEN_MOE_WHEEL_CUDA"))
ASYNC_FOR_CUDA = (
    "test_start_and_done_are_two_calls_on_a_gpu",
    "test_everything_under_way_is_aliased_through_and_operands_stay_alive",
    "test_work_stands_between_start_and_done",
)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment that holds the wheel and its requirements."""
    if not WHEEL:
        pytest.skip(NO_WHEEL)
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "venv", "venv", folder=folder)
    interpreter = str(folder / "venv" / "bin" / "python")
    pip_install(interpreter, str(pathlib.Path(WHEEL).resolve()), f"jax<={NEWEST_JAX}", folder=folder)
    return interpreter


def pip_install(python: str, *what: str, folder: pathlib.Path) -> None:
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *what, folder=folder)


def run_tests(python: str, *tests: str, folder: pathlib.Path, path: str = "") -> None:
    """Tests of the CUDA backend over the installed wheel, without a GPU and with nothing skipped."""
    pip_install(python, "pytest", "hypothesis", "psutil", "flatbuffers", folder=folder)
    for part in ("tests", "tools"):  # the tests' support bounds its processes by tools/children.py
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "pyproject.toml", folder)  # its pythonpath is this folder, where no checkout is
    variables = ["XEN_MOE_EXPECT_CUDA=1", "JAX_PLATFORMS=cpu", f"PYTHONPATH={path}"]
    pytest_of = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=15"]
    output = run("env", *variables, *pytest_of, *tests, folder=folder, timeout=BESIDE_OTHERS)
    print(output)
    assert "passed" in output and "skipped" not in output, output


def test_a_wheel_works_with_nothing_but_its_requirements(python, tmp_path):
    assert "the wheel is whole" in run(python, str(PROGRAM), *(["--cuda"] if CUDA else []), folder=tmp_path)
    installed = run(python, "-m", "pip", "list", "--format=freeze", folder=tmp_path)
    assert f"jax=={NEWEST_JAX}" in installed.splitlines(), "the requirements refuse the newest tested jax"
    assert "nvidia" not in installed, "a plain install needs nothing of CUDA"
    listing = "from xen_moe_jax import _profiles; print(*[path.name for path in _profiles.shipped()])"
    shipped = sorted(path.name for path in (ROOT / "xen_moe_jax" / "profiles").glob("*.json"))
    assert run(python, "-c", listing, folder=tmp_path).split() == shipped, "the tuning profiles are in the wheel"


@pytest.mark.skipif(not CUDA, reason="the wheel need not have the CUDA modules")
def test_the_python_half_of_the_cuda_backend_over_the_built_module(python, tmp_path):
    """Lowering, limits and plans."""
    lowered = [f"tests/core/test_async.py::{name}" for name in ASYNC_FOR_CUDA]
    run_tests(python, "tests/backends/cuda/test_policy.py", *lowered, folder=tmp_path)


@pytest.mark.skipif(not CUDA, reason="the wheel need not have the CUDA modules")
def test_programs_compiled_for_gpus(python, tmp_path):
    """XLA's GPU compiler needs no GPU. Its packages stay beside the environment, which has nothing of CUDA."""
    version = run(python, "-c", "import jax; print(jax.__version__)", folder=tmp_path).strip()
    packages = [f"jax-cuda13-pjrt=={version}", f"jax-cuda13-plugin=={version}", "nvidia-cuda-nvcc<14", "nvidia-nvvm<14"]
    compiler = tmp_path / "compiler"
    pip_install(python, "flax", folder=tmp_path)
    pip_install(python, "--no-deps", "--target", str(compiler), *packages, folder=tmp_path)
    run_tests(
        python,
        "tests/backends/cuda/test_aot.py",
        "tests/core/test_moe_mlp_aot.py",
        "tests/core/test_float8_aot.py",
        "tests/flax/test_hopper_aot.py",
        "tests/flax/test_state_aot.py",
        folder=tmp_path,
        path=str(compiler),
    )


def test_the_program_refuses_a_checkout(tmp_path):
    """It fails where the library is not the installed one: the assertion above can fail."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM)], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode != 0 and "not the installed wheel" in done.stderr, done.stderr[-2000:]
