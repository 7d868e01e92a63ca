"""Moves weights from half of a host's GPUs to the other half by other means than `transfer_gpu_jobs.py weights`.

    python tools/transfer_gpu_others.py files --gib 8        files in /dev/shm: to the host, written, read, to the GPU
    python tools/transfer_gpu_others.py transfer --gib 8     jax.experimental.transfer
    python tools/transfer_gpu_others.py device_put --gib 8   jax.device_put between two processes of one JAX job

The arrays are those of that program. `--cpu` rehearses the first two on virtual devices. One JSON object is written to
standard output; the exit status is 1 if a comparison fails.
"""

import argparse
import functools
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from tools.children import bound  # noqa: E402

FOLDER = pathlib.Path("/dev/shm/transfer_gpu_others")
REPEATS = 2


def weights(gib):
    import transfer_gpu_jobs as jobs

    make = jobs.maker(gib, jobs.SOURCE)
    return [make(i) for i in range(jobs.ARRAYS)]


def are_equal(gib, arrays):
    import jax

    equal = jax.jit(lambda a, b: (a == b).all())
    return all(bool(equal(got, expected)) for got, expected in zip(arrays, weights(gib), strict=True))


class Pipe:
    """Lines to and from the other process."""

    def __init__(self, reading, writing):
        self._reading, self._writing = reading, writing
        self.address = None

    def send(self, line=""):
        print(line, file=self._writing, flush=True)

    def receive(self):
        if not (line := self._reading.readline()):
            raise RuntimeError("the other process has ended")
        return line.strip()


def send_files(pipe, arrays):
    import numpy as np

    FOLDER.mkdir(exist_ok=True)
    while pipe.receive() == "send":
        for number, array in enumerate(arrays):
            for shard in array.addressable_shards:
                np.asarray(shard.data).tofile(FOLDER / f"{number}.{shard.index[0].start}")
        pipe.send()


def take_files(pipe, aval, count):
    import jax
    import numpy as np

    def read(index, number):
        return np.fromfile(FOLDER / f"{number}.{index[0].start}", aval.dtype).reshape(-1, aval.shape[1])

    pipe.send("send")
    pipe.receive()
    made = [
        jax.make_array_from_callback(aval.shape, aval.sharding, functools.partial(read, number=i)) for i in range(count)
    ]
    return jax.block_until_ready(made)


def send_transfer(pipe, arrays):
    import jax
    from jax.experimental import transfer

    server = transfer.start_transfer_server(jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * 2)
    pipe.send(server.address())
    number = 0
    while pipe.receive() == "send":
        server.await_pull(number, arrays)
        pipe.send(str(number))
        number += 1


@functools.cache
def connection(address):
    import jax
    from jax.experimental import transfer

    server = transfer.start_transfer_server(jax.local_devices()[0].client, "127.0.0.1:0", ["127.0.0.1:0"] * 2)
    return server, server.connect(address)


def take_transfer(pipe, aval, count):
    import jax

    pipe.address = pipe.address or pipe.receive()
    _, there = connection(pipe.address)
    pipe.send("send")
    return jax.block_until_ready(there.pull(int(pipe.receive()), [aval] * count))


WAYS = {"files": (send_files, take_files), "transfer": (send_transfer, take_transfer)}


def receive(options):
    """This process, on the last half of the GPUs."""
    import jax
    import transfer_gpu_jobs as jobs

    jobs.use_half(1)
    other = start(options, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pipe = Pipe(other.stdout, other.stdin)
    aval = jax.ShapeDtypeStruct(jobs.shape(options.gib), "uint16", sharding=jobs.sharding(jobs.SOURCE))
    seconds, whole = [], True
    try:
        pipe.receive()
        for _ in range(REPEATS):
            begun = time.perf_counter()
            arrays = WAYS[options.way][1](pipe, aval, jobs.ARRAYS)
            seconds.append(time.perf_counter() - begun)
            whole &= are_equal(options.gib, arrays)
            print(f"{options.way}: {seconds} s", file=sys.stderr, flush=True)
    finally:
        other.kill()
        other.wait()
        shutil.rmtree(FOLDER, ignore_errors=True)
    return seconds, whole


def send(options):
    import jax
    import transfer_gpu_jobs as jobs

    jobs.use_half(0)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    pipe = Pipe(sys.stdin, answers)
    arrays = jax.block_until_ready(weights(options.gib))
    pipe.send()
    WAYS[options.way][0](pipe, arrays)


def visible_half(which):
    """The GPUs that one of the two processes of a JAX job may see, as `CUDA_VISIBLE_DEVICES` has them."""
    numbers = sorted(int(path.name[len("nvidia") :]) for path in pathlib.Path("/dev").glob("nvidia[0-9]*"))
    each = len(numbers) // 2
    if not each:
        raise SystemExit("device_put between two processes needs two GPUs, or --cpu")
    return ",".join(map(str, range(which * each, (which + 1) * each)))


def device_put(options):
    """Both processes: the arrays go from the devices of process 0 to those of process 1."""
    if options.cpu:
        raise SystemExit("device_put between two processes: JAX's CPU backend cannot; needs GPUs")
    process = int(bool(options.other))
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_half(process)
    import jax
    import jax.numpy as jnp
    import transfer_gpu_jobs as jobs

    other = None if process else start(options)
    jax.distributed.initialize("127.0.0.1:29517", 2, process)
    owned = [[d for d in jax.devices() if d.process_index == n] for n in range(2)]
    meshes = [jax.sharding.Mesh(devices, ("shard",)) for devices in owned]
    places = [jax.NamedSharding(mesh, jax.P("shard")) for mesh in meshes]
    rows, columns = jobs.shape(options.gib)
    shape = (rows * jobs.ARRAYS, columns)
    make = jax.jit(lambda: jax.lax.broadcasted_iota(jnp.uint16, shape, 0), out_shardings=places[process])
    if process:
        source = jax.make_array_from_single_device_arrays(shape, places[0], [], dtype=jnp.uint16)
    else:
        source = make()
    seconds = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        there = jax.block_until_ready(jax.device_put(source, places[1]))
        seconds.append(time.perf_counter() - begun)
    if process:
        whole = bool(jax.jit(lambda a, b: (a == b).all())(there, make()))
        print(f"device_put, receiver: {seconds} s, whole: {whole}", file=sys.stderr, flush=True)
        return seconds, whole
    return seconds, other.wait(60) == 0


def start(options, **pipes):
    command = [sys.executable, __file__, options.way, "--other", "--gib", str(options.gib)]
    return subprocess.Popen(bound([*command, *(["--cpu"] if options.cpu else [])]), **pipes)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("way", choices=(*WAYS, "device_put"))
    parser.add_argument("--gib", type=int, default=8)
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--other", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
    if options.way == "device_put":
        seconds, whole = device_put(options)
    elif options.other:
        send(options)
        return 0
    else:
        seconds, whole = receive(options)
    if not options.other:
        figures = {"way": options.way, "gib": options.gib, "seconds": seconds, "whole": whole}
        print(json.dumps(figures | {"gb_per_s": options.gib * 1.073741824 / min(seconds)}), flush=True)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
