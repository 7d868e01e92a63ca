"""The static floor of a layer with its gradients, from the terms of one device that `benchmarks.tpu.layer` counts.

The nine grouped matmuls need their operations over the peak of the matrix units, or their bytes over HBM; the exchanges
need their bytes over the all-to-all bandwidth of the torus; our kernels need their bundles, or their bytes over HBM
where that takes longer, and XLA's operations what XLA estimates. The work of the core is added up. A kernel that sends
rows sends them while it makes them: it and its exchange take the longer of both. An exchange with a start and a done
takes the longer of itself and the kernels between the two. The goal is `GOAL` times the longer of matmuls and wire.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tpu.topologies import Topology

GOAL = 1.15
SENDING = {"xen_moe_push": "xen_moe_pack", "xen_moe_reduce_slots": "xen_moe_reduce_slots_local"}
"""Kernels that send rows, and wait until they are there; and by each the kernel that makes the rows for starts."""
BY_WEIGHT = "xen_moe_grouped_by_weight"
OF_KERNEL = {
    "xen_moe_grouped_products": 3,
    "xen_moe_grouped_transposed": 2,
    "xen_moe_grouped_by_weight": 3,
    "xen_moe_activation_gradients": 1,
}
"""By the name of a kernel of ours: how many of the nine matmuls all its calls in a layer make."""
MATMULS = 9
"""Grouped matmuls of gate, up and down: forward, and backward by rows and by weights."""


def matmuls_us(chip: Topology, rows: int, experts: int, hidden: int, width: int) -> float:
    """Microseconds of all grouped matmuls on `rows` rows of `experts` experts of one device, in bfloat16."""
    operations = 2 * rows * hidden * width
    moved = 2 * (rows * hidden + rows * width + experts * hidden * width)
    return MATMULS * max(operations / chip.flops_per_s, moved / chip.hbm_bytes_per_s) * 1e6


def matmuls_of(row: dict[str, Any], chip: Topology, sizes: dict[str, int]) -> float:
    """Returns `matmuls_us` of the rows of a device for which the terms of `row` were counted."""
    local = -(-sizes["experts"] // row["devices"])
    return matmuls_us(chip, row["rows"], local, sizes["hidden"], sizes["width"])


def floor(row: dict[str, Any], chip: Topology, sizes: dict[str, int]) -> dict[str, float]:
    """Sums for a row of `benchmarks.tpu.layer`, in microseconds.

    Returns:
      `matmuls_us`; `kernels_us`: the exchanges' kernels; `scheduled_us`: the layer as the compiled program runs it,
      with the numbers that ranks gather first;
      `hidden_us`: no exchange makes the core wait; `goal_us`.
    """
    matmuls = matmuls_of(row, chip, sizes)
    wire, xla, kernels = row["wire_us"], row["xla_us"], kernels_us(row)
    core = matmuls + sum(beyond_peak_us(row, matmuls).values()) + xla + sum(kernels.values())
    # four exchanges of nearly the same bytes; the peer's have no kernel that sends
    whole = [["sends", kernels.get(name, 0.0) / 2] for name in SENDING] * 2
    waits = waits_us(row.get("timeline", whole), wire / 4)
    moved = row.get("collective_bytes", {})
    # of 64 ranks XLA gathers by an all-reduce, which moves twice the bytes; the router's gradient is no part of the sum
    reduced = max(moved.get("all-reduce", 0) - 4 * sizes["hidden"] * sizes["experts"], 0)
    gathered = chip.all_gather_us(moved.get("all-gather", 0) + 2 * reduced, row["devices"])
    return {
        "matmuls_us": round(matmuls, 1),
        "kernels_us": round(sum(kernels.values()), 1),
        "scheduled_us": round(core + waits + gathered, 1),
        "hidden_us": round(max(core, wire), 1),
        "goal_us": round(GOAL * max(matmuls, wire), 1),
    }


def waits_us(timeline: list[Any], exchange: float) -> float:
    """Returns microseconds in which the core waits for the wire, in the steps of `layer.timeline`.

    The wire carries one thing after the other, in the order in which they start.

    Args:
      exchange: microseconds of the wire for a whole exchange.
    """
    now = free = waits = 0.0
    ends: list[float] = []
    for kind, n in timeline:
        if kind == "done":
            waits += max(ends[n] - now, 0.0)
            now = max(ends[n], now)
            continue
        if kind != "core":
            free = max(free, now) + (n if kind == "start" else 1.0) * exchange
        if kind == "start":
            ends.append(free)
        else:
            now += n
        if kind == "sends":
            waits += max(free - now, 0.0)
            now = max(free, now)
    return waits


def kernels_us(row: dict[str, Any]) -> dict[str, float]:
    """Microseconds of the exchanges' kernels, by their bundles or by HBM, the longer of both."""
    hbm = row.get("hbm_us", {})
    return {name: max(us, hbm.get(name, 0.0)) for name, us in row["by_kernel_us"].items()}


