"""Hooks of mkdocs (mkdocs.yml): they add files and pages to the site beside those of docs/.

The pages are written to be read in the repository, so they link to files outside docs/. Such a file becomes part of the
site: Markdown as a page, a folder as a list of its files, everything else as it is. The API pages are made of the
docstrings of every public name, the tutorial of the notebook with the output it holds.
"""

from __future__ import annotations

import ast
import html
import logging
import pathlib
import posixpath
import re
import sys
from typing import Any

from mkdocs.structure.files import File

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import notebook  # noqa: E402

PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "benchmarks/README.md")
"""Files of the repository that the site holds even if no page of docs/ links to them."""
MODULES = ("", ".routing", ".balance", ".flax", ".autotune", ".cuda", ".transfer", ".elastic")
"""Public modules that have an API page; "" is the package itself."""
GROUPS = {
    "xen_moe_jax.flax.MoEConfig": (
        "experts.ExpertFields",
        "router.RouterFields",
        "balance.BalanceFields",
        "placement.PlacementFields",
        "communication.CommunicationFields",
        "memory.MemoryFields",
    ),
}
"""Classes whose fields are documented in groups, and where the package `_config` beside the class has each group."""
LINK = re.compile(r"(?P<open>\]\()(?P<target>[^)#\s]+)(?P<rest>#[^)\s]*)?(?P<close>\))")
TUTORIAL = "docs/user/tutorial.ipynb"
SIGNATURE = re.compile(r"doc-signature[^>]*>.*?<code>(.*?)</code>", re.DOTALL)
WIDEST = 88
"""Columns of a signature: `line_length` of mkdocs.yml and a little for an argument that cannot be broken."""
OUTSIDE = "repository/"
"""Folder of the site for files from outside docs/."""


def repository_path(page: str, target: str) -> str:
    """The file of the repository that a page of the site links to with `target`."""
    source = page.removeprefix(OUTSIDE) if page.startswith(OUTSIDE) else f"docs/{page}"
    return posixpath.normpath(posixpath.join(posixpath.dirname(source), target))


def site_path(path: str) -> str:
    """Returns the place in the site of a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/").removesuffix(".ipynb") + (".md" if path.endswith(".ipynb") else "")
    return f"{OUTSIDE}{path}/index.md" if (ROOT / path).is_dir() else OUTSIDE + path


def outside_links(page: str, text: str) -> set[str]:
    """Existing files and folders outside docs/ that a page links to."""
    targets = {match["target"] for match in LINK.finditer(text) if ":" not in match["target"]}
    found = {repository_path(page, target) for target in targets}
    return {path for path in found if not path.startswith(("docs/", "..")) and (ROOT / path).exists()}


def on_files(files: Any, config: Any) -> Any:
    wanted = set(PAGES)
    for file in files.documentation_pages():
        wanted |= outside_links(file.src_uri, file.content_string)
    done: set[str] = set()
    while wanted - done:
        path = min(wanted - done)
        done.add(path)
        if (ROOT / path).is_dir():
            text = folder_page(path)
            files.append(File.generated(config, site_path(path), content=text))
            wanted |= {f"{path}/{name}" for name in listed(path)}
        elif path.endswith(".md"):
            text = (ROOT / path).read_text()
            files.append(File.generated(config, site_path(path), content=text))
            wanted |= outside_links(site_path(path), text)
        else:
            files.append(File.generated(config, site_path(path), abs_src_path=str(ROOT / path)))
    for module in MODULES:
        name = f"xen_moe_jax{module}"
        files.append(File.generated(config, f"reference/{name}.md", content=api_page(name)))
    files.append(File.generated(config, site_path(TUTORIAL), content=notebook.as_markdown(ROOT / TUTORIAL)))
    files.remove(files.get_file_from_path(TUTORIAL.removeprefix("docs/")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links as the site needs them."""
    here = page.file.src_uri

    def rewrite(match: re.Match) -> str:
        target = match["target"]
        if ":" in target or here.startswith("reference/"):
            return match[0]
        path = repository_path(here, target)
        if not (ROOT / path).exists():
            return match[0]  # mkdocs complains about it, as it should
        relative = posixpath.relpath(site_path(path), posixpath.dirname(here) or ".")
        return f"{match['open']}{relative}{match['rest'] or ''}{match['close']}"

    return LINK.sub(rewrite, markdown)


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Warns, which is an error in `make docs`, of a signature that the formatter has left in one long line."""
    for signature in SIGNATURE.findall(content):
        text = html.unescape(re.sub(r"<[^>]+>", "", signature))
        if max(map(len, text.splitlines()), default=0) > WIDEST:
            logging.getLogger("mkdocs.hooks").warning(f"{page.file.src_uri}: signature wider than {WIDEST}: {text}")
    return content


def listed(folder: str) -> list[str]:
    return sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file() and not path.name.startswith("."))


def folder_page(folder: str) -> str:
    lines = [f"# {folder}/", "", *(f"- [{name}]({name})" for name in listed(folder))]
    return "\n".join(lines) + "\n"


def public_names(module: str) -> list[str]:
    """`__all__` of a module, or its own functions and classes where it has none; read, not imported."""
    path = ROOT.joinpath(*module.split("."))
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    tree = ast.parse(source.read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return sorted(ast.literal_eval(node.value))
    return sorted(
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    )


def api_page(module: str) -> str:
    """Every public name of a module by its docstring; names that are modules have pages of their own."""
    modules = {name.removeprefix(".") for name in MODULES}
    lines = [f"# `{module}`", ""]
    for name in public_names(module):
        if name not in modules:
            lines.append(f"::: {module}.{name}\n")
            groups = GROUPS.get(f"{module}.{name}", ())
            lines += [f"::: {module}._config.{group}\n    options: {{heading_level: 3}}\n" for group in groups]
    return "\n".join(lines)
