"""Runs a notebook without Jupyter: executes the code cells of a file, keeps their output, and makes a page of it.

    python tools/notebook.py docs/user/tutorial.ipynb            run it; exit status 1 when a cell fails
    python tools/notebook.py docs/user/tutorial.ipynb --write    run it and keep the output in the file

A cell shows what it prints, the value of its last expression, and the figures of matplotlib that it leaves open.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import pathlib
import sys
import traceback
from typing import Any


def read(path: pathlib.Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def code_cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def run_cell(text: str, namespace: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """Runs one cell; its output in the format of notebooks."""
    tree = ast.parse(text, name)
    last = ast.Expression(tree.body.pop().value) if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, outputs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, name, "exec"), namespace)
        value = eval(compile(last, name, "eval"), namespace) if last else None
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": lines(printed.getvalue())})
    if value is not None:
        data = {"text/plain": lines(repr(value))}
        outputs.append({"output_type": "execute_result", "metadata": {}, "execution_count": None, "data": data})
    return outputs + figures()


def figures() -> list[dict[str, Any]]:
    """Open figures as PNG, closed afterwards; none where matplotlib was not imported."""
    plt = sys.modules.get("matplotlib.pyplot")
    found = []
    for number in plt.get_fignums() if plt else []:
        image = io.BytesIO()
        plt.figure(number).savefig(image, format="png", dpi=80)
        data = {"image/png": base64.b64encode(image.getvalue()).decode(), "text/plain": ["<Figure>"]}
        found.append({"output_type": "display_data", "metadata": {}, "data": data})
    if plt:
        plt.close("all")
    return found


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def run(path: pathlib.Path) -> dict[str, Any]:
    """The notebook with the output of a fresh run.

    Raises: the exception of a cell; the traceback names the cell.
    """
    content = read(path)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(content), 1):
        cell["outputs"] = run_cell(source(cell), namespace, f"{path.name}[{number}]")
        cell["execution_count"] = number
    return content


def as_markdown(path: pathlib.Path) -> str:
    """The page: text, code and output as they stand in the file."""
    parts = []
    for cell in read(path)["cells"]:
        if cell["cell_type"] == "markdown":
            parts.append(source(cell))
            continue
        parts.append(f"```python\n{source(cell)}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![Output](data:image/png;base64,{data['image/png'].strip()})")
            else:
                parts.append("```text\n" + "".join(output.get("text") or data["text/plain"]).rstrip() + "\n```")
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebook", type=pathlib.Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    try:
        content = run(options.notebook)
    except Exception:
        traceback.print_exc()
        return 1
    if options.write:
        options.notebook.write_text(json.dumps(content, indent=1) + "\n")
    code = sum(cell["cell_type"] == "code" for cell in content["cells"])
    print(f"{options.notebook}: {code} code cells ran without an error{'; outputs written' if options.write else ''}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
