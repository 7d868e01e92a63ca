"""Draws docs/images/house.svg: the modules of `xen_moe_jax` by layer, and their imports.

The layers are those that `make lint` enforces (pyproject.toml, `[tool.importlinter]`), the arrows are the imports that
grimp finds in the sources, less those that a longer way implies. An arrow that points up would be drawn in red, but
`make lint` fails first.
"""

from __future__ import annotations

import collections
import pathlib
import re
import tomllib

import grimp
import matplotlib

matplotlib.use("svg")
matplotlib.rcParams["svg.hashsalt"] = "house"  # the same picture gives the same file
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.patches import FancyBboxPatch  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = "xen_moe_jax"
BACKENDS = f"{PACKAGE}.backends"
COLORS = ("#dbe9f6", "#e5f5e0", "#fde0c5", "#efe3f4", "#fff2cc", "#e2e2e2")


def rows() -> list[list[str]]:
    """Modules of every layer, top first; the layers inside `backends` stand in for that package."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = {c["containers"][0]: c["layers"] for c in contracts if c["type"] == "layers"}

    def split(container: str) -> list[list[str]]:
        found = [
            [f"{container}.{name.strip(' ()')}" for name in re.split(r"[:|]", layer)] for layer in layers[container]
        ]
        return [[name for name in layer if not name.endswith("__main__")] for layer in found]

    out = []
    for layer in split(PACKAGE):
        if layer == [BACKENDS]:
            out += [layer, *split(BACKENDS)]
        elif layer:
            out.append(layer)
    return out


def box_of(module: str, boxes: set[str]) -> str | None:
    """The box that a module is drawn in: its own, or its nearest ancestor's."""
    while module and module not in boxes:
        module = module.rpartition(".")[0]
    return module or None


def edges(boxes: set[str]) -> dict[tuple[str, str], int]:
    """(importer, imported) boxes with the number of imports between them."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for importer in graph.modules:
        for imported in graph.find_modules_directly_imported_by(importer):
            pair = box_of(importer, boxes), box_of(imported, boxes)
            if None not in pair and pair[0] != pair[1]:
                found[pair] += 1  # type: ignore[index]
    return found


def without_detours(pairs: dict[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """The imports that no longer way through other boxes stands for as well."""
    below = collections.defaultdict(set)
    for importer, imported in pairs:
        below[importer].add(imported)

    def reachable(start: str, without: str) -> set[str]:
        seen: set[str] = set()
        waiting = [name for name in below[start] if name != without]
        while waiting:
            name = waiting.pop()
            if name not in seen:
                seen.add(name)
                waiting += below[name]
        return seen

    return {pair: count for pair, count in pairs.items() if pair[1] not in reachable(*pair)}


def main() -> None:
    layers = [
        [
            name
            for name in layer
            if (ROOT / name.replace(".", "/")).exists() or (ROOT / (name.replace(".", "/") + ".py")).exists()
        ]
        for layer in rows()
    ]
    layers = [layer for layer in layers if layer]
    place = {}
    figure, axes = plt.subplots(figsize=(12, 0.95 * len(layers)))
    for depth, layer in enumerate(layers):
        for i, name in enumerate(layer):
            place[name] = ((i + 0.5) / len(layer), -depth)
    for (importer, imported), count in without_detours(edges(set(place))).items():
        (x0, y0), (x1, y1) = place[importer], place[imported]
        upward = y1 > y0
        axes.annotate(
            "",
            xy=(x1, y1 + (0.22 if y1 < y0 else -0.22)),
            xytext=(x0, y0 - 0.22),
            arrowprops={
                "arrowstyle": "-|>",
                "color": "red" if upward else "#5b6b7b",
                "alpha": 1.0 if upward else 0.7,
                "linewidth": 0.6 + 0.25 * min(count, 6),
                "connectionstyle": "arc3,rad=0.3" if y0 == y1 else "arc3",
                "shrinkA": 0,
                "shrinkB": 0,
            },
        )
    for name, (x, y) in place.items():
        label = name.removeprefix(f"{PACKAGE}.")
        width = 0.0092 * len(label) + 0.02
        color = COLORS[int(-y) % len(COLORS)]
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - 0.2),
                width,
                0.4,
                boxstyle="round,pad=0.005",
                facecolor=color,
                edgecolor="#444444",
                zorder=3,
            )
        )
        axes.text(x, y, label, ha="center", va="center", fontsize=8.5, family="monospace", zorder=4)
    axes.set_xlim(0, 1)
    axes.set_ylim(-len(layers) + 0.5, 0.5)
    axes.axis("off")
    axes.set_title("xen_moe_jax: what imports what; an import that a longer way implies is left out", fontsize=10)
    figure.savefig(ROOT / "docs" / "images" / "house.svg", bbox_inches="tight", metadata={"Date": None})


if __name__ == "__main__":
    main()
