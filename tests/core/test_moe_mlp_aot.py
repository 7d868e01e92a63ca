"""`xm.moe_mlp` compiled for an H100 by XLA's GPU compiler: the passes that XLA makes over rows between the kernels.

It needs the library's CUDA module and the plugin of `jax[cuda13]`, as `tests/backends/cuda/test_aot.py`, and no GPU.
CI runs it over the wheel, too.
"""

from __future__ import annotations

import collections
import os
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import gpu_topology
from xen_moe_jax.backends import load
from xen_moe_jax.backends.base import BackendUnavailable
from xen_moe_jax.experts import hopper
from xen_moe_jax.pallas_kernels.hopper import ring

pytestmark = pytest.mark.gpu_aot

TOKENS, HIDDEN, WIDE, EXPERTS, TOP_K, ROWS = 1024, 512, 256, 8, 2, 2560
INNER, OUTER = f"bf16[{ROWS},{WIDE}]", f"bf16[{ROWS},{HIDDEN}]"


@pytest.fixture(scope="module")
def mesh():
    try:
        load("cuda").check_available()
        return gpu_topology.mesh(1, "ep")
    except (BackendUnavailable, RuntimeError) as reason:
        assert not os.environ.get("XEN_MOE_EXPECT_CUDA"), reason
        pytest.skip(str(reason))


CONFIG = xm.KernelConfig(backend="cuda")


def step(mesh, x, idx, weights, gate, up, down, cotangent):
    """Forward and backward pass."""

    def layer(x, weights, gate, up, down):
        def body(x, idx, *arrays):
            return xm.moe_mlp(x, idx, *arrays, num_experts=EXPERTS, axis_name="ep", capacity=ROWS, config=CONFIG)

        mapped = jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep"))
        return mapped(x, idx, weights, gate, up, down)

    out, pull = jax.vjp(layer, x, weights, gate, up, down)
    return out, pull(cotangent)


def passes(program):
    """For each kernel of XLA over rows: how many arrays of rows it reads and writes, by their types."""
    found, types = [], {}
    entry = program[program.index("\nENTRY") :]
    for name, result, operation, operands in re.findall(r"(%[\w.-]+) = (\([^=]*?\)|\S+) ([\w-]+)\((.*?)\)", entry):
        types[name] = result
        if operation in ("parameter", "get-tuple-element", "tuple", "bitcast", "custom-call"):
            continue
        read = [types.get(operand, "") for operand in re.findall(r"%[\w.-]+", operands)]
        touched = collections.Counter(re.findall(r"bf16\[[\d,]+\]", " ".join([result, *read])))
        if kept := {kind: count for kind, count in touched.items() if kind in (INNER, OUTER)}:
            found.append(kept)
    return found


def written(program, kind):
    """How many arrays of a type the program's calls and kernels write."""
    found = re.findall(r" = (\([^=]*?\)|\S+) ([\w-]+)\(", program[program.index("\nENTRY") :])
    made = [result for result, operation in found if operation in ("custom-call", "fusion")]
    return sum(result.count(kind) for result in made)


def test_one_pass_over_rows(mesh, monkeypatch):
    """Forward none; backward one, over projections and the activation's cotangent `[C, F]`. None is over `[C, H]`. Of
    arrays `[C, H]` only the experts' outputs and the rows' gradients are written: tokens and cotangents are gathered.
    """
    launch = ring.kernel
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    monkeypatch.setattr(ring, "kernel", lambda body, tiles, sms, *rest: launch(body, tiles, sms or 132, *rest))
    shapes = [(TOKENS, HIDDEN), (TOKENS, TOP_K), (TOKENS, TOP_K), (EXPERTS, HIDDEN, WIDE), (EXPERTS, HIDDEN, WIDE)]
    shapes += [(EXPERTS, WIDE, HIDDEN), (TOKENS, HIDDEN)]
    dtypes = [jnp.bfloat16, jnp.int32, jnp.float32, *[jnp.bfloat16] * 4]
    placed = jax.NamedSharding(mesh, P("ep"))
    given = [jax.ShapeDtypeStruct(*a, sharding=placed) for a in zip(shapes, dtypes, strict=True)]
    program = jax.jit(step, static_argnums=0).lower(mesh, *given).compile().as_text()
    # It reads both projections and the activation's cotangent; it writes two cotangents and weighted activations.
    assert passes(program) == [{INNER: 6}]
    assert written(program, OUTER) == 2
