"""The functions that the other process of a test runs. Each takes the process's state first; `serve` calls them."""

import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt


class State:
    def __init__(self, engine):
        self.engine = engine
        self.peer = None
        self.kept = {}


def serve(connection, name, options):
    if "device" in options:  # Its number among this host's; without it, JAX's default.
        jax.config.update("jax_default_device", jax.local_devices()[options.pop("device")])
    if "adversary" in options:
        from tests.transfer.adversary import AdversaryWire

        options["wire"] = AdversaryWire(options.pop("adversary"))
    with xt.Engine(name=name, **options) as engine:
        state = State(engine)
        connection.send((True, engine.descriptor))
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                return
            if function == "exit":
                return
            try:
                connection.send((True, globals()[function](state, *arguments)))
            except Exception as error:
                connection.send((False, error))


def connect(state, descriptor, timeout=10.0):
    state.peer = state.engine.connect(descriptor, timeout=timeout)
    return state.peer.name


def content(seed, shape, dtype):
    """Random elements from a seed, the same in every process; every bit pattern of a dtype may occur, except NaN's."""
    bits = np.random.default_rng(seed).integers(0, 256, size=(*shape, np.dtype(dtype).itemsize), dtype=np.uint8)
    if dtype == np.bool_:
        return (bits[..., 0] & 1).astype(bool)
    return bits.view(dtype).reshape(shape)


def target(state, name, path=(), index=None):
    found = state.peer[name]
    for key in path:
        found = found[key]
    return found if index is None else found[index]


def write(
    state, name, seed, shape, dtype, imm=None, pages=None, path=(), index=None, spec=None, numpy=False, last=False
):
    array = content(seed, shape, dtype)
    if not numpy:
        array = jnp.asarray(array) if spec is None else jax.device_put(array, sharding(spec))
    transfer = state.engine.write(array, target(state, name, path, index), pages=pages, imm=imm, last=last)
    transfer.wait(20)
    return transfer.bytes_done


def write_last_and_die(state, name, kind, seed):
    """Writes a whole request, the last write of it as such, and is killed as soon as that has ended."""
    tree = state.peer[name]
    array = tree["k"]
    source = jnp.asarray(content(seed, array.shape, array.dtype))
    rows = np.arange(array.shape[0])
    half = len(rows) // 2
    if kind == "again":  # The second of two equal writes takes the short path.
        state.engine.write(source, array, imm="last").wait(20)
    if kind == "pages":
        transfer = state.engine.write(source[rows[::-1]], array, pages=(rows, rows[::-1]), imm="last", last=True)
    elif kind == "tree":
        transfer = state.engine.write({"k": source}, tree, imm="last", last=True)
    elif kind == "scatter":
        pieces = [(slice(0, half), array[:half]), (slice(half, None), array[half:])]
        transfer = state.engine.scatter(source, pieces, imm="last", last=True)
    else:
        transfer = state.engine.write(source, array, imm=None if kind == "nothing to count" else "last", last=True)
    transfer.wait(20)
    os.kill(os.getpid(), signal.SIGKILL)


def slow_then_last(state, name):
    array = state.peer[name]
    slow = state.engine.write(slow_source(), array[0], imm="w")
    ones = state.engine.write(jnp.ones(array.shape[1:], jnp.float32), array[1], imm="w", last=True)
    ones.wait(20)
    slow.wait(40)
    return True


def write_tree(state, name, seeds, imm):
    """{path: (seed, shape, dtype)}, nested dictionaries."""
    tree = jax.tree.map(lambda leaf: content(*leaf), seeds, is_leaf=lambda leaf: isinstance(leaf, tuple))
    state.engine.write(tree, state.peer[name], imm=imm).wait(20)


def mesh():
    return jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def sharding(spec):
    return jax.NamedSharding(mesh(), jax.P(*spec))


def many(state, name, count, imm, seed):
    """Writes rows in random order, all pending at once."""
    rows = target(state, name)
    order = np.random.default_rng(seed).permutation(count)
    transfers = [state.engine.write(content(int(i), rows.shape[1:], rows.dtype), rows[int(i)], imm=imm) for i in order]
    for transfer in transfers:
        transfer.wait(20)
    return sum(transfer.bytes_done for transfer in transfers)


def keep_target(state, name):
    """Takes the window's present generation, and its grant, for later."""
    state.kept[name] = state.peer[name]
    state.engine.write(np.zeros(state.kept[name].shape, state.kept[name].dtype), state.kept[name]).wait(20)
    return state.kept[name].generation


def write_kept(state, name, seed, imm=None):
    there = state.kept[name]
    state.engine.write(content(seed, there.shape, there.dtype), there, imm=imm).wait(20)


