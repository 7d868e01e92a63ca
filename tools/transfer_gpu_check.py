"""Tries `xen_moe_jax.transfer` on two GPUs of one host: one process per GPU, everything in one call.

    python tools/transfer_gpu_check.py [--out DIR] [--gib 4] [--only whole pages ...] [--lock FILE]
    python tools/transfer_gpu_check.py --cpu --gib 1     # a rehearsal without GPUs: the same, but for devices and rates

The program prints for each check whether it passed, with figures, and continues after a failure. The exit status is 1
if any check failed. The checks are: a JAX array on GPU 0 is written into a window on GPU 1, whole and by pages, and the
bytes are equal; the rate shows that the bytes go over NVLink; writes from host memory; reads; a push that casts; a
writer that is killed; and the benchmark's table. With --lock, each of them runs while no other program holds the lock
of that file (benchmarks/lib/turns.py): programs beside it disturb its rates, and it theirs.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time
import traceback

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(ROOT))

from benchmarks.lib import turns  # noqa: E402
from tools.children import bound  # noqa: E402

NVLINK_FLOOR_GB_PER_S = 100  # PCIe gives 55 at most, a detour through the host less.
MIB = 1 << 20
CHECKS = ("whole", "pages", "host", "read", "push", "large", "killed_writer")  # The last one ends the writer.


def use_gpu(number):
    import jax

    # Not `jax_cuda_visible_devices`: with it JAX 0.11.2 counts devices in two ways, and its own operations fail.
    if jax.default_backend() != "cpu":
        jax.config.update("jax_default_device", jax.local_devices()[number])


def writer(descriptor):
    """The process of GPU 0, which takes its orders by messages."""
    import jax
    import numpy as np

    import xen_moe_jax.transfer as xt

    with xt.Engine(name="writer") as engine:
        peer = engine.connect(descriptor, timeout=60)

        def content(seed, shape, dtype):
            if seed is None:  # Random bits of many GiB take several times their size.
                return jax.numpy.ones(shape, dtype)
            return jax.random.bits(jax.random.key(seed), shape, np.uint8).view(dtype)

        while True:
            try:
                order = json.loads(engine.recv(peer, tag="order"))
            except xt.PeerLost:
                return
            answer = {}
            try:
                if order["do"] == "write":
                    array = jax.block_until_ready(content(order["seed"], order["shape"], np.uint8))
                    memory = array.device.platform
                    array = np.asarray(array) if order.get("from_host") else array
                    target = peer[order["name"]]
                    seconds = []
                    for _ in range(order["repeats"]):
                        begun = time.perf_counter()
                        engine.write(array, target, pages=order["pages"]).wait(60)
                        seconds.append(time.perf_counter() - begun)
                    engine.write(array, target, pages=order["pages"], imm=order["name"]).wait(60)
                    answer = {"seconds": sorted(seconds), "memory": memory}
                elif order["do"] == "read":
                    got = engine.read(peer[order["name"]])
                    answer = {"equal": bool((got == content(order["seed"], order["shape"], np.uint8)).all())}
                elif order["do"] == "push":
                    params = {"w": jax.random.normal(jax.random.key(3), (1024, 512))}
                    plan = xt.plan(params, peer["weights"].layout, cast={"*": "float8_e4m3fn"})
                    xt.push(params, plan, [peer]).wait(60)
                    answer = {"arrivals": plan.arrivals["receiver"]}
                elif order["do"] == "die":
                    target = peer[order["name"]]
                    engine.write(jax.numpy.zeros(target.shape, np.uint8), target).wait(60)
                    engine.write(jax.numpy.ones(target.shape, np.uint8), target)
                    os._exit(9)
            except Exception as error:
                answer = {"error": "".join(traceback.format_exception(error))[-2000:]}
            engine.send(peer, json.dumps(answer).encode(), tag="answer")


class Checks:
    """The process of GPU 1."""

    def __init__(self, out, gib):
        import jax
        import numpy as np

        import xen_moe_jax.transfer as xt

        self.jax, self.np, self.xt = jax, np, xt
        self.out, self.gib, self.cpu = out, gib, jax.default_backend() == "cpu"
        self.engine = xt.Engine(name="receiver")
        self.figures = {"devices": [str(d) for d in jax.local_devices()]}
        self.process = subprocess.Popen(bound([sys.executable, __file__, "--writer", self.engine.descriptor.hex()]))
        self.peer = self.engine.peer("writer", 120)

    def ask(self, **order):
        self.engine.send(self.peer, json.dumps(order).encode(), tag="order").wait(60)
        answer = json.loads(self.engine.recv(self.peer, tag="answer", timeout=180))
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def expected(self, seed, shape):
        return self.np.asarray(self.jax.random.bits(self.jax.random.key(seed), shape, self.np.uint8))

    def window(self, name, shape):
        return self.engine.window(self.jax.ShapeDtypeStruct(shape, self.np.uint8), name=name)

    def check_whole(self):
        from xen_moe_jax.transfer import _device

        if not self.cpu:
            array = self.jax.numpy.zeros(1 << 20)
            pointer = array.unsafe_buffer_pointer()
            self.figures["JAX's memory"] = {
                "can be mapped": _device.is_shareable(pointer),
                "handle types": _device.handle_types(pointer),
                "JAX's number, CUDA's": [array.device.local_hardware_id, _device.ordinal(array.device)],
            }
        for size in (4096, 1 * MIB, 128 * MIB):
            name = f"whole{size}"
            window = self.window(name, (size,))
            answer = self.ask(do="write", name=name, seed=1, shape=[size], pages=None, repeats=20)
            self.engine.counter(name, expect=1).wait(30)
            array = window.commit(30, last=True)
            assert self.cpu or answer["memory"] == array.device.platform == "gpu"
            assert (self.np.asarray(array) == self.expected(1, (size,))).all(), f"{size} bytes differ"
            median = answer["seconds"][len(answer["seconds"]) // 2]
            self.figures[name] = {"us": median * 1e6, "gb_per_s": size / median / 1e9}
        rate = self.figures[f"whole{128 * MIB}"]["gb_per_s"]
        assert self.cpu or rate > NVLINK_FLOOR_GB_PER_S, f"{rate:.0f} GB/s: these bytes did not go over NVLink"

    def check_pages(self):
        for page in (4096, 65536):
            name, pages = f"pages{page}", 256
            window = self.window(name, (2 * pages, page))
            order = self.np.random.default_rng(0).permutation(2 * pages)[:pages].tolist()
            request = {"do": "write", "name": name, "seed": 2, "shape": [pages, page]}
            answer = self.ask(**request, pages=[list(range(pages)), order], repeats=20)
            self.engine.counter(name, expect=1).wait(30)
            got = self.np.asarray(window.commit(30, last=True))
            expected = self.np.zeros((2 * pages, page), self.np.uint8)
            expected[order] = self.expected(2, (pages, page))
            assert (got == expected).all(), f"pages of {page} bytes differ"
            median = answer["seconds"][len(answer["seconds"]) // 2]
            self.figures[name] = {"us": median * 1e6, "gb_per_s": pages * page / median / 1e9}

    def check_host(self):
        """From NumPy memory into this process's GPU."""
        for size in (4096, 16 * MIB):
            name = f"host{size}"
            window = self.window(name, (size,))
            order = {"do": "write", "name": name, "seed": 4, "shape": [size], "pages": None, "repeats": 5}
            answer = self.ask(**order, from_host=True)
            self.engine.counter(name, expect=1).wait(30)
            got = self.np.asarray(window.commit(30, last=True))
            assert (got == self.expected(4, (size,))).all(), f"{size} bytes from the host differ"
            self.figures[name] = {"us": answer["seconds"][0] * 1e6, "gb_per_s": size / answer["seconds"][0] / 1e9}

    def check_read(self):
        array = self.jax.random.bits(self.jax.random.key(5), (8 * MIB,), self.np.uint8)
        self.engine.publish("published", array)
        answer = self.ask(do="read", name="published", seed=5, shape=[8 * MIB])
        assert answer["equal"], "what was read differs"

    def check_push(self):
        aval = self.jax.ShapeDtypeStruct((1024, 512), self.jax.numpy.float8_e4m3fn)
        window = self.engine.window({"w": aval}, name="weights")
        counter = window.counter(expect=1)
        self.ask(do="push")
        counter.wait(30)
        got = window.commit(30, last=True)["w"]
        expected = self.jax.random.normal(self.jax.random.key(3), (1024, 512)).astype(got.dtype)
        assert (got.astype("float32") == expected.astype("float32")).all(), "pushed weights differ"

    def check_large(self):
        size = self.gib << 30
        window = self.window("large", (size,))
        answer = self.ask(do="write", name="large", seed=None, shape=[size], pages=None, repeats=3)
        self.engine.counter("large", expect=1).wait(30)
        array = window.commit(30, last=True)
        assert bool((array == 1).all()), "the large write differs"
        best = answer["seconds"][0]
        self.figures["large"] = {"gib": self.gib, "seconds": best, "gb_per_s": size / best / 1e9}

    def check_killed_writer(self):
        """Last: the writer is gone afterwards."""
        window = self.window("killed", (64 * MIB,))
        self.engine.send(self.peer, json.dumps({"do": "die", "name": "killed"}).encode(), tag="order").wait(60)
        begun = time.perf_counter()
        try:
            self.engine.recv(self.peer, tag="answer", timeout=30)
            raise AssertionError("the writer lives")
        except self.xt.PeerLost:
            self.figures["seconds from the order to die to its being noticed"] = time.perf_counter() - begun
        try:
            window.commit(5)
            raise AssertionError("half a write was committed")
        except self.xt.PeerLost:
            window.reset()

    def benchmark(self):
        command = [sys.executable, "-m", "benchmarks", "transfer"]
        files = ["--json", str(self.out / "transfer.json")]
        if importlib.util.find_spec("matplotlib"):
            files += ["--plot", str(self.out / "transfer.png")]
        if self.cpu:
            files += ["--sizes", "2048", "65536"]
        subprocess.run(bound([*command, *files]), check=True, timeout=400, cwd=ROOT)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--gib", type=int, default=4, help="size of the large write")
    parser.add_argument("--only", nargs="+", choices=(*CHECKS, "benchmark"), help="default: all")
    parser.add_argument("--lock", help="hold this file's lock during each check: other programs may run between them")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--writer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.writer:
        use_gpu(0)
        writer(bytes.fromhex(options.writer))
        return 0
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    use_gpu(1)
    options.out.mkdir(parents=True, exist_ok=True)
    checks = Checks(options.out, options.gib)
    failed = []
    chosen = options.only or (*CHECKS, "benchmark")
    for name in [name for name in CHECKS if name in chosen]:
        try:
            with turns.alone(options.lock):
                getattr(checks, f"check_{name}")()
            print(f"ok      {name}", flush=True)
        except Exception:
            failed.append(name)
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    checks.process.kill()
    checks.engine.close()
    try:
        if "benchmark" in chosen:
            with turns.alone(options.lock):
                checks.benchmark()
            print("ok      benchmark", flush=True)
    except Exception:
        failed.append("benchmark")
        print(f"FAILED  benchmark\n{traceback.format_exc()}", flush=True)
    checks.figures["failed"] = failed
    (options.out / "transfer_gpu_check.json").write_text(json.dumps(checks.figures, indent=1))
    print(json.dumps(checks.figures, indent=1))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
