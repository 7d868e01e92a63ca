"""Programs that processes of several nodes run in addition to the conformance table (rank_program.py): counted bytes,
random operations, a failure and the reset after it. Each program returns a list of differences.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

import xen_moe_jax as xm
from tests.gpu import async_programs, members, programs, random_calls, virtual_nodes
from tests.gpu.bodies import Setup
from tests.support.cases import Case
from xen_moe_jax import cuda

COUNTED = programs.Sizes(tokens=1024, hidden=7168, experts=64, top_k=8)
COUNTED_CHUNK = 32
ROW_BYTES = 2 * COUNTED.hidden
RANDOM_CHUNK = 32
MOST = 1.01
"""All bytes that cross, divided by the bytes of the rows that must cross, may be at most this."""


def operands(mesh: Mesh, sizes: programs.Sizes, dtype: Any = np.float32, seed: int = 0) -> tuple[jax.Array, ...]:
    """Returns the arrays of `programs.operands` distributed over several processes, and the routing of all ranks."""
    rng = np.random.default_rng(seed)
    rows = mesh.size * sizes.tokens
    idx = np.argsort(rng.random((rows, sizes.experts)), axis=1)[:, : sizes.top_k].astype(np.int32)
    x = rng.integers(-8, 8, (rows, sizes.hidden)).astype(np.float32).astype(jax.numpy.dtype(dtype))
    weights = np.full((rows, sizes.top_k), 1 / sizes.top_k, np.float32)
    sharding = NamedSharding(mesh, programs.EP)
    placed = [jax.make_array_from_callback(v.shape, sharding, lambda i, v=v: v[i]) for v in (x, idx, weights)]
    return *placed, idx.reshape(mesh.size, sizes.tokens, sizes.top_k)


def own(array: jax.Array) -> np.ndarray:
    """The shard of this process."""
    (shard,) = array.addressable_shards
    return np.asarray(shard.data)


def count_bytes(mesh: Mesh, config: xm.KernelConfig, network: str, process: int) -> tuple[dict[str, Any], list[str]]:
    """A dispatch and a combine of real sizes: returns the bytes that left this rank for every other rank."""
    *args, routing = operands(mesh, COUNTED, "bfloat16")
    order = [device.process_index for device in mesh.devices.flat]
    rank, per_node = order.index(process), ranks_per_node(config, mesh)
    config = dataclasses.replace(config, chunk_tokens=COUNTED_CHUNK, channel=5)

    def run(body, *operands):
        program = programs.over(mesh, body, len(operands))
        jax.block_until_ready(program(*operands))  # grows memory, and has all ranks compiled
        time.sleep(1.0)
        before = np.array([virtual_nodes.sent(network, process, p) for p in order])
        out = jax.block_until_ready(program(*operands))
        time.sleep(1.0)  # bytes that have arrived have left; the last puts of this rank may be counted a moment later
        return out, np.array([virtual_nodes.sent(network, process, p) for p in order]) - before

    def send(x, idx, weights):
        return programs.dispatch(x, idx, weights, config, COUNTED)

    def back(x, idx, weights):
        routed = send(x, idx, weights)
        return xm.combine(routed.x, routed.handle, config=config)

    shape = {"per_node": per_node, "experts": COUNTED.experts, "row_bytes": ROW_BYTES, "chunk_tokens": COUNTED_CHUNK}
    _, sent = run(lambda *a: send(*a).x, *args)
    out, both = run(back, *args)
    wrong = [] if np.array_equal(own(out), own(args[0])) else ["counted: rows came back changed"]
    seen = {}
    for name, found, combine in (("dispatch", sent, False), ("combine", both - sent, True)):
        must, rows = virtual_nodes.must_send(routing, rank, combine=combine, **shape)
        seen[name] = {"bytes": int(found.sum()), "rows": rows, "ratio": round(float(found.sum()) / rows, 5)}
        if not np.array_equal(found, must):
            wrong.append(f"counted, {name}: {found.tolist()} bytes left rank {rank}, not {must.tolist()}")
        if found.sum() > MOST * rows:
            wrong.append(f"counted, {name}: {seen[name]}")
    return seen, wrong


def ranks_per_node(config: xm.KernelConfig, mesh: Mesh) -> int:
    """Returns the config's value, or that of the memory which operations on this mesh use."""
    if config.ranks_per_node is not None:
        return config.ranks_per_node
    return min(w["ranks_per_node"] for w in cuda.workspaces() if w["ranks"] == mesh.size)


def random_operations(
    mesh: Mesh, config: xm.KernelConfig, against: xm.KernelConfig, calls: int, seconds: float
) -> tuple[dict[str, Any], list[str]]:
    """Runs at most `calls` random operations, or as many as fit into `seconds` where that is given.

    A chunk is two puts of some pieces on the network of the tests, and each piece two copies: large chunks, so that the
    operations of an hour are not those of its copies.
    """
    steps = random_calls.without_exchange()
    config = dataclasses.replace(config, channel=6, chunk_tokens=RANDOM_CHUNK)
    result = random_calls.run(mesh, config, calls=calls, seconds=seconds, length=100, steps=steps, reference=against)
    few = result.operations < calls and result.seconds < seconds
    return dataclasses.asdict(result), [f"random: {result}"] if result.wrong or few else []