def flood(state, name, seconds):
    """Writes the whole window again and again, until the window is stale or the time is over; (writes, the error's
    name).
    """
    there = state.peer[name]
    values = [np.full(there.shape, i % 251, there.dtype) for i in range(4)]
    until, count = time.monotonic() + seconds, 0
    try:
        while time.monotonic() < until:
            transfers = [state.engine.write(values[i % 4], there, imm="flood") for i in range(8)]
            for transfer in transfers:
                transfer.wait(20)
                count += 1
    except xt.TransferError as error:
        return count, type(error).__name__
    return count, ""


def slow_source():
    """An array that takes a while to compute, and the function that lets it be computed."""

    def spin(x):
        return jax.lax.fori_loop(0, 12, lambda i, x: jnp.sin(x @ x), x)

    return jax.jit(spin)(jnp.ones((900, 900), jnp.float32))


def write_slow(state, name, imm):
    array = slow_source()
    ready = array.is_ready()
    transfer = state.engine.write(array, state.peer[name], imm=imm)
    begun = transfer.nbytes
    del array
    transfer.wait(40)
    return ready, begun, transfer.bytes_done


def cancel_slow(state, name, imm):
    transfer = state.engine.write(slow_source(), state.peer[name], imm=imm)
    cancelled = transfer.cancel(20)
    try:
        transfer.wait(1)
    except xt.TransferCancelled:
        return cancelled
    raise AssertionError("a cancelled transfer ended well")


def write_and_delete(state, name, imm, again):
    """Deletes a source of many slices when its write has begun; JAX gives memory of this size back to the system."""
    array = state.peer[name]
    if again:  # Then the write takes the short path.
        state.engine.write(jnp.zeros(array.shape, array.dtype), array).wait(20)
    source = jnp.ones(array.shape, array.dtype).block_until_ready()
    transfer = state.engine.write(source, array, imm=imm)
    assert not transfer.done()
    source.delete()
    transfer.wait(20)


def write_deleted(state, name, imm):
    array = slow_source()
    transfer = state.engine.write(array, state.peer[name], imm=imm)
    array.delete()
    transfer.wait(40)


def cancel_done(state, name):
    there = state.peer[name]
    transfer = state.engine.write(np.zeros(there.shape, there.dtype), there)
    transfer.wait(20)
    return transfer.cancel()


def read(state, name, path=(), spec=None):
    got = state.engine.read(target(state, name, path), sharding=None if spec is None else sharding(spec))
    return jax.tree.map(np.asarray, got)


def publish(state, name, seed, shape, dtype, spec=None):
    array = content(seed, shape, dtype)
    state.kept[name] = jax.device_put(array, None if spec is None else sharding(spec))
    state.engine.publish(name, state.kept[name])


def send(state, value, tag):
    value = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, value)
    transfer = state.engine.send(state.peer, value, tag=tag)
    transfer.wait(20)
    return transfer.bytes_done


def receive(state, tag, timeout):
    return jax.tree.map(np.asarray, state.engine.recv(tag=tag, timeout=timeout))


def barrier(state, names, timeout):
    state.engine.barrier([state.engine.peer(name, timeout) for name in names], timeout)
    return time.monotonic()


def window(state, name, shape, dtype, writers=None):
    state.kept[name] = state.engine.window(jax.ShapeDtypeStruct(shape, dtype), name=name, writers=writers)


def count(state, imm, expect, timeout):
    state.engine.counter(imm, expect=expect).wait(timeout)


def commit(state, name):
    return np.asarray(state.kept[name].commit(10))


def close_engine(state):
    state.engine.close()


def leave(state):
    """Ends without closing anything, as a crash does."""
    os._exit(1)


def weights(seed, scale=1):
    """A small model's parameters, the same in every process."""
    rng = np.random.default_rng(seed)
    return {
        "embed": (scale * rng.standard_normal((64, 32))).astype(np.float32),
        "layers": [
            {
                "up": (scale * rng.standard_normal((32, 64))).astype(np.float32),
                "experts": (scale * rng.standard_normal((8, 32, 16))).astype(np.float32),
            }
            for _ in range(2)
        ],
        "norm": (scale * rng.standard_normal((32,))).astype(np.float32),
    }


FSDP = {
    "embed": ("a",),
    "layers": [{"up": (("a", "b"),), "experts": (None, "a")}] * 2,
    "norm": (("a", "b"),),
}
"""Rows over everything: how the trainer holds `weights`."""

SERVING = {"embed": (), "layers": [{"up": (None, "b"), "experts": (("a", "b"),)}] * 2, "norm": ()}
"""Tensor and expert parallel: how the serving side holds them."""


def place(tree, specs):
    return jax.tree.map(lambda x, spec: jax.device_put(x, sharding(spec)), tree, specs_like(tree, specs))


