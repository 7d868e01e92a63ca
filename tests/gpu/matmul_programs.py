"""Many programs with several grouped matmuls each, on one Hopper GPU: every result against one program's, bit for bit.

    python tests/gpu/matmul_programs.py --json FILE [--programs 49] [--threads 8] [--runs 4] [--dealt]

A program is a chain of 2 to 8 matmuls with weights of their own, of one kind and tiling. They are compiled side by side
and run one after the other, each on rows of its own. Before each run the memory that its results will get is filled
with NaNs: else it would hold the same results of the program that they are compared with, and a tile that is left out
would not show. Tiles are claimed (`pallas_kernels/hopper/claims.py`), or dealt out with --dealt. Each program also adds
one to an array that it overwrites: how often it has run on the GPU. The exit status is 1 if a result or a count
differed. Threads take turns often, so that an effect of one program's lowering on another's shows. XLA_FLAGS switch off
suspects in XLA: CUDA graphs by --xla_gpu_enable_command_buffer= and kernels that are launched early by
--xla_gpu_enable_pdl=false.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import pathlib
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.2")
sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import jax.numpy as jnp
import numpy as np

from xen_moe_jax.experts import hopper
from xen_moe_jax.experts.hopper import SWIGLU
from xen_moe_jax.pallas_kernels.hopper.rows import activated_rows, rows_by_weights
from xen_moe_jax.pallas_kernels.hopper.tiles import Tiles

GROUPS, ROWS_A_GROUP, WIDTH, CAPACITY = 32, 2, 2048, 512
LENGTHS = (8, 6, 3, 2, 7, 5, 4)
KINDS = [
    *(("swiglu", tiles) for tiles in (hopper.FEW[0], *hopper.PREFERRED)),
    *(("rows", tiles) for tiles in (*hopper.FEW, *hopper.PREFERRED)),
]


@dataclasses.dataclass(frozen=True)
class Chain:
    """`length` matmuls of one kind; `number` names the program, so that no two are one."""

    kind: str
    tiles: Tiles
    length: int
    number: int

    def compiled(self, operands: tuple[Any, ...]) -> Any:
        def run(
            rows: jax.Array, weights: list[jax.Array], sizes: jax.Array, runs: jax.Array
        ) -> tuple[list[jax.Array], jax.Array]:
            outs = []
            for number in range(self.length):
                one, other = weights[number], weights[(number + 1) % len(weights)]
                if self.kind == "swiglu":
                    (out,) = activated_rows(
                        rows, (one, other), sizes, activation=SWIGLU, projections=False, tiles=self.tiles
                    )
                else:
                    out = rows_by_weights(rows, one, sizes, transposed=False, tiles=self.tiles)
                rows, out = jax.lax.optimization_barrier((rows, out))
                outs.append(out)
            return outs, runs + 1

        run.__name__ = f"{self.kind}{self.length}_{self.number}"
        return jax.jit(run, donate_argnums=3).lower(*operands, start()).compile()


def start() -> jax.Array:
    return jnp.zeros((1,), jnp.int32)


def spoil(count: int) -> None:
    """Fills the memory that `count` results will get with NaNs, if the allocator gives out the blocks that were freed
    last."""
    arrays = [jnp.full((CAPACITY, WIDTH), jnp.nan, jnp.bfloat16) for _ in range(count)]
    jax.block_until_ready(arrays)


def used(outs: list[jax.Array]) -> list[np.ndarray]:
    return [np.asarray(out[: GROUPS * ROWS_A_GROUP]).view(np.uint16) for out in outs]


def difference(got: np.ndarray, expected: np.ndarray) -> dict[str, Any]:
    """Counts the different elements and describes the first: row, column, its value, the expected value."""
    at = np.argwhere(got != expected)
    first = [[int(row), int(column), hex(got[row, column]), hex(expected[row, column])] for row, column in at[:8]]
    return {"elements": len(at), "first": first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path, required=True)
    parser.add_argument("--programs", type=int, default=len(KINDS) * len(LENGTHS))
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--runs", type=int, default=4, help="of each program")
    parser.add_argument("--dealt", action="store_true", help="tiles are dealt out at the start")
    options = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 1 + max(LENGTHS))
    rows = jax.random.normal(keys[0], (CAPACITY, WIDTH), jnp.bfloat16)
    weights = [jax.random.normal(key, (GROUPS, WIDTH, WIDTH), jnp.bfloat16) * WIDTH**-0.5 for key in keys[1:]]
    operands = rows, weights, jnp.full((GROUPS,), ROWS_A_GROUP, jnp.int32)
    truth = {kind: Chain(kind, Tiles(), max(LENGTHS), -1).compiled(operands) for kind, _ in KINDS}
    cases = itertools.islice(itertools.cycle(itertools.product(LENGTHS, KINDS)), options.programs)
    chains = [
        Chain(kind, dataclasses.replace(tiles, claimed=not options.dealt), length, number)
        for number, (length, (kind, tiles)) in enumerate(cases)
    ]
    sys.setswitchinterval(1e-4)
    with concurrent.futures.ThreadPoolExecutor(options.threads) as pool:
        programs = list(pool.map(lambda chain: chain.compiled(operands), chains))

    wrong: list[dict[str, Any]] = []
    operations = 0
    for chain, program in zip(chains, programs, strict=True):
        runs = start()
        for run in range(options.runs):
            given = (rows * (1 + chain.number * options.runs + run) / 64).astype(rows.dtype), *operands[1:]
            spoil(2 * max(LENGTHS))
            expected = used(truth[chain.kind](*given, start())[0])
            spoil(2 * max(LENGTHS))
            outs, runs = program(*given, runs)
            places = [hex(out.unsafe_buffer_pointer()) for out in outs]
            got = used(outs)
            operations += len(got)
            for number, (one, other) in enumerate(zip(got, expected, strict=False)):
                if not np.array_equal(one, other):
                    which = {"program": str(chain), "run": run, "matmul": number, "at": places[number]}
                    wrong.append(which | difference(one, other))
            if int(runs[0]) != run + 1:
                wrong.append({"program": str(chain), "run": run, "runs counted": int(runs[0])})
    found = {
        "command": "python tests/gpu/matmul_programs.py " + " ".join(sys.argv[1:]),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "programs": len(chains),
        "operations": operations,
        "wrong_programs": len({entry["program"] for entry in wrong}),
        "wrong": wrong,
    }
    options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{found['wrong_programs']} of {len(chains)} programs gave wrong results, in {operations} operations")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