def by_start_and_done(mesh: Mesh, config: xm.KernelConfig) -> list[str]:
    """Runs programs by start and done three times against synchronous ones, bit for bit; also fails if nothing was
    pending."""
    config = dataclasses.replace(config, channel=7)
    bodies = {**async_programs.BODIES, "gradients": async_programs.gradients("grouped", "names")}
    args = async_programs.arguments(mesh)
    failed = []
    for name, body in bodies.items():
        whole, split = (
            programs.over(mesh, lambda *a, body=body, way=way: body(way, config, *a), len(args))
            for way in (async_programs.WHOLE, async_programs.SPLIT)
        )
        wanted = [own(v) for v in jax.tree.leaves(whole(*args))]
        before = _async_launches()
        wrong = 0
        for _ in range(3):
            got = [own(v) for v in jax.tree.leaves(split(*args))]
            wrong += sum(not np.array_equal(g, w) for g, w in zip(got, wanted, strict=True))
        print(f"by start and done, {name}: {f'{wrong} different' if wrong else 'same'}", flush=True)
        failed += [f"by start and done, {name}: {wrong} different"] if wrong else []
        failed += [f"by start and done, {name}: nothing was pending"] if _async_launches() == before else []
    return failed


def _async_launches() -> int:
    return sum(w["launches"] for w in cuda.workspaces() if w["flights"])


def every_subset(mesh: Mesh, config: xm.KernelConfig, against: xm.KernelConfig, cases: list[Case]) -> list[str]:
    """Runs every subset of active ranks, in two orders and from one trace; returns the cases that differ."""
    failed = []
    for case in cases:
        began = time.monotonic()
        setup = Setup(case, mesh, mesh.axis_names, 20, 256)
        comparison = members.Comparison(setup, dataclasses.replace(config, channel=4), against)
        sets = members.subsets(mesh.size)
        for active in sets + sets[::-1]:
            if wrong := comparison.wrong(active):
                failed.append(f"{case.name}, active={active.astype(int).tolist()}: {wrong}")
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{case.name}, every subset of {mesh.size}: {'different' if failed else 'same'}, {took}", flush=True)
        if comparison.traces != 1:
            failed.append(f"{case.name}: traced {comparison.traces} times")
    return failed


def fail_and_reset(mesh: Mesh, config: xm.KernelConfig) -> list[str]:
    """The last rank leaves an operation out: all others name it, and after a reset everything runs as before."""
    patient = dataclasses.replace(config, timeout_s=60.0, channel=7)
    hasty = dataclasses.replace(patient, timeout_s=3.0)
    absent = mesh.size - 1
    *args, _ = operands(mesh, programs.SIZES)

    def body(x, idx, weights):
        routed = programs.dispatch(x, idx, weights, patient)

        def operation():
            return xm.combine(routed.x, routed.handle, config=hasty)

        return programs.skipped_on(absent, operation, programs.zeros_like_results(operation))

    wrong = []
    whole, broken = programs.over(mesh, programs.round_trip(patient)), programs.over(mesh, body)
    before = own(whole(*args))
    for turn in range(2):
        began = time.monotonic()
        poisoned = np.isnan(own(jax.block_until_ready(broken(*args)))).all()
        away = [d.process_index for d in mesh.devices.flat].index(jax.process_index()) == absent
        said = ""
        try:
            xm.check()
        except xm.OperationFailed as error:
            said = str(error)
        if not away and (not poisoned or f"failed: rank {absent} (" not in said):
            wrong.append(f"failure {turn}: poisoned {poisoned}, {said!r}")
        if time.monotonic() - began > 60:
            wrong.append(f"failure {turn}: it took {time.monotonic() - began:.0f} s")
        cuda.reset()
        xm.check()
        for _ in range(3):
            if not np.array_equal(own(whole(*args)), before):
                wrong.append(f"after reset {turn}: other results")
    return wrong


def time_round_trips(mesh: Mesh, config: xm.KernelConfig) -> dict[str, float]:
    """Microseconds of a dispatch and a combine, by tokens of a rank: in a jitted loop of 50, the fastest of five."""
    out = {}
    for tokens in (4096, 128):
        sizes = programs.Sizes(tokens=tokens, hidden=7168, experts=64, top_k=8)
        *args, _ = operands(mesh, sizes, "bfloat16")
        body = programs.round_trip(dataclasses.replace(config, channel=8), sizes)

        def loop(x, idx, weights, body=body):
            return jax.lax.fori_loop(0, 50, lambda _, x: body(x, idx, weights), x)

        program = programs.over(mesh, loop)
        jax.block_until_ready(program(*args))
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(program(*args))
            times.append((time.perf_counter() - began) / 50 * 1e6)
        out[str(tokens)] = round(min(times), 1)
    return out
