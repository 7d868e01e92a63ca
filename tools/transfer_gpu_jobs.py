"""Jobs of two processes that have half of a host's GPUs each, with `xen_moe_jax.transfer` between them.

    python tools/transfer_gpu_jobs.py prefill            KV pages layer by layer, tokens compared with one process alone
    python tools/transfer_gpu_jobs.py ticks              as prefill, from one program with `xt.tick`; the first prefill
                                                         process dies in the middle, and a second one takes over
    python tools/transfer_gpu_jobs.py weights --gib 64   weights from the first half of the GPUs to the other half

`--cpu` rehearses a job on virtual devices. One JSON object with figures is written to standard output; the exit status
is 1 if a comparison fails. Each process reports its progress, with times, on standard error. A process that has not
ended after `--limit` seconds prints the stacks of its threads and ends.
"""

import argparse
import faulthandler
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
sys.path.insert(0, str(ROOT))

from tools.children import bound  # noqa: E402

BEGUN = time.time()
LIMIT_S = 300
GIB = 1 << 30
PROMPT, STEPS = 500, 24


process = "this"
"""The name of this process in its progress reports."""


def say(what):
    """Prints progress on standard error, with the seconds since this process was started."""
    print(f"[{time.time() - BEGUN:7.2f}] {process}: {what}", file=sys.stderr, flush=True)


def start(options, descriptor, *more):
    """Starts the other process of a job, on the first half of the GPUs; this process has the other half."""
    command = [sys.executable, __file__, options.job, "--other", descriptor.hex(), "--gib", str(options.gib), *more]
    command += ["--limit", str(options.limit - (time.time() - BEGUN))]
    flags = [flag for flag, given in (("--cpu", options.cpu), ("--all-devices", options.all_devices)) if given]
    return subprocess.Popen(bound([*command, *flags]))


chosen = []
"""This process's devices. The other process has the other devices of the host."""


def use_half(which):
    import jax

    # Not `jax_cuda_visible_devices`: with it JAX 0.11.2 counts devices in two ways, and its own operations fail.
    devices = jax.local_devices()
    if len(devices) < 2:
        raise SystemExit(f"two processes need two GPUs of one host; JAX sees {devices}")
    each = len(devices) // 2
    chosen[:] = devices[which * each : (which + 1) * each]
    jax.config.update("jax_default_device", chosen[0])
    say(f"devices {[str(d) for d in chosen]}")


def mesh(name):
    import jax

    return jax.make_mesh((len(chosen),), (name,), axis_types=(jax.sharding.AxisType.Auto,), devices=chosen)


# --- prefill to decode


