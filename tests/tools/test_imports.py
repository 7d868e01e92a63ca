"""Imports fall: the layers of pyproject.toml hold, and an import that breaks them is noticed."""

import ast
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from tests.support import HANG_S, ROOT

# An editable installation puts a finder first that leads to the checkout, regardless of the path: it is taken out.
LINTER = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable")]
sys.argv[:] = ["lint-imports", "--no-cache"]
from importlinter.cli import lint_imports_command
lint_imports_command()
"""

pytest.importorskip("importlinter", reason="needs import-linter (the dev extra)")


def lint(folder: pathlib.Path) -> subprocess.CompletedProcess:
    """The layers, read from the sources in `folder`."""
    return subprocess.run(
        [sys.executable, "-c", LINTER],
        cwd=folder,
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def copy_of_the_package(folder: pathlib.Path) -> pathlib.Path:
    """`xen_moe_jax` with the TPU kernels as a real folder, the benchmarks, and the layers."""
    for name in ("xen_moe_jax", "benchmarks"):
        if not (ROOT / name).exists():
            pytest.skip(f"{name} is not beside the tests")
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.so", "results"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder / "xen_moe_jax"


def plant(file: pathlib.Path, line: str) -> None:
    file.write_text(file.read_text() + f"\n{line}\n")


def test_imports_fall(tmp_path):
    copy_of_the_package(tmp_path)
    done = lint(tmp_path)
    assert done.returncode == 0 and "0 broken" in done.stdout, done.stdout + done.stderr


PLANTED = [  # file, what is put into it, and the contract that this breaks
    ("_spec.py", "from xen_moe_jax import _prepare", "imports fall"),
    ("_moe_primitives.py", "import xen_moe_jax.flax", "imports fall"),
    ("pallas_kernels/place.py", "from xen_moe_jax.backends import rounds", "imports fall"),
    ("pallas_kernels/record.py", "from xen_moe_jax._quantize import QMAX", "imports fall"),
    ("tuning/problem.py", "from xen_moe_jax import autotune", "imports fall"),
    ("backends/reference/combine.py", "from xen_moe_jax.backends.pallas import plan", "a backend knows"),
    ("tuning/workload.py", "from xen_moe_jax.tuning import timing", "no circles"),
    ("stray.py", "import xen_moe_jax", "imports fall"),
    ("doctor.py", "from benchmarks.lib import report", "the library knows nothing"),
    ("../benchmarks/lib/report.py", "from benchmarks.ops import operations", "in benchmarks, imports fall"),
    ("../benchmarks/ops/overlap.py", "from xen_moe_jax.transfer import _wire", "transfer is a closed room"),
]
SAID = {"tuning/workload.py": "No cycles are allowed in xen_moe_jax.tuning.", "stray.py": "- xen_moe_jax.stray"}
"""The linter's words for a circle and for a module without a layer; for the other breaks it names the import."""


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """The linter's report on a copy of the package that holds all of `PLANTED`: a section for each broken contract, as
    a single line."""
    package = copy_of_the_package(tmp_path_factory.mktemp("planted"))
    (package / "stray.py").touch()
    for file, line, *_ in PLANTED:
        plant(package / file, line)
    done = lint(package.parent)
    assert done.returncode == 1, done.stdout + done.stderr
    said = done.stdout.partition("Broken contracts")[2]
    return [" ".join(section.split()) for section in re.split(r"\n(?=[^\n]+\n-{3,}\n)", said)]


@pytest.mark.parametrize(("file", "line", "contract"), PLANTED)
def test_an_upward_import_is_noticed(broken, file, line, contract):
    importer = f"xen_moe_jax/{file}".removeprefix("xen_moe_jax/../").removesuffix(".py").replace("/", ".")
    (section,) = (section for section in broken if section.startswith(contract))
    assert SAID.get(file, f"{importer} -> {line.split()[1]}") in section, section


SHARES_ITS_OWN = "transfer"
"""The parts of its engine share state under one lock: private to the package, not to the module."""


def private_names_taken(package: pathlib.Path) -> list[str]:
    """`from xen_moe_jax.module import _name` and `module._name`, where another module of the package is meant."""
    found = []
    for file in sorted(package.rglob("*.py")):
        if file.parent.name == SHARES_ITS_OWN:
            continue
        tree = ast.parse(file.read_text())
        modules = set()
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("xen_moe_jax"):
                continue
            folder = package.joinpath(*node.module.split(".")[1:])
            for alias in node.names:
                if (folder / f"{alias.name}.py").exists() or (folder / alias.name).is_dir():
                    modules.add(alias.asname or alias.name)
                elif alias.name.startswith("_") and not alias.name.startswith("__"):
                    found.append(f"{file.relative_to(package)}:{node.lineno} {node.module}.{alias.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                if node.attr.startswith("_") and not node.attr.startswith("__"):
                    found.append(f"{file.relative_to(package)}:{node.lineno} {node.value.id}.{node.attr}")
    return found


def test_no_module_takes_a_private_name_of_another(tmp_path):
    assert private_names_taken(ROOT / "xen_moe_jax") == []
    package = copy_of_the_package(tmp_path)
    plant(package / "backends/reference/combine.py", "from xen_moe_jax.backends.rounds import _rounds")
    plant(package / "backends/pallas/plan.py", "from xen_moe_jax import _spec\n_spec._hidden()")
    assert len(private_names_taken(package)) == 2


def test_only_one_file_imports_what_jax_keeps_to_itself():
    users = {
        file.relative_to(ROOT / "xen_moe_jax").as_posix()
        for file in (ROOT / "xen_moe_jax").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jax._src"))
        or (isinstance(node, ast.Import) and any(a.name.startswith("jax._src") for a in node.names))
    }
    assert users == {"_jax_internals.py"}


@pytest.mark.parametrize("name", ["autotune", "cuda", "routing", "transfer"])
def test_parts_are_there_after_one_import(name):
    """In a process that has imported nothing else, which would have made them attributes."""
    code = f"import xen_moe_jax as xm; print(xm.{name}.__name__)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert result.stdout.strip() == f"xen_moe_jax.{name}", result.stderr


@pytest.mark.parametrize(
    ("code", "missing"),
    [
        ("from xen_moe_jax.flax.nnx import MoE", "flax"),
        ("from xen_moe_jax.flax.nnx import MoE", "optax"),  # which Flax itself needs
        ("from xen_moe_jax.flax import linen", "flax"),
    ],
)
def test_a_layer_without_flax_names_the_extra(code, missing):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    code = f"import sys; sys.modules[{missing!r}] = None\n{code}"
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert f"need {missing}, which is not installed: pip install 'xen-moe-jax[flax]'" in result.stderr, result.stderr


def test_an_unknown_part_is_an_attribute_error():
    code = "import xen_moe_jax as xm; xm.dispach"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert "AttributeError: module 'xen_moe_jax' has no attribute 'dispach'" in result.stderr
