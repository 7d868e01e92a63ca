"""Finds the term that bounds an operation on a TPU: the wire, HBM, or the core that issues bundles; from 8 to 256
chips.

The programs for the smallest and the largest number of devices are compiled. Between them kernels have the loops of the
largest (a token has at most as many destinations as slots, here 8): only how often they turn differs. XLA's own
operations differ with the number of devices, so that their time is given for the two that were compiled.
"""

from __future__ import annotations

from typing import Any

from benchmarks.tpu import bundles as tpu_bundles
from benchmarks.tpu.bundles import Program

TERMS = ("wire", "hbm", "kernels", "xla")
CHIPS = (8, 16, 32, 64, 128, 256)


def rows(
    topology: Any, case: Any, operation: str, programs: dict[int, Program], sizes: dict[str, int], seed: int
) -> list[dict]:
    """Terms of one operation in microseconds, for each number of devices, and the largest of them.

    Args:
      programs: compiled for the smallest and the largest number of `CHIPS`.
    """
    from benchmarks.tpu import programs as tpu_programs

    found = []
    for devices in CHIPS:
        compiled_for = devices if devices in programs else CHIPS[-1]
        program = programs[compiled_for]
        routing = tpu_bundles.uniform_routing(
            case.tokens, devices, sizes["experts"], sizes["top_k"], tpu_bundles.grouping(program), seed
        )
        moved = tpu_programs.traffic(
            case, operation, tpu_bundles.moves(routing), sizes["hidden"], sizes["top_k"], devices
        )
        gathers = tpu_programs.gathered(case, operation, devices, sizes["top_k"], sizes["hidden"])
        wire = topology.all_gather_us if gathers else topology.all_to_all_us
        few = "xen_moe_order_tokens" in program.kernels and devices > sizes["top_k"]
        if few or gathers != ("xen_moe_pack_tokens" in program.kernels):
            continue  # this number of devices runs another program than the compiled one
        counted = tpu_bundles.counts(program, routing, case.layout == "padded")
        us = 1e6 / topology.clock_hz
        kernels = {name: c.total * us for name, c in counted.items()}
        terms = {
            "wire": wire(moved["ici_bytes"], devices),
            "hbm": moved["hbm_bytes"] / topology.hbm_bytes_per_s * 1e6,
            "kernels": sum(kernels.values()),
        }
        if devices == compiled_for:
            terms["xla"] = tpu_bundles.xla_cycles(program.text) * us
        row: dict[str, Any] = {"devices": devices, "torus": list(topology.shape(devices).sides)}
        row |= {"compiled_for": compiled_for, "xla_us": None}
        row |= {f"{name}_us": round(value, 1) for name, value in terms.items()}
        row["dma_issue_us"] = round(sum(c.issue for c in counted.values()) * us, 1)
        row["by_kernel_us"] = {name: round(value, 1) for name, value in kernels.items()}
        row["bound"] = max(terms, key=lambda name: terms[name])
        found.append(row)
    return found


def by_devices(results: list[dict[str, Any]], generation: str, case: str) -> list[str]:
    """Lines of a Markdown table: the operations of a case on more and more devices."""
    lines = ["| operation | devices | torus | wire us | HBM us | kernels us | of it DMA issue | bound |"]
    lines.append("|" + "---|" * 8)
    for row in results:
        if (row["generation"], row["case"]) != (generation, case):
            continue
        for budget in row.get("budget", []):
            cells = [f"{case} {row['operation']}", str(budget["devices"]), " x ".join(map(str, budget["torus"]))]
            cells += [f"{budget[f'{n}_us']:.0f}" for n in ("wire", "hbm", "kernels", "dma_issue")]
            lines.append("| " + " | ".join([*cells, budget["bound"]]) + " |")
    return lines