def example():
    """The example's decoder, a larger one."""
    spec = importlib.util.spec_from_file_location("prefill_decode", ROOT / "examples" / "prefill_decode.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS, module.HEADS, module.HEAD, module.PAGE, module.POOL = 8, 8, 64, 16, 128
    module.HIDDEN = module.HEADS * module.HEAD
    return module


def parameters(model):
    """Split over heads, as tensor parallelism does."""
    import jax

    split = {"q": (None, "heads"), "k": (None, "heads"), "v": (None, "heads"), "up": (None, "heads")}
    split |= {"o": ("heads",), "down": ("heads",)}
    here = functools.partial(jax.NamedSharding, mesh("heads"))
    params = model.parameters()
    return {
        "embed": jax.device_put(params["embed"], here(jax.P())),
        "out": jax.device_put(params["out"], here(jax.P())),
        "layers": [{k: jax.device_put(w, here(jax.P(*split[k]))) for k, w in p.items()} for p in params["layers"]],
    }


def prefill_by_layer(model, params, prompt, each_layer):
    """One program a layer: `each_layer(layer, kv)` gets an array that is still being computed, and may start to send it
    while the next layer's program is queued. Returns the logits.
    """
    import jax
    import jax.numpy as jnp

    by_heads = jax.NamedSharding(mesh("heads"), jax.P(None, None, None, "heads"))
    everywhere = jax.NamedSharding(mesh("heads"), jax.P())

    @functools.partial(jax.jit, out_shardings=(by_heads, everywhere))
    def layer_program(p, x):
        q, k, v, kv = model.project(p, x)
        return kv, model.attend(p, x, q, k, v)

    tokens = jax.device_put(jnp.asarray(prompt), everywhere)
    x = jax.jit(model.embedded, out_shardings=everywhere)(params, tokens, jnp.arange(len(tokens)))
    for layer, p in enumerate(params["layers"]):
        kv, x = layer_program(p, x)
        each_layer(layer, kv)
    return jax.jit(model.output, out_shardings=everywhere)(params, x[-1])


def hash_of(layers):
    """Returns one hash over the arrays of all layers, in order."""
    import numpy as np

    digest = hashlib.blake2b()
    for layer in layers:
        digest.update(np.ascontiguousarray(np.asarray(layer)))
    return digest.hexdigest()


def write_layers(engine, decoder, request):
    """Returns (a function that starts the write of one layer's pages, its transfers by layer, its sources by layer)."""
    target, transfers, sent = decoder["kv"], {}, {}

    def send(layer, kv):
        sent[layer] = kv
        pages = (range(len(kv)), request["pages"][: len(kv)])
        transfers[layer] = engine.write(kv, target[layer], pages=pages, imm=request["id"])

    return send, transfers, sent


def prefill_other(descriptor, options):
    import xen_moe_jax.transfer as xt

    model = example()
    params = parameters(model)
    run = {"prefill": by_programs, "ticks": by_ticks}[options.job]
    with xt.Engine(name=options.name) as engine:
        decoder = engine.connect(descriptor, timeout=60)
        say("connected")
        while True:
            try:
                request = json.loads(engine.recv(decoder, tag="request", timeout=LIMIT_S))
            except xt.PeerLost:
                return
            say(f"request {request['id']}")
            send, transfers, sent = write_layers(engine, decoder, request)
            logits, answer = run(model, params, request["prompt"], send, transfers, options.dies_after)
            transfers["logits"] = engine.write(logits, decoder["logits"], imm=request["id"], last=True)
            for transfer in transfers.values():
                transfer.wait(60)
            say(f"request {request['id']}: all is confirmed; keys that UCX was given: {len(decoder.link._keys)}")
            answer["bytes"] = sum(t.bytes_done for t in transfers.values())
            answer["hash"] = hash_of([sent[layer] for layer in range(model.LAYERS)])
            engine.send(decoder, json.dumps(answer).encode(), tag="done").wait(60)


def by_programs(model, params, prompt, send, transfers, _):
    """Runs the prefill as one program for each layer."""
    begun = time.perf_counter()
    logits = prefill_by_layer(model, params, prompt, send)
    for transfer in list(transfers.values()):
        transfer.wait(60)
    return logits, {"prefill and transfer s": time.perf_counter() - begun}


def by_ticks(model, params, prompt, send, transfers, dies_after):
    """One program; its ticks send. The seconds of each tick, and of the confirmation of its pages, from the start."""
    import jax
    import jax.numpy as jnp

    import xen_moe_jax.transfer as xt

    ticked, confirmed = {}, {}

    def on_tick(layer, kv):
        if layer == dies_after:
            say(f"layer {layer} has ticked: dies")
            os._exit(9)
        send(layer, kv)
        ticked[layer] = time.perf_counter() - begun

    watcher = xt.Watcher(on_tick)
    everywhere = jax.NamedSharding(mesh("heads"), jax.P())
    tokens = jax.device_put(jnp.asarray(prompt), everywhere)

    @functools.partial(jax.jit, out_shardings=everywhere)
    def program(params, tokens):
        return model.prefill(params, tokens, lambda x, layer, kv: xt.tick(x, watcher, layer, data=kv))

    compiled = program.lower(params, tokens).compile()
    say("compiled")
    begun = time.perf_counter()
    logits = compiled(params, tokens)
    say(f"started, with {len(ticked)} ticks")
    ended = None
    while len(confirmed) < model.LAYERS:
        if ended is None and logits.is_ready():
            ended = time.perf_counter() - begun
        for layer, transfer in list(transfers.items()):
            if layer not in confirmed and transfer.done():
                confirmed[layer] = time.perf_counter() - begun
        time.sleep(1e-4)  # The callbacks need the interpreter, too.
        try:
            watcher.wait(model.LAYERS, timeout=0)  # Raises the exception of a tick.
        except xt.TransferTimeout:
            if time.perf_counter() - begun > 20:
                raise RuntimeError(f"after 20 s: ticks {ticked}, confirmed {confirmed}, ended {ended}") from None
    watcher.wait(model.LAYERS, timeout=20)
    jax.block_until_ready(logits)
    return logits, {
        "program s": ended or time.perf_counter() - begun,
        "ticks s": [ticked[layer] for layer in range(model.LAYERS)],
        "confirmed s": [confirmed[layer] for layer in range(model.LAYERS)],
    }


WORKERS = {
    "prefill": ({"prefill": ()}, ("prefill",) * 3),
    "ticks": ({"prefill-0": ("--dies-after", "3"), "prefill-1": ()}, ("prefill-0",) + ("prefill-1",) * 3),
}
"""By job: the prefill processes, and the process that gets the requests; the first request compiles."""


def prefill_job(options):
    import jax
    import jax.numpy as jnp
    import numpy as np

    import xen_moe_jax.transfer as xt

    model = example()
    params = parameters(model)
    prompt = np.random.default_rng(1).integers(0, model.VOCAB, PROMPT)
    pages = np.random.default_rng(0).permutation(model.POOL)[: -(-(PROMPT + STEPS) // model.PAGE)]
    table, by_heads = jnp.asarray(pages), jax.NamedSharding(mesh("heads"), jax.P(None, None, None, None, "heads"))
    shape = (model.LAYERS, model.POOL, 2, model.PAGE, model.HEADS, model.HEAD)
    avals = {
        "kv": jax.ShapeDtypeStruct(shape, jnp.float32, sharding=by_heads),
        "logits": jax.ShapeDtypeStruct((model.VOCAB,), jnp.float32, sharding=jax.NamedSharding(mesh("heads"), jax.P())),
    }
    figures, equal, lost = {}, [], []
    workers, requests = WORKERS[options.job]
    with xt.Engine(name="decode") as engine:
        window = engine.window(avals)
        others = [start(options, engine.descriptor, "--name", name, *more) for name, more in workers.items()]
        try:
            # Computes the answers of one process alone, while the other processes start.
            layers = {}
            logits = prefill_by_layer(model, params, prompt, layers.__setitem__)
            cache = jnp.stack([layers[i] for i in range(model.LAYERS)])
            kv = jax.device_put(jnp.zeros(shape), by_heads).at[:, table[: cache.shape[1]]].set(cache)
            say("prefill alone")
            expected = model.decode(params, kv, table, logits, PROMPT, STEPS)
            say("decoded alone")
            for request, name in enumerate(requests):
                peer = engine.peer(name, 60)
                say(f"request {request} to {name}")
                order = {"id": request, "prompt": prompt.tolist(), "pages": pages.tolist()}
                begun = time.perf_counter()
                engine.send(peer, json.dumps(order).encode(), tag="request")
                try:
                    with engine.counter(request, expect=model.LAYERS + 1, source=peer) as counter:
                        counter.wait(timeout=60)
                except xt.PeerLost as error:
                    say(f"request {request}: {error}")
                    lost.append(error.peer)
                    window.reset()
                    continue
                got = window.commit(30)
                say(f"request {request}: committed")
                figures["request to committed s"] = time.perf_counter() - begun
                tokens = model.decode(params, got["kv"], table, got["logits"], PROMPT, STEPS)
                say(f"request {request}: decoded")
                # Compares the sent arrays: another process's program need not give the same bits as this process's.
                arrived = got["kv"][:, table[: cache.shape[1]]]
                figures |= json.loads(engine.recv(peer, tag="done", timeout=30))
                equal.append({"tokens": tokens == expected, "pages": hash_of(arrived) == figures.pop("hash")})
                figures["largest difference to this process's own"] = float(jnp.abs(arrived - cache).max())
            figures |= {"equal": equal, "lost": lost, "tokens": tokens, "devices": [str(d) for d in chosen]}
        finally:
            for other in others:
                other.kill()
                other.wait()
    died = [name for name, more in workers.items() if more]
    return figures, all(all(e.values()) for e in equal) and lost == died and len(equal) == 3


# --- weights


def sharding(spec):
    import jax

    return jax.NamedSharding(mesh("shard"), jax.P(*spec))


ARRAYS, COLUMNS = 16, 8192


def shape(gib):
    return gib * GIB // ARRAYS // 2 // COLUMNS, COLUMNS


@functools.cache
def maker(gib, spec):
    """The program that makes weights: uint16 (every bit pattern compares), each element by its place and number."""
    import jax
    import jax.numpy as jnp

    @functools.partial(jax.jit, out_shardings=sharding(spec))
    def make(number):
        row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape(gib), axis) for axis in (0, 1))
        place = row * jnp.uint32(COLUMNS) + column
        return ((place + number * jnp.uint32(7919)) * jnp.uint32(2654435761) >> 16).astype(jnp.uint16)

    return lambda number: make(jnp.uint32(number))


LAYOUTS = {"the same split": ("shard",), "rows to columns": (None, "shard")}
SOURCE = ("shard",)


def weights_other(descriptor, options):
    import jax

    import xen_moe_jax.transfer as xt

    params = jax.block_until_ready({f"w{i:02}": maker(options.gib, SOURCE)(i) for i in range(ARRAYS)})
    with xt.Engine(name="trainer") as engine:
        server = engine.connect(descriptor, timeout=60)
        while True:
            try:
                layout = engine.recv(server, tag="push", timeout=LIMIT_S).decode()
            except xt.PeerLost:
                return
            plan = xt.plan(params, server[layout].layout)
            begun = time.perf_counter()
            pushed = xt.push(params, plan, [server], staging=options.gib * GIB // 2)
            posted = time.perf_counter() - begun
            pushed.wait(60)
            ended = time.perf_counter() - begun
            engine.recv(server, tag="counted", timeout=60)
            counted = time.perf_counter() - begun
            answer = {"posted s": posted, "confirmed s": ended, "counted at the receiver s": counted}
            engine.send(server, json.dumps(answer | {"bytes": pushed.nbytes}).encode(), tag="done").wait(60)


def weights_job(options):
    import jax

    import xen_moe_jax.transfer as xt

    figures, whole = {}, True
    equal = jax.jit(lambda a, b: (a == b).all())
    with xt.Engine(name="server") as engine:
        other = start(options, engine.descriptor)
        try:
            peer = engine.peer("trainer", 60)
            for layout, spec in LAYOUTS.items():
                aval = jax.ShapeDtypeStruct(shape(options.gib), "uint16", sharding=sharding(spec))
                avals = {f"w{i:02}": aval for i in range(ARRAYS)}
                figures[layout] = []
                for _ in range(3):  # The first one maps memory and compiles.
                    window = engine.window(avals, name=layout, in_place=True)  # No room for a second 64 GiB.
                    counter = window.counter(expect=len(avals))
                    engine.send(peer, layout.encode(), tag="push").wait(60)
                    counter.wait(60)
                    engine.send(peer, b"", tag="counted").wait(60)
                    figures[layout].append(json.loads(engine.recv(peer, tag="done", timeout=60)))
                    got = window.commit(30, last=True)
                    make = maker(options.gib, spec)
                    figures[layout][-1]["equal"] = all(bool(equal(got[f"w{i:02}"], make(i))) for i in range(ARRAYS))
                    whole &= figures[layout][-1]["equal"]
                    del got
            figures["devices"] = [str(d) for d in chosen]
        finally:
            other.kill()
            other.wait()
    return figures, whole


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("job", choices=("prefill", "ticks", "weights"))
    parser.add_argument("--gib", type=int, default=64, help="of weights")
    parser.add_argument("--cpu", action="store_true", help="a rehearsal on the CPU")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds after which a process gives up")
    parser.add_argument("--other", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="prefill", help=argparse.SUPPRESS)
    parser.add_argument("--all-devices", action="store_true", help="ticks: of a program over all of its half's GPUs")
    parser.add_argument("--dies-after", type=int, default=-1, help=argparse.SUPPRESS)
    options = parser.parse_args()
    faulthandler.dump_traceback_later(max(1, options.limit), exit=True)
    if options.other:
        global process
        process = options.name
    if options.cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
    if options.other:
        use_half(0)
        if options.job == "ticks" and not options.all_devices:
            del chosen[1:]
        (weights_other if options.job == "weights" else prefill_other)(bytes.fromhex(options.other), options)
        return 0
    use_half(1)
    figures, whole = (weights_job if options.job == "weights" else prefill_job)(options)
    print(json.dumps({"job": options.job, "whole": whole} | figures, indent=1))
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
