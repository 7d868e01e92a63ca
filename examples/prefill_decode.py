"""Disaggregated decoding: one process computes a prompt's KV cache and writes it, layer by layer, into the pages of
another.

The decoder asks a prefill process for a prompt and names the pages that it has set aside. While the prefill program
computes the next layer, `tick` hands the last one's keys and values to the host, which writes them into those pages.
The decoder waits for one counter. The first prefill process is killed in the middle of its work: the decoder throws the
half-filled window away and asks another.

    python examples/prefill_decode.py
"""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax.transfer as xt

LAYERS, HEADS, HEAD, VOCAB = 4, 4, 16, 97
HIDDEN = HEADS * HEAD
PAGE, POOL = 8, 32  # tokens of a page, pages of the decoder's cache


def parameters():
    rng = np.random.default_rng(0)

    def dense(*shape):
        return (rng.standard_normal(shape) / shape[0] ** 0.5).astype(np.float32)

    names = {"q": HIDDEN, "k": HIDDEN, "v": HIDDEN, "o": HIDDEN, "up": 4 * HIDDEN}
    layers = [
        {name: dense(HIDDEN, width) for name, width in names.items()} | {"down": dense(4 * HIDDEN, HIDDEN)}
        for _ in range(LAYERS)
    ]
    return jax.device_put({"embed": dense(VOCAB, HIDDEN), "layers": layers, "out": dense(HIDDEN, VOCAB)})


def embedded(params, tokens, positions):
    angles = positions[..., None] / 100 ** (jnp.arange(HIDDEN) / HIDDEN)
    return params["embed"][tokens] + jnp.sin(angles + jnp.arange(HIDDEN))


def output(params, x):
    return x / jnp.sqrt(jnp.mean(x**2)) @ params["out"]


def heads(x):
    return x.reshape(*x.shape[:-1], HEADS, HEAD)


def block(p, x, attended):
    x = x + attended.reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"]


def project(p, x):
    """Queries, keys and values `[T, HEADS, HEAD]`, and the last two as pages."""
    q, k, v = heads(x @ p["q"]), heads(x @ p["k"]), heads(x @ p["v"])
    kv = jnp.pad(jnp.stack([k, v], 1), ((0, -len(x) % PAGE), (0, 0), (0, 0), (0, 0)))
    return q, k, v, kv.reshape(-1, PAGE, 2, HEADS, HEAD).swapaxes(1, 2)


def attend(p, x, q, k, v):
    scores = jnp.einsum("qhd,khd->hqk", q, k) / HEAD**0.5
    causal = jnp.tril(jnp.ones((len(x), len(x)), bool))
    return block(p, x, jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(causal, scores, -jnp.inf)), v))


def prefill(params, tokens, each_layer):
    """Logits of the last of `tokens [T]`; `each_layer(x, layer, kv)` sees kv `[pages, 2, PAGE, HEADS, HEAD]` as soon
    as it is there.
    """
    x = embedded(params, tokens, jnp.arange(len(tokens)))
    for layer, p in enumerate(params["layers"]):
        q, k, v, kv = project(p, x)
        x = each_layer(x, layer, kv)
        x = attend(p, x, q, k, v)
    return output(params, x[-1])


def sample(logits, position):
    """Samples a token; every process draws the same one."""
    return jnp.argmax(logits + jax.random.gumbel(jax.random.fold_in(jax.random.key(2), position), logits.shape))


