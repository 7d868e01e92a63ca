"""One process of test_active.py: serves checked steps until one fails, then goes on without the rank that died.

Prints `ready`, and at the end one line of JSON.
"""

from __future__ import annotations

import json
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.gpu import gpu_flags
from tests.support import rank_flags

FLAGS = gpu_flags.FLAGS

flags.adopt_module_key_flags(gpu_flags)

flags.DEFINE_bool("replicas", False, "every expert has a replica on the rank before its home")


def main(_: list[str]) -> None:
    rank_flags.start_logging()
    gpu_flags.enter_nodes()
    jax.config.update("jax_enable_recoverability", True)  # else jax.distributed ends the others after a death
    gpu_flags.join([gpu_flags.own_gpu()])

    import xen_moe_jax as xm
    from tests.gpu import programs
    from xen_moe_jax import cuda

    devices = sorted(jax.devices(), key=lambda d: d.process_index)
    mesh = jax.sharding.Mesh(np.array(devices), ("ep",))
    config, sizes = xm.KernelConfig(backend="cuda"), programs.SIZES  # the default timeout: ten minutes
    traces = 0

    local = sizes.experts // mesh.size
    home = np.arange(sizes.experts).reshape(mesh.size, local)
    replicas = xm.balance.from_experts(np.concatenate([home, np.roll(home, -1, axis=0)], axis=1), sizes.experts)

    def body(x, idx, weights, active, placement):
        """Identity experts: a token comes back times the number of its slots whose expert's rank takes part, / 4; with
        replicas it comes back as it left."""
        nonlocal traces
        traces += 1
        options = {"num_experts": sizes.experts, "axis_name": "ep", "active": active, "placement": placement}
        routed = xm.dispatch(x, idx, weights, **options, config=config)
        rows = jnp.arange(routed.x.shape[0])[:, None] < routed.group_sizes.sum()
        out = xm.combine(jnp.where(rows, routed.x, 0), routed.handle, config=config)
        served = active[idx // local] if placement is None else jnp.ones(idx.shape, bool)
        share = served.sum(axis=1) * active[jax.lax.axis_index("ep")] / 4
        wrong = jnp.sum((out != x * share[:, None]) & ~jnp.isnan(out))
        dropped = routed.num_dropped != sum(~served).sum()
        return jnp.sum(out).reshape(1), (wrong + dropped * ~jnp.isnan(out).any()).reshape(1)

    step = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(P("ep"),) * 3 + (P(), P()), out_specs=P("ep"), check_vma=False)
    )
    operands = programs.distributed_operands(mesh)
    result = {"failure": "", "wrong": 0, "steps_before": 0}

    def members(active):
        return jax.make_array_from_callback(active.shape, NamedSharding(mesh, P()), lambda i: active[i])

    def serve(active, placement):
        total, wrong = jax.block_until_ready(step(*operands, active, placement))
        xm.check()
        result["wrong"] += int(wrong.addressable_shards[0].data[0])
        return float(total.addressable_shards[0].data[0])

    def known():
        """The ranks that take part, and the experts' slots on them."""
        alive = cuda.alive(mesh, "ep")
        return members(alive), jax.tree.map(members, replicas.without(alive)) if FLAGS.replicas else None

    now = known()
    serve(*now)
    print("ready", flush=True)
    try:
        while True:
            serve(*now)
            result["steps_before"] += 1
    except (xm.OperationFailed, jax.errors.JaxRuntimeError) as error:
        result["failure"], result["named"] = str(error), time.time()
    cuda.reset()
    alive = cuda.alive(mesh, "ep")
    now = known()
    began = time.time()
    for _ in range(200):
        assert np.isfinite(serve(*now))
    print(
        json.dumps(
            result
            | {"alive": alive.tolist(), "traces": traces, "steps_after": 200, "seconds_after": time.time() - began}
        ),
        flush=True,
    )
    os._exit(0)  # jax.distributed would wait for the dead at exit


if __name__ == "__main__":
    app.run(main)
