"""A small run of every kernel on one GPU, for compute-sanitizer: one rank, so that no kernel waits for another GPU.

compute-sanitizer --tool memcheck python tests/gpu/sanitized_program.py
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[2]))

import jax
import numpy as np
from jax.sharding import Mesh

import xen_moe_jax as xm
from tests.gpu import bodies
from tests.support.cases import CASES

NAMES = (
    *("grouped", "ranked", "padded"),
    *("grouped-fp8", "grouped-scaled-fp8", "grouped-int8-f32", "padded-odd-hidden-fp8"),
    *("grouped-mxfp4", "padded-odd-hidden-mxfp4-f32"),
    "grouped-align8-capacity-one-below",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="three cases: racecheck is slow")
    parser.add_argument("--backend", default="cuda")
    options = parser.parse_args()
    mesh = Mesh(np.array(jax.devices()[:1]), ("ep",))
    config = xm.KernelConfig(backend=options.backend, timeout_s=0)  # instrumented kernels are slow: wait for ever
    by_name = {case.name: case for case in CASES}
    for name in NAMES[:3] if options.short else NAMES:
        for routing in ("uniform", "duplicates"):
            bodies.assert_same(bodies.Setup(by_name[name], mesh, ("ep",), 20, 256), routing, config)
            print(f"{name}/{routing}: same", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