TARGETS = (
    ("v5p", "throughput", 2400),
    ("v5e", "throughput", 9700),
    ("v5p", "low-latency", 100),
    ("v5e", "low-latency", 150),
)
"""Microseconds that all kernels and tables of a dispatch and a combine may take on 8 devices; for 4096 tokens this is
the time of the wire."""
MOST_OF_WIRE = 1.15
"""Most time of the kernels and tables of a dispatch and a combine on the largest number of devices, over that of the
wire."""


def core_and_wire(results: list[dict[str, Any]], generation: str, case: str, devices: int) -> tuple[float, float]:
    """Time of the core and time of the wire for a dispatch and a combine together, in microseconds.

    Raises:
      ValueError: XLA's tables were not counted for this number of devices.
    """
    mine = [r["budget"] for r in results if (r["generation"], r["case"]) == (generation, case) and r.get("budget")]
    pair = [b for budget in mine for b in budget if b["devices"] == devices and b["xla_us"] is not None]
    if len(pair) != 2:
        raise ValueError(f"{generation} {case}: no program for {devices} devices was compiled")
    return sum(b["kernels_us"] + b["xla_us"] for b in pair), sum(b["wire_us"] for b in pair)


def by_target(results: list[dict[str, Any]]) -> list[str]:
    """Lines of a Markdown table: kernels and tables of a dispatch and a combine together, beside the target."""
    lines = [
        "| chip | devices | case | kernels and tables, us | wire, us | aimed at, us |",
        "|---|---|---|---:|---:|---|",
    ]
    aims = {(generation, case): f"{most}" for generation, case, most in TARGETS}
    for devices in (CHIPS[0], CHIPS[-1]):
        for generation, case in dict.fromkeys((r["generation"], r["case"]) for r in results if r.get("budget")):
            core, wire = core_and_wire(results, generation, case, devices)
            aim = aims.get((generation, case), "-")
            if devices == CHIPS[-1]:
                aim = f"{MOST_OF_WIRE * wire:.0f}, {MOST_OF_WIRE} times the wire"
            lines.append(f"| {generation} | {devices} | {case} | {core:.0f} | {wire:.0f} | {aim} |")
    return lines


def plot(path: str, results: list[dict[str, Any]]) -> None:
    """The whole budget of a dispatch and a combine by generation, at 4096 and at 128 tokens. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    counted = {row["case"] for row in results if row.get("budget")}
    cases = [case for case in ("throughput", "low-latency") if case in counted] or sorted(counted)
    chips = list(dict.fromkeys(row["generation"] for row in results))
    figure, panels = plt.subplots(1, len(cases), figsize=(6.5 * len(cases), 5), squeeze=False)
    for axes, case in zip(panels[0], cases, strict=True):
        for i, chip in enumerate(chips):
            budgets = [
                row["budget"][0]
                for row in results
                if (row["generation"], row["case"]) == (chip, case)
                and row.get("budget")
                and "halves" not in row["operation"]
            ]
            total = {n: sum(b[f"{n}_us"] for b in budgets) for n in TERMS}
            axes.bar(i - 0.27, total["wire"], 0.25, color="tab:blue", label="wire (ICI)" if not i else None)
            axes.bar(i, total["hbm"], 0.25, color="tab:orange", label="HBM" if not i else None)
            axes.bar(
                i + 0.27, total["kernels"], 0.25, color="tab:green", label="bundles of our kernels" if not i else None
            )
            axes.bar(
                i + 0.27, total["xla"], 0.25, total["kernels"], color="tab:red",
                label="XLA's own estimate of its tables" if not i else None,
            )  # fmt: skip
        tokens = next(row["tokens"] for row in results if row["case"] == case)
        axes.set_xticks(range(len(chips)), chips)
        axes.set_ylabel("microseconds, at least (estimate)")
        rows = "bf16 rows" if case.endswith("bf16") else "fp8 dispatch and bf16 combine"
        axes.set_title(f"{tokens} tokens a device, {rows}, 8 devices")
    panels[0][0].legend()
    figure.suptitle("What a dispatch and a combine need: nothing here is measured")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