def specs_like(tree, specs):
    """The specs as a tree of leaves: a spec is a tuple, which JAX would take for a container."""
    structure = jax.tree.structure(tree)
    return jax.tree.unflatten(structure, [Spec(spec) for spec in structure.flatten_up_to(specs)])


class Spec(tuple):
    """A partition spec that is a leaf."""


def serving_avals(cast):
    tree = weights(0)
    dtypes = jax.tree.map(lambda x: jnp.dtype(cast or x.dtype), tree)
    return jax.tree.map(
        lambda x, dtype, spec: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding(spec)),
        tree,
        dtypes,
        specs_like(tree, SERVING),
    )


def push_weights(state, name, seed, cast=None):
    params = place(weights(seed), FSDP)
    plan = xt.plan(params, state.peer[name].layout, cast=cast)
    xt.push(params, plan, [state.peer]).wait(30)
    return dict(plan.arrivals), plan.nbytes


def window_of_weights(state, name):
    state.kept[name] = state.engine.window(serving_avals("bfloat16"), name=name)


def commit_weights(state, name, expect):
    state.kept[name].counter(expect).wait(10)
    return jax.tree.map(np.asarray, state.kept[name].commit(10))


def row(generation, index, width):
    return content(generation * 1000 + index, (width,), np.uint8)


def adversarial_writer(state, descriptor, seed, limit):
    """Fills every generation that it sees with `row`s, despite errors, until it gets the order to stop; (writes,
    failures, losses).
    """
    from tests.transfer.adversary import disturb

    writes = failures = losses = seen = 0
    peer = None
    until = time.monotonic() + limit
    while time.monotonic() < until:
        try:
            if peer is None or peer.lost:
                peer = state.engine.connect(descriptor, timeout=5)
                flush = disturb(peer, seed + losses)
            try:
                state.engine.recv(peer, tag="stop", timeout=0)
                return writes, failures, losses
            except TimeoutError:
                pass
            rows = peer["rows"]
            if rows.generation <= seen:
                time.sleep(0.0005)
                continue
            pending = dict.fromkeys(np.random.default_rng(seed + rows.generation).permutation(rows.shape[0]).tolist())
            while pending:
                for index in pending:
                    source = row(rows.generation, index, rows.shape[1])
                    pending[index] = state.engine.write(source, rows[index], imm=f"rows{rows.generation}")
                for index, transfer in list(pending.items()):
                    try:
                        transfer.wait(20)
                        del pending[index]
                        writes += 1
                    except xt.TransferError as error:
                        if type(error) is not xt.TransferError:
                            raise
                        failures += 1
            seen = rows.generation
            with state.engine._core.lock:
                flush()
        except (xt.PeerLost, xt.StaleWindow, xt.TransferRefused):
            losses += 1
            time.sleep(0.005)
    raise AssertionError(f"no stop came within {limit} s: {writes} writes, {failures} failures, {losses} losses")


LEAVES, LEAF = 4, 1 << 20


def leaf(generation, index):
    """Every byte names its generation and leaf: a mixture would show."""
    return np.full(LEAF, (generation * LEAVES + index) % 251, np.uint8)


def leaves_window(engine):
    return engine.window({str(i): jax.ShapeDtypeStruct((LEAF,), np.uint8) for i in range(LEAVES)}, name="model")


def is_whole(tree, generation):
    return all((np.asarray(tree[str(i)]) == leaf(generation, i)[0]).all() for i in range(LEAVES))


def fill_generation(engine, peer, seen, last=False):
    """Fills the open generation, if it is a new one; returns its number. With `last` the permission is given back."""
    target = peer["model"]
    if target.generation == seen:
        time.sleep(0.0002)
        return seen
    number = f"model{target.generation}"
    transfers = [
        engine.write(leaf(target.generation, i), target[str(i)], imm=number, last=last and i == LEAVES - 1)
        for i in range(LEAVES)
    ]
    for transfer in transfers:
        transfer.wait(20)
    return target.generation


def fill_generations(state, descriptor, last=False):
    peer, seen = state.engine.connect(descriptor), 0
    while True:
        seen = fill_generation(state.engine, peer, seen, last)


def take_generations(state):
    """Commits generation after generation; leaves with status 3 where one is torn."""
    window = state.kept["model"]
    previous = None
    while True:
        generation = window.generation
        with state.engine.counter(f"model{generation}", expect=LEAVES) as counter:
            counter.wait(60)
        got = window.commit(20)
        if not is_whole(got, generation) or (previous is not None and not is_whole(previous, generation - 1)):
            os._exit(3)
        previous = got


def open_leaves_window(state):
    state.kept["model"] = leaves_window(state.engine)
