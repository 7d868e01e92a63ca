"""Saves compiled or exported programs to a folder, or loads them in a process that has traced nothing of the library.

saved_program.py save  FOLDER --kind executable|export --sizes small,large
saved_program.py load  FOLDER --kind executable|export --sizes large,small [--lower small]
saved_program.py cache FOLDER --sizes small,large      (compiles, with JAX's persistent compilation cache in FOLDER)

With --num-processes, one process per GPU; else one process uses all GPUs. `save` writes inputs and their results in
plain JAX beside each program; `load` runs each program twice and compares bit for bit. Prints PASSED.
"""

from __future__ import annotations

import argparse
import pathlib
import pickle
import sys

import jax
import numpy as np
from jax import export
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm

SIZES = {"small": (32, 256), "large": (1024, 2048)}
"""Tokens of a rank, and the hidden size."""
EXPERTS, TOP_K = 16, 4
TARGETS = ("xen_moe_dispatch", "xen_moe_combine")


def layer(mesh, config):
    """A jitted function of the operands of `operands`: dispatch, a product that tells rows apart, combine."""

    def on_rank(x, topk_idx, topk_weights):
        routed = xm.dispatch(x, topk_idx, topk_weights, num_experts=EXPERTS, axis_name="ep", config=config)
        return xm.combine(routed.x * 2, routed.handle, weighted=True, config=config)

    return jax.jit(jax.shard_map(on_rank, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))


def operands(mesh, size):
    """Arrays over the mesh, the same in every process."""
    tokens, hidden = SIZES[size]
    rows = tokens * mesh.size
    random = np.random.default_rng(7)
    host = (
        random.standard_normal((rows, hidden)).astype(np.float32),
        random.integers(0, EXPERTS, (rows, TOP_K)).astype(np.int32),
        random.random((rows, TOP_K)).astype(np.float32),
    )
    sharding = NamedSharding(mesh, P("ep"))
    return [jax.make_array_from_callback(a.shape, sharding, lambda i, a=a: a[i]) for a in host]


def local(array):
    """The rows of an array that are in this process."""
    shards = sorted(array.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def save(mesh, path, kind, size):
    given = operands(mesh, size)
    function = layer(mesh, xm.KernelConfig(timeout_s=20.0))
    if kind == "executable":
        path.with_suffix(".bin").write_bytes(
            pickle.dumps(serialize_executable.serialize(function.lower(*given).compile()))
        )
    else:
        checks = [export.DisabledSafetyCheck.custom_call(name) for name in TARGETS]
        exported = export.export(function, platforms=("cuda",), disabled_checks=checks)(*given)
        path.with_suffix(".bin").write_bytes(exported.serialize())
    reference = layer(mesh, xm.KernelConfig(backend="reference"))
    np.save(path.with_suffix(".npy"), local(reference(*given)))


def load(mesh, path, kind):
    saved = path.with_suffix(".bin").read_bytes()
    if kind == "executable":
        return serialize_executable.deserialize_and_load(*pickle.loads(saved))
    return jax.jit(export.deserialize(bytearray(saved)).call, out_shardings=NamedSharding(mesh, P("ep")))


def right(mesh, function, size, path):
    wanted = np.load(path.with_suffix(".npy"))
    given = operands(mesh, size)
    return all(np.array_equal(local(function(*given)), wanted) for _ in range(2))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("save", "load", "cache"))
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--kind", choices=("executable", "export"), default="executable")
    parser.add_argument("--sizes", default="small,large")
    parser.add_argument("--lower", help="a size that this process lowers and runs itself before it loads anything")
    parser.add_argument("--reverse", action="store_true", help="ranks in the opposite order of devices")
    parser.add_argument("--num-processes", type=int, default=1)
    parser.add_argument("--process-id", type=int, default=0)
    parser.add_argument("--coordinator")
    options = parser.parse_args()
    if options.num_processes > 1:
        process = options.process_id
        jax.distributed.initialize(options.coordinator, options.num_processes, process, local_device_ids=[process])
    devices = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
    mesh = Mesh(np.array(devices[::-1] if options.reverse else devices), ("ep",))
    sizes = options.sizes.split(",")
    config = xm.KernelConfig(timeout_s=20.0)
    # An executable is of one process; an exported program is the same in all.
    paths = {size: options.folder / f"{options.kind}-{size}-{options.process_id}" for size in SIZES}
    wrong = []
    if options.action == "save":
        for size in sizes:
            save(mesh, paths[size], options.kind, size)
    elif options.action == "cache":
        jax.config.update("jax_compilation_cache_dir", str(options.folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        for size in sizes:
            given = operands(mesh, size)
            got, wanted = layer(mesh, config)(*given), layer(mesh, xm.KernelConfig(backend="reference"))(*given)
            wrong += [size] if not np.array_equal(local(got), local(wanted)) else []
    else:
        if options.lower:
            jax.block_until_ready(layer(mesh, config)(*operands(mesh, options.lower)))
        functions = {size: load(mesh, paths[size], options.kind) for size in sizes[:1]}
        wrong += [size for size, function in functions.items() if not right(mesh, function, size, paths[size])]
        functions |= {size: load(mesh, paths[size], options.kind) for size in sizes[1:]}  # once the first has run
        wrong += [size for size, function in functions.items() if not right(mesh, function, size, paths[size])]
    xm.check()
    for workspace in xm.cuda.workspaces():
        print({name: workspace[name] for name in ("memory", "staging_bytes", "generation", "launches", "captured")})
    print("WRONG " + ", ".join(wrong) if wrong else "PASSED", flush=True)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