def beyond_peak_us(row: dict[str, Any], matmuls: float) -> dict[str, float]:
    """Microseconds that grouped matmuls need beyond the peak: our kernels by name, and XLA's as "ragged_dot".

    Args:
      matmuls: microseconds that the nine matmuls need at the peak, together.
    """
    beyond = {
        name: max(us - matmuls * OF_KERNEL[name] / MATMULS, 0.0) for name, us in row.get("grouped_us", {}).items()
    }
    return beyond | {"ragged_dot": sum(max(us - matmuls / MATMULS, 0.0) for us in row["ragged_us"])}


PARTS: dict[str, tuple[str, ...]] = {
    "`push`": ("xen_moe_push", "xen_moe_pack"),
    "`place`": ("xen_moe_place",),
    "`reduce_slots`": ("xen_moe_reduce_slots", "xen_moe_reduce_slots_local", "xen_moe_start", "xen_moe_done"),
    "`reduce_ranks`": ("xen_moe_reduce_ranks",),
    "tables": ("xen_moe_index_rows", "xen_moe_scatter", "xen_moe_order_pairs"),
    "products": ("xen_moe_grouped_products",),
    "by rows": ("xen_moe_grouped_transposed", "xen_moe_activation_gradients"),
    "by weights": ("xen_moe_grouped_by_weight",),
}
"""Parts of our layer beside the peak of its matmuls, and their kernels."""


def parts(document: dict[str, Any], chips: dict[str, Topology]) -> list[str]:
    """Lines of a Markdown table: microseconds of each part of our layer beside its matmuls, and their sum over these.

    Args:
      chips: by topology.
    """
    lines = [
        "| topology | " + " | ".join(PARTS) + " | XLA | sum, of the matmuls |",
        "|---|" + "---:|" * (len(PARTS) + 2),
    ]
    for row in document["results"]:
        if row["matmul"] != "auto":
            continue
        matmuls = matmuls_of(row, chips[row["topology"]], document["sizes"])
        us = kernels_us(row) | beyond_peak_us(row, matmuls)
        found = [*(sum(us.get(name, 0.0) for name in names) for names in PARTS.values()), row["xla_us"]]
        cells = [row["topology"], *(f"{n:.0f}" for n in found), f"{sum(found) / matmuls:.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


COLUMNS = ("topology", "matmul", "program", "matmuls", "wire", "kernels", "XLA", "as scheduled", "all hidden")


def table(document: dict[str, Any], chips: dict[str, Topology]) -> list[str]:
    """Lines of a Markdown table: the terms in microseconds, and both sums over the longer of matmuls and wire.

    Args:
      chips: by topology.
    """
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|" + "---:|" * (len(COLUMNS) - 3)]
    for row in document["results"]:
        sums = floor(row, chips[row["topology"]], document["sizes"])
        least = sums["goal_us"] / GOAL
        cells = [row["topology"], row["matmul"], row["program"]]
        cells += [f"{n:.0f}" for n in (sums["matmuls_us"], row["wire_us"], sums["kernels_us"], row["xla_us"])]
        cells += [f"{sums[name] / least:.2f}" for name in ("scheduled_us", "hidden_us")]
        lines.append("| " + " | ".join(cells) + " |")
    return lines