@jax.jit
def decode_step(params, kv, table, token, length):
    """One token: kv `[LAYERS, POOL, 2, PAGE, HEADS, HEAD]`, table `[pages]` of this request; (next token, kv with this
    one's).
    """
    x = embedded(params, token, length)
    page, slot = table[length // PAGE], length % PAGE
    seen = jnp.arange(table.shape[0] * PAGE) <= length
    for layer, p in enumerate(params["layers"]):
        q = heads(x @ p["q"])
        kv = kv.at[layer, page, :, slot].set(jnp.stack([heads(x @ p["k"]), heads(x @ p["v"])]))
        k, v = kv[layer, table].swapaxes(0, 1).reshape(2, -1, HEADS, HEAD)
        scores = jnp.where(seen, jnp.einsum("hd,khd->hk", q, k) / HEAD**0.5, -jnp.inf)
        x = block(p, x, jnp.einsum("hk,khd->hd", jax.nn.softmax(scores), v))
    return sample(output(params, x), length), kv


def decode(params, kv, table, logits, length, steps):
    token, tokens = sample(logits, length - 1), []
    for step in range(steps):
        tokens.append(int(token))
        token, kv = decode_step(params, kv, table, token, length + step)
    return tokens


def prefill_process(name, descriptor, dies_after):
    """Serves requests until the decoder is gone; `dies_after`: the layer after which it is killed, -1 for never."""
    params = parameters()
    with xt.Engine(name=name) as engine:
        decoder = engine.connect(descriptor)
        while True:
            try:
                request = json.loads(engine.recv(decoder, tag="request"))
            except xt.PeerLost:
                return
            target, transfers, pages = decoder["kv"], [], request["pages"]

            def send(layer, kv, target=target, transfers=transfers, pages=pages, request=request):
                if layer == dies_after:
                    os._exit(9)
                page_numbers = (range(len(kv)), pages[: len(kv)])
                transfers.append(engine.write(kv, target[layer], pages=page_numbers, imm=request["id"]))

            watcher = xt.Watcher(send)
            program = jax.jit(lambda t, w=watcher: prefill(params, t, lambda x, i, kv: xt.tick(x, w, i, data=kv)))
            logits = program(jnp.asarray(request["prompt"]))
            watcher.wait(LAYERS, timeout=60)
            transfers.append(engine.write(logits, decoder["logits"], imm=request["id"], last=True))
            for transfer in transfers:
                transfer.wait(60)


def start(name, descriptor, dies_after=-1):
    command = [sys.executable, __file__, name, descriptor.hex(), str(dies_after)]
    return subprocess.Popen(command)


def main(steps=12):
    params = parameters()
    prompt = np.random.default_rng(1).integers(0, VOCAB, 27)
    pages = np.random.default_rng(0).permutation(POOL)[: -(-(len(prompt) + steps) // PAGE)]
    table = jnp.asarray(pages)

    # Computes the answer of one process alone.
    @jax.jit
    def alone(tokens):
        cache = []
        logits = prefill(params, tokens, lambda x, layer, kv: (cache.append(kv), x)[1])
        return logits, jnp.stack(cache)

    logits, cache = alone(prompt)
    kv = jnp.zeros((LAYERS, POOL, 2, PAGE, HEADS, HEAD)).at[:, table[: cache.shape[1]]].set(cache)
    expected = decode(params, kv, table, logits, len(prompt), steps)

    avals = {"kv": jax.ShapeDtypeStruct(kv.shape, kv.dtype), "logits": jax.ShapeDtypeStruct((VOCAB,), jnp.float32)}
    workers = []
    try:
        with xt.Engine(name="decode-0") as engine:
            window = engine.window(avals)
            workers = [start("prefill-0", engine.descriptor, dies_after=2), start("prefill-1", engine.descriptor)]
            lost = []
            for request, name in enumerate(["prefill-0", "prefill-1"]):
                peer = engine.peer(name, timeout=60)
                order = {"id": request, "prompt": prompt.tolist(), "pages": pages.tolist()}
                engine.send(peer, json.dumps(order).encode(), tag="request")
                try:
                    with engine.counter(request, expect=LAYERS + 1, source=peer) as counter:
                        counter.wait(timeout=60)
                except xt.PeerLost as error:
                    lost.append(error.peer)
                    window.reset()
                    continue
                got = window.commit()
                tokens = decode(params, got["kv"], table, got["logits"], len(prompt), steps)
                break
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    print(f"lost: {lost}; tokens of {name}: {tokens}")
    print(f"tokens of one process alone: {expected}")
    return {"lost": lost, "tokens": tokens, "expected": expected}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        prefill_process(sys.argv[1], bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
