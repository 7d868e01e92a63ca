"""Weights from a trainer to a serving process: other mesh, other shardings, cast to fp8 on the way, while the server
goes on.

The trainer holds its parameters in rows over all of its devices (FSDP); the server wants them split over heads and
experts. The plan names the sender and the receiver of each slice. The server counts arrivals, and takes a new
generation between two of its steps; a reader that still uses the old one keeps it. One trainer is killed in the middle
of a push: the server throws that generation away, and a new trainer goes on.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python examples/push_weights.py
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt

WIRE = jnp.float8_e4m3fn
SHAPES = {"attention": (64, 128), "experts": (8, 64, 32), "router": (64, 8), "norm": (64,)}


def mesh(name):
    return jax.make_mesh((jax.device_count(),), (name,), axis_types=(jax.sharding.AxisType.Auto,))


def parameters(step):
    """Every element depends on the step, so that a mixture of two steps would show."""
    rng = np.random.default_rng(step)
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    rows = jax.NamedSharding(mesh("fsdp"), jax.P("fsdp"))
    return jax.device_put(values, {"attention": rows, "experts": rows, "router": rows, "norm": rows})


def served():
    """The server's arrays: attention by columns, experts by expert, the rest everywhere."""
    specs = {"attention": jax.P(None, "tp"), "experts": jax.P("tp"), "router": jax.P(), "norm": jax.P()}
    serving = mesh("tp")
    return {
        name: jax.ShapeDtypeStruct(shape, WIRE, sharding=jax.NamedSharding(serving, specs[name]))
        for name, shape in SHAPES.items()
    }


def trainer(name, descriptor, first, steps, dies):
    with xt.Engine(name=name) as engine:
        server = engine.connect(descriptor)
        plan = xt.plan(parameters(first), server["weights"].layout, cast={"*": WIRE})
        for step in range(first, first + steps):
            if dies:  # Half of a push, and then no more.
                target = server["weights"]["attention"]
                engine.write(parameters(step)["attention"].astype(WIRE), target).wait(30)
                engine.send(server, b"half", tag="dying").wait(60)
                engine.recv(server, tag="next", timeout=60)  # Killed while it waits.
            xt.push(parameters(step), plan, [server]).wait(60)
            engine.recv(server, tag="next", timeout=60)


def start(*arguments):
    return subprocess.Popen([sys.executable, __file__, *map(str, arguments)])


def main(steps=4):
    expected = {step: {k: np.asarray(v).astype(WIRE) for k, v in parameters(step).items()} for step in range(steps)}
    generations, lost, workers = [], [], []
    try:
        with xt.Engine(name="serve-0") as engine:
            window = engine.window(served(), name="weights")
            workers = [start("trainer-0", engine.descriptor.hex(), 0, 1, 1)]
            first = engine.peer("trainer-0", timeout=60)
            engine.recv(first, tag="dying", timeout=60)
            workers[0].kill()
            try:
                window.commit(timeout=10)
            except xt.PeerLost as error:
                lost.append(error.peer)
                window.reset()
            workers.append(start("trainer-1", engine.descriptor.hex(), 0, steps, 0))
            for _ in range(steps):
                with window.counter(expect=len(SHAPES)) as counter:
                    counter.wait(timeout=60)
                generations.append(window.commit())
                engine.send(engine.peer("trainer-1"), b"", tag="next").wait(60)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    # The check comes only now: every generation still has the values that it had when it was committed.
    whole = [
        all(np.array_equal(np.asarray(got[name]), expected[step][name]) for name in SHAPES)
        for step, got in enumerate(generations)
    ]
    print(f"lost: {lost}; generations that are whole: {whole}")
    for name, array in generations[-1].items():
        print(f"  {name:<10} {array.dtype}{list(array.shape)} {array.sharding.spec}")
    return {
        "lost": lost,
        "whole": whole,
        "specs": {name: array.sharding.spec for name, array in generations[-1].items()},
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        name, descriptor, first, steps, dies = sys.argv[1:]
        trainer(name, bytes.fromhex(descriptor), int(first), int(steps), dies == "1")
    else:
        main()
