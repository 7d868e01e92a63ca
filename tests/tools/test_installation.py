"""An installation where there is no GPU: it is quick, names the parts that it leaves out, and its programs do not
mention TPUs."""

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tomllib

import pytest

from tests.support import HANG_S, ROOT

HAS_DRIVER = any(pathlib.Path(p).exists() for p in ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg"))
CMAKE = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
NINJA = shutil.which("ninja", path=f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def configure(folder: pathlib.Path, *options: str) -> subprocess.CompletedProcess:
    """CMake's configuration, at most a minute: nothing is compiled yet."""
    if not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("CMakeLists.txt is not beside the tests")
    if CMAKE is None or NINJA is None:
        pytest.skip("needs cmake and ninja: xen-moe-jax[dev]")
    if importlib.util.find_spec("nanobind") is None:
        pytest.skip("needs nanobind: xen-moe-jax[dev]")
    tools = [f"-DCMAKE_MAKE_PROGRAM={NINJA}", f"-DPython_EXECUTABLE={sys.executable}"]
    command = [CMAKE, "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *tools, *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)


@pytest.mark.skipif(HAS_DRIVER, reason="this machine has an NVIDIA driver: AUTO builds here")
@pytest.mark.parametrize("option", [(), ("-DXEN_MOE_CUDA=AUTO",), ("-DXEN_MOE_CUDA=auto",)], ids=str)
def test_without_a_driver_auto_compiles_nothing_of_cuda_and_says_so(tmp_path, option):
    done = configure(tmp_path, *option)
    assert done.returncode == 0, done.stderr
    assert "left out, the CUDA modules: this machine has no NVIDIA driver" in done.stdout
    assert "XEN_MOE_CUDA=ON pip install . builds them on any machine" in done.stdout
    build = (tmp_path / "build.ninja").read_text()
    assert ".cu" not in build.replace("cuda_copies.cc", "") and "_cuda" not in build.replace("cuda_copies", "")


def test_an_unknown_value_is_named(tmp_path):
    done = configure(tmp_path, "-DXEN_MOE_CUDA=MAYBE")
    assert done.returncode != 0 and "XEN_MOE_CUDA=MAYBE: must be AUTO, ON or OFF" in done.stderr


def test_only_who_asks_for_cuda_downloads_its_compiler():
    """The build requirements of a plain `pip install .`, and with XEN_MOE_CUDA=AUTO, hold nothing of CUDA."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("pyproject.toml is not beside the tests")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert not [r for r in project["build-system"]["requires"] if "cuda" in r or "nvidia" in r]
    asking = [o for o in project["tool"]["scikit-build"]["overrides"] if "cuda" in str(o.get("build", ""))]
    assert asking and all("on|" in override["if"]["env"]["XEN_MOE_CUDA"] for override in asking)


def test_a_program_of_this_environment_says_nothing_of_tpus():
    """`make setup` puts libtpu where the tests find it and a user's program does not look."""
    if not (pathlib.Path(sys.prefix) / "libtpu").is_dir():
        pytest.skip("libtpu is not beside the packages: the environment is not of make setup")
    if (pathlib.Path(sysconfig.get_path("purelib")) / "libtpu").is_dir():
        pytest.skip("xen-moe-jax[tpu] is installed in this environment, too: JAX looks for a TPU in every program")
    assert importlib.util.find_spec("libtpu") is not None, "the tests find it"
    program = "import importlib.util, jax; print(jax.devices()[0].platform, importlib.util.find_spec('libtpu'))"
    ours = ("JAX_PLATFORMS", "XLA_FLAGS", "PYTHONPATH", "TPU_", "LIBTPU_")  # libtpu sets some where it was imported
    without = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    done = subprocess.run([sys.executable, "-c", program], env=without, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == "None" and "tpu" not in done.stderr.lower(), done.stderr
