"""Which ways to call an NNX layer copy its weights on an H100: programs that XLA's GPU compiler makes without a GPU.

It needs the plugin of `jax[cuda13]`, as `tests/backends/cuda/test_aot.py`, and CI runs it over the wheel, too.
"""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

import xen_moe_jax as xm
from tests.support import gpu_topology
from xen_moe_jax.flax import MoEConfig
from xen_moe_jax.flax.nnx import MoE

pytestmark = pytest.mark.gpu_aot

EXPERTS, HIDDEN, WIDTH, TOKENS = 64, 4096, 1536, 128
CONFIG = MoEConfig(
    hidden_size=HIDDEN,
    intermediate_size=WIDTH,
    num_experts=EXPERTS,
    top_k=8,
    dtype=jnp.bfloat16,
    param_dtype=jnp.bfloat16,
    grouped_matmul="ragged_dot",
    kernel=xm.KernelConfig(backend="reference"),
)


def forward(moe, x):
    return moe(x)[0]


def without_state(moe, x):
    graph, state = nnx.split(moe)
    return jax.jit(lambda state, x: forward(nnx.merge(graph, state), x)).lower(state, x)


WAYS = {  # -> its program, and how many of the three matrices of experts it copies
    "nnx.jit": (lambda moe, x: nnx.jit(forward).lower(moe, x), 3),
    "graph_updates=False": (lambda moe, x: nnx.jit(forward, graph_updates=False).lower(moe, x), 0),
    "nnx.split and jax.jit": (without_state, 0),
}


@pytest.mark.parametrize("way", WAYS)
def test_copies_of_expert_weights(way):
    """Flax's default copies 2.4 GB at every call of this layer; the ways of docs/user/flax.md copy none."""
    placed = gpu_topology.one_or_skip()
    x = jax.ShapeDtypeStruct((TOKENS, HIDDEN), jnp.bfloat16, sharding=placed)
    graph, state = nnx.split(nnx.eval_shape(lambda: MoE(CONFIG, rngs=nnx.Rngs(0))))
    state = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placed), state)
    lowered, matrices = WAYS[way]
    with jax.set_mesh(placed.mesh):
        program = lowered(nnx.merge(graph, state), x).compile()
    copies = re.findall(rf"= bf16\[{EXPERTS},\d+,\d+\]\S* copy(?:-start)?\(", program.as_text())
    assert len(copies) == matrices
    weights = 2 * 3 * EXPERTS * HIDDEN * WIDTH
    returned = program.memory_analysis().output_size_in_bytes
    assert returned >= weights if matrices else returned == 2 * TOKENS * HIDDEN
