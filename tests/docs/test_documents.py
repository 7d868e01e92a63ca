"""The documents are true: their examples run, links lead somewhere, and every public name is described."""

import dataclasses
import importlib
import importlib.util
import inspect
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import xen_moe_jax as xm
from tests.support import ROOT, quick_compiler, transfer
from xen_moe_jax import cli

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
WITHOUT_FIGURES_OF_SPEED = ("README", "benchmarks", "gpu_checks", "nodes_nccl")
PERFORMANCE = ["user/performance.md"] + [
    f"lab/{path.name}" for path in sorted(ROOT.glob("docs/lab/*.md")) if path.stem not in WITHOUT_FIGURES_OF_SPEED
]
if not (ROOT / "docs" / "user" / "api.md").exists():
    pytest.skip("the documents are not beside the tests", allow_module_level=True)

CHECK = """
import numpy as np
x, logits, w = (np.asarray(a, np.float64) for a in inputs)
scores = np.exp(logits - logits.max(1, keepdims=True))
scores /= scores.sum(1, keepdims=True)
expected = np.zeros_like(x)
for token, best in enumerate(np.argsort(-scores, axis=1, kind="stable")[:, :2]):
    for expert in best:
        expected[token] += scores[token, expert] * (x[token] @ w[expert])
error = np.abs(np.asarray(moe(*inputs)) - expected).max()
assert error < 1e-4, error
assert all(np.isfinite(np.asarray(g)).all() and np.asarray(g).any() for g in gradients)
"""


def python_blocks(document: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


DURATIONS = {"in a few seconds": (0, 30), "in about half a minute": (8, 60), "in minutes": (45, 600)}
"""A page's statement about its blocks -> CPU seconds that they take here, at least and at most.

A laptop's time is close to these: two cores halve them, and XLA's whole compiler, which a test does without, makes up
for that. Beside other programs the same work takes up to twice the CPU seconds, for which the bounds have room.
"""


def stated_duration(document: pathlib.Path) -> tuple[int, int]:
    """Returns the bounds of the duration that a page states for its blocks."""
    text = " ".join(document.read_text().split())
    found = re.findall(r"\b[Bb]locks? of this page runs? (in [a-z ]+?)[.,;:(]", text)
    assert len(found) == 1, f"{document.name}: must say once that the blocks of this page run {', or '.join(DURATIONS)}"
    assert found[0] in DURATIONS, f"{document.name}: blocks run {found[0]!r}, which is none of {list(DURATIONS)}"
    return DURATIONS[found[0]]


def run_in_stated_time(document: pathlib.Path, program: str, tmp_path: pathlib.Path, environment) -> str:
    """Runs a page's program; an error where it takes another time than the page says."""
    least, most = stated_duration(document)
    before = os.times()
    printed = run(program, tmp_path, environment)
    after = os.times()
    took = after.children_user + after.children_system - before.children_user - before.children_system
    assert least <= took <= most, (
        f"{document.name}: its blocks took {took:.0f} CPU seconds, and it says {least} to {most}"
    )
    return printed


def run(program: str, tmp_path: pathlib.Path, environment: dict[str, str]) -> str:
    script = tmp_path / "example.py"
    script.write_text(program)
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1800,  # of a page that hangs: beside other programs the time on a clock says nothing
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def environment():
    """A user's: JAX finds its own devices, and the checkout can be imported."""
    return os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_compiler.flags(), "PYTHONPATH": str(ROOT)}


@pytest.mark.optimized
def test_readme_example_runs_and_equals_a_dense_layer(tmp_path, environment):
    document = ROOT / "README.md"
    assert "loss" in run_in_stated_time(document, python_blocks(document)[0] + CHECK, tmp_path, environment)


RUNNABLE = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS if path.parent != ROOT and python_blocks(path)]
NOT_EVERYWHERE = "docs/user/transfer.md"
WITH_LIBTPU = "docs/user/tpu.md"
no_transfer = pytest.mark.skipif(bool(transfer.missing()), reason=f"the transfer page: {transfer.missing()}")
no_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="the page compiles with libtpu")


def test_the_pages_with_examples_are_found():
    assert {"docs/user/concepts.md", "docs/user/failures.md", NOT_EVERYWHERE} <= set(RUNNABLE)


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(name, marks=[no_transfer] * (name == NOT_EVERYWHERE) + [no_libtpu] * (name == WITH_LIBTPU))
        for name in RUNNABLE
    ],
)
def test_blocks_of_a_document_run_in_order(document, tmp_path, environment):
    run_in_stated_time(ROOT / document, "\n".join(python_blocks(ROOT / document)), tmp_path, environment)


