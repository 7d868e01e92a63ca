"""One process of several: it joins the job, runs fixed programs on the mesh of all devices, and saves its shards.

Started by `tests/backends/reference/test_multiprocess.py`, which runs the same programs in one process, compares bytes:
`python -m tests.support.multiprocess_worker --coordinator HOST:PORT --num_processes N --process_id I --output FILE.npz
--programs 0,1`, devices set by the environment.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags, logging
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support import rank_flags

FLAGS = rank_flags.FLAGS

flags.adopt_module_key_flags(rank_flags)
flags.DEFINE_string("output", None, "file for this process's shards", required=True)
flags.DEFINE_string("programs", None, "indices of PROGRAMS, with commas between", required=True)

T, H, K, E = 12, 192, 3, 19
PROGRAMS = (  # axis names and sizes, layout, wire
    (("ep",), (8,), "grouped", None),
    (("ep",), (8,), "ranked", None),
    (("ep",), (8,), "padded", "int8"),
    (("node", "gpu"), (2, 4), "grouped", "float8_e4m3fn"),
)


def operands(ranks: int) -> tuple[np.ndarray, ...]:
    """x, topk_idx, topk_weights of all ranks, the same in every process."""
    rng = np.random.default_rng(29)
    x = rng.standard_normal((ranks * T, H)).astype(jnp.bfloat16)
    idx = rng.integers(-1, E + 1, (ranks * T, K)).astype(np.int32)
    return x, idx, rng.random((ranks * T, K)).astype(np.float32)


def program(axis_name, layout, wire, x, idx, weights):
    """Rows, counts, positions, output and gradients of one layer with experts that scale their rows."""

    def layer(x, weights):
        routed = xm.dispatch(
            x, idx, weights, num_experts=E, axis_name=axis_name, layout=layout, wire=wire, capacity=capacity(layout)
        )
        out = xm.combine(routed.x * 3, routed.handle, wire=wire)
        return jnp.sum(jnp.sin(out.astype(jnp.float32))), (out, routed)

    grads, (out, routed) = jax.grad(layer, (0, 1), has_aux=True)(x, weights)
    rows = xm.redispatch(out, routed.handle)
    sizes = routed.num_tokens_per_expert[:1].repeat(jax.lax.axis_size(axis_name)) % 3
    ragged = xm.ragged_all_to_all(
        x, rows.reshape(-1, H)[: 3 * sizes.size], sizes * 0, *exchange_sizes(sizes, axis_name), axis_name=axis_name
    )
    return {
        "out": out,
        "dx": grads[0],
        "dweights": grads[1],
        "positions": routed.handle.positions,
        "num_dropped": routed.num_dropped[None],
        "num_tokens_per_expert": routed.num_tokens_per_expert,
        "rows": rows.reshape(-1, H),
        "ragged": ragged,
    }


def capacity(layout: str) -> int | None:
    return None if layout == "padded" else 40


def exchange_sizes(sizes, axis_name):
    """send_sizes, output_offsets, recv_sizes: source `s` writes at row `3 * s` of every rank."""
    received = xm.all_to_all(sizes, axis_name, 0, 0, tiled=True)
    offsets = jnp.full(sizes.shape, 3 * jax.lax.axis_index(axis_name), jnp.int32)
    return sizes, offsets, received


def results(devices, numbers: str) -> dict[str, jax.Array]:
    """Global arrays by name, over one axis of all devices or over (node, gpu), of the programs of these `numbers`."""
    found = {}
    for number in numbers.split(","):
        names, sizes, layout, wire = PROGRAMS[int(number)]
        mesh = jax.sharding.Mesh(np.array(devices).reshape(sizes), names)
        sharding = jax.sharding.NamedSharding(mesh, P(names))
        arrays = [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in operands(8)]

        def body(*a, names=names, layout=layout, wire=wire):
            return program(names, layout, wire, *a)

        out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(names), out_specs=P(names)))(*arrays)
        found |= {f"{'x'.join(names)}/{layout}/{wire}/{name}": value for name, value in out.items()}
    return found


def main(_: list[str]) -> None:
    rank_flags.start_logging()
    count = FLAGS.num_processes
    jax.distributed.initialize(FLAGS.coordinator, count, FLAGS.process_id, initialization_timeout=300)
    assert len(jax.devices()) == 8 and len(jax.local_devices()) == 8 // count
    shards = {}
    for name, value in results(jax.devices(), FLAGS.programs).items():
        logging.info("%s", name)
        for shard in value.addressable_shards:
            shards[f"{name}@{shard.device.id}"] = np.asarray(shard.data).view(np.uint8)
            shards[f"{name}#{shard.device.id}"] = np.array([shard.index[0].start or 0])
    np.savez(FLAGS.output, **shards)


if __name__ == "__main__":
    app.run(main)
