"""Groups whose ranks exchange by kernels: a kill and a newcomer, and many kills. Ranks may share a GPU.

A program of its own for each case: its ranks need GPUs that this process has not filled.
"""

import os
import sys

import pytest

from tests.gpu import processes

RANK = """
import os, sys, time
import jax, jax.numpy as jnp
import xen_moe_jax as xm

def layer(x, idx, active):
    routed = xm.dispatch(x, idx, num_experts=6, axis_name="ep", alignment=alignment, active=active, config=config)
    return xm.combine(routed.x, routed.handle, config=config)

folder, slot, alignment = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
config = xm.KernelConfig(backend="cuda", timeout_s=20.0)
group = xm.elastic.Group(folder, 3, slot=slot)
operands = jnp.ones((16, 128)), jnp.zeros((16, 2), jnp.int32).at[:, 1].set(3)
jax.block_until_ready(jax.jit(layer)(*operands, group.active()))
xm.check()
if slot == 0:
    assert group.join().joined == (0,)
    open(f"{folder}/serves", "w").close()
    step = 0
    while (change := group.boundary(step := step + 1)) is None:
        time.sleep(0.001)
    assert change.joined == (2,)
else:
    while not os.path.exists(f"{folder}/serves"):
        time.sleep(0.01)
    try:
        group.join(timeout_s=30)
        print("let in")
    except ValueError as error:
        print(error)
group.close()
"""


def run(*commands: list[str], **changes: str) -> list[str]:
    env = processes.environment(
        JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.1", **changes
    )
    finished = processes.run_all([[sys.executable, *command] for command in commands], seconds=300.0, env=env)
    processes.assert_finished(finished)
    return [one.output for one in finished]


def chaos(*arguments: str) -> str:
    return run(["-m", "tests.elastic.serve_chaos", "--kernels", *arguments])[0]


@pytest.mark.gpu1
def test_ranks_of_one_gpu_are_killed_and_come_back():
    assert "'wrong': []" in chaos("--kills", "4")


@pytest.mark.gpu1
def test_a_newcomer_with_other_kernels_is_refused_alone(tmp_path):
    """Its memory has the same sizes as the member's: operations are compared, too."""
    commands = (["-c", RANK, str(tmp_path), *of] for of in (("0", "1"), ("1", "8"), ("2", "1")))
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    _, other, alike = run(*commands, CUDA_VISIBLE_DEVICES=gpu)
    assert "operation dispatch has alignment=8 here and 1 there" in other and "symmetric memory" not in other
    assert "let in" in alike


@pytest.mark.gpu2
def test_ranks_of_two_gpus_are_killed_and_come_back():
    assert "'wrong': []" in chaos("--gpus", "2", "--kills", "8", "--seed", "2")