def test_the_page_on_migration_quotes_the_module_for_maxtext():
    """`make maxtext-test` runs the module, so that the page shows what was run."""
    text = (ROOT / "docs" / "user" / "migrating.md").read_text()
    blocks = re.findall(r"^```py\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    (quoted,) = [block for block in blocks if "xm.dispatch(" in block]
    assert quoted in (ROOT / "examples" / "maxtext_experts.py").read_text()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="the tutorial needs xen-moe-jax[plot]")
def test_the_tutorial_runs_and_holds_the_output_of_a_run(tmp_path, environment):
    """Every cell runs in a process of its own, as a reader runs them; the file shows the output of this run."""
    program = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tools")!r})
import pathlib, notebook
path = pathlib.Path({str(ROOT / "docs" / "user" / "tutorial.ipynb")!r})
for held, ran in zip(notebook.code_cells(notebook.read(path)), notebook.code_cells(notebook.run(path)), strict=True):
    kinds = [[output["output_type"] for output in cell["outputs"]] for cell in (held, ran)]
    assert kinds[0] == kinds[1] and held["execution_count"], (kinds, held["source"])
    print(len(ran["outputs"]))
"""
    document = ROOT / "docs" / "user" / "tutorial.ipynb"
    assert sum(map(int, run_in_stated_time(document, program, tmp_path, environment).split())) > 5


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_inside_the_repository_lead_somewhere(document):
    for target in re.findall(r"\]\(([^)#\s]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_result_file_is_the_source_of_a_table_a_chart_or_a_claim():
    """benchmarks/results has few files, and a page links to each of them."""
    results = sorted((ROOT / "benchmarks" / "results").glob("*"))
    if not results:
        pytest.skip("benchmarks/results is not beside the tests")
    assert len(results) <= 24
    text = "".join(path.read_text() for path in DOCUMENTS)
    unnamed = [path.name for path in results if f"benchmarks/results/{path.name})" not in text]
    assert not unnamed, f"no page links to {unnamed}"


@pytest.mark.parametrize("name", PERFORMANCE)
def test_a_page_on_performance_begins_with_a_chart(name):
    first = (ROOT / "docs" / name).read_text().split("\n\n")[1]
    assert re.fullmatch(r"!\[[^]]+\]\(\.\./images/\S+\.(png|svg)\)", first), first


def test_the_pages_for_users_are_few_and_short():
    """Docs/user is one book: a fact that needs room there displaces another one, or belongs in docs/design."""
    pages = sorted(ROOT.glob("docs/user/*.md"))
    words = sum(len(page.read_text().split()) for page in pages)
    assert len(pages) <= 11 and words <= 22_000, f"{len(pages)} pages, {words} words"


def test_every_page_can_be_found_from_the_home_page_and_the_navigation_is_short():
    """The home page leads to the pages for users and to the design; those of docs/lab have a list of their own."""
    entries = re.findall(r"^  - (?:[^\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert len(entries) <= 14 and not [entry for entry in entries if entry.startswith("lab/")]
    for listing, folders in (("index.md", ("user", "design")), ("lab/README.md", ("lab",))):
        page = ROOT / "docs" / listing
        linked = {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", page.read_text())}
        pages = {
            path for folder in folders for path in ROOT.glob(f"docs/{folder}/*.*") if path.suffix in (".md", ".ipynb")
        }
        missing = pages - linked - {page}
        assert not missing, f"docs/{listing} does not link to {sorted(path.name for path in missing)}"


def test_api_page_describes_every_public_name():
    text = (ROOT / "docs" / "user" / "api.md").read_text()
    missing = [name for name in xm.__all__ if not re.search(rf"`(xm\.)?{name}\b", text)]
    assert not missing, f"docs/user/api.md does not describe {missing}"


@pytest.mark.parametrize("module", ["", ".routing", ".balance", ".flax", ".autotune", ".cuda", ".transfer", ".elastic"])
def test_every_public_name_has_a_docstring_for_its_page_of_the_site(module, monkeypatch):
    """The site silently leaves out a name without one."""
    pytest.importorskip("mkdocs", reason="needs mkdocs, as make setup installs it")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs_site

    name = f"xen_moe_jax{module}"
    if module == ".flax":
        pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
        from xen_moe_jax.flax import MoEConfig

        groups = [f"{g.__module__.rpartition('.')[2]}.{g.__name__}" for g in reversed(MoEConfig.__bases__)]
        assert tuple(groups) == docs_site.GROUPS["xen_moe_jax.flax.MoEConfig"]
    if module == ".transfer":
        transfer.require()
    page, imported = docs_site.api_page(name), importlib.import_module(name)
    assert module in docs_site.MODULES
    without = []
    for public in getattr(imported, "__all__", docs_site.public_names(name)):
        value = getattr(imported, public)
        assert f"::: {name}.{public}\n" in page or f".{public}" in docs_site.MODULES, public
        members = vars(value).items() if inspect.isclass(value) else ()
        described = [(public, value)] if callable(value) else []
        described += [(f"{public}.{n}", m) for n, m in members if isinstance(m, property) and not n.startswith("_")]
        without += [label for label, value in described if not (value.__doc__ or "").strip()]
    assert not without, f"{name}: without a docstring: {without}"


def test_api_page_has_every_command_and_every_field_of_the_configs():
    text = (ROOT / "docs" / "user" / "api.md").read_text()
    fields = [f.name for f in dataclasses.fields(xm.KernelConfig)]
    if importlib.util.find_spec("flax") is not None:
        from xen_moe_jax.flax import MoEConfig

        fields += [f.name for f in dataclasses.fields(MoEConfig)]
        undocumented = [f.name for f in dataclasses.fields(MoEConfig) if f.name not in (MoEConfig.__doc__ or "")]
        assert not undocumented, f"help(MoEConfig) does not describe {undocumented}"
    missing = [name for name in fields if f"`{name}`" not in text]
    missing += [name for name in cli.COMMANDS if f"`xen-moe-jax {name}" not in text]
    assert not missing, f"docs/user/api.md does not describe {missing}"


def test_the_check_of_the_readme_example_can_fail():
    """The dense computation above is not vacuous: a wrong routing weight is noticed."""
    namespace = {
        "inputs": (np.ones((4, 8)), np.zeros((4, 4)), np.ones((4, 8, 8))),
        "moe": lambda x, logits, w: np.zeros_like(x),
        "gradients": (),
    }
    with pytest.raises(AssertionError):
        exec(CHECK, namespace)
