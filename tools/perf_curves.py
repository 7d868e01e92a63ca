"""Prints the predictions of `xm.perf_model` from 8 to 1,024 ranks, as the tables of docs/performance.md.

    python tools/perf_curves.py

DeepSeek-V3 shape: hidden 7168, 256 experts, top-8 (from 512 ranks on, two experts a rank), fp8 dispatch and bf16
combine, nodes of eight GPUs. On paper: nothing beyond one node of four GPUs has been run.
"""

from __future__ import annotations

import xen_moe_jax as xm

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024)


def row(ranks: int, tokens: int, nodes_per_token: int | None) -> str:
    cells = [str(ranks)]
    for operation, dtype in (("dispatch", "float8_e4m3fn"), ("combine", "bfloat16")):
        p = xm.perf_model(
            operation,
            num_tokens=tokens,
            hidden=7168,
            num_ranks=ranks,
            num_experts=max(256, 2 * ranks),
            top_k=8,
            ranks_per_node=8,
            nodes_per_token=nodes_per_token,
            dtype=dtype,
        )
        cells += [f"{p.seconds * 1e6:,.0f}", f"{p.bytes_fast / 1e6:,.1f}", f"{p.bytes_slow / 1e6:,.1f}", p.bound]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    for tokens, nodes_per_token, title in (
        (4096, 4, "4096 tokens a rank, experts of a token on at most 4 nodes"),
        (128, None, "128 tokens a rank, experts anywhere"),
    ):
        print(f"\n{title}:\n")
        print("| ranks | dispatch us | MB NVLink | MB network | bound | combine us | MB NVLink | MB network | bound |")
        print("|---:|---:|---:|---:|---|---:|---:|---:|---|")
        for ranks in RANKS:
            print(row(ranks, tokens, nodes_per_token))


if __name__ == "__main__":
    main()
