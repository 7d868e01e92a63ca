"""The decoder of `serve_elastic.py`: its checkpoint, its step on one rank, and the tokens that a process without ranks
computes. A server of your own has another one."""

from __future__ import annotations

import pathlib

VOCAB, HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH = 64, 32, 2, 8, 2, 32
SLOTS = 4
"""Slots for experts on a rank: two ranks can hold all experts."""
ROWS, LENGTH = 4, 48
"""Requests that a rank decodes at the same time, and tokens of the longest request."""
BATCH = 64
"""Requests that `expected_tokens` decodes at the same time."""
TIMEOUT_S = 20.0
"""Seconds that a process waits for another one."""


# -- the checkpoint ----------------------------------------------------------------------------------------------------


def make_checkpoint(folder: pathlib.Path) -> None:
    """Writes random float32 weights; each expert has a file, so that a rank reads its own experts alone."""
    import numpy as np

    rng = np.random.default_rng(35)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / shape[-2] ** 0.5).astype(np.float32)

    dense = {
        "embedding": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "position": rng.standard_normal((LENGTH, HIDDEN)).astype(np.float32),
        "attention": normal(LAYERS, 4, HIDDEN, HIDDEN),
        "router": normal(LAYERS, HIDDEN, EXPERTS),
        "out": normal(HIDDEN, VOCAB),
    }
    np.savez(folder / "dense.npz", **dense)
    for expert in range(EXPERTS):
        weights = {"gate_up": normal(LAYERS, HIDDEN, 2 * WIDTH), "down": normal(LAYERS, WIDTH, HIDDEN)}
        np.savez(folder / f"expert{expert}.npz", **weights)


def load_dense(folder: pathlib.Path) -> dict:
    """Returns the weights that every rank has, by name: all but those of the experts."""
    import numpy as np

    with np.load(folder / "dense.npz") as file:
        return dict(file)


def load_expert(folder: pathlib.Path, expert: int) -> dict:
    """Returns the weights of one expert in all layers: `gate_up [LAYERS, HIDDEN, 2 * WIDTH]` and `down [LAYERS, WIDTH,
    HIDDEN]`. They are zero for -1, an empty slot."""
    import numpy as np

    with np.load(folder / f"expert{max(expert, 0)}.npz") as file:
        return {name: array * (expert >= 0) for name, array in file.items()}


def publish_experts(folder: pathlib.Path):
    """Lets ranks read experts from this process's memory (`xen_moe_jax.transfer`) instead of from files. Returns the
    engine, which the caller closes."""
    import xen_moe_jax.transfer as xt

    engine = xt.Engine(name="weights")
    for expert in range(EXPERTS):
        engine.publish(f"expert{expert}", load_expert(folder, expert))
    (folder / "weights").write_bytes(engine.descriptor)
    return engine


def read_expert(engine, expert: int) -> dict:
    """Does what `load_expert` does, from the memory of the process that has published the experts."""
    import numpy as np

    found = engine.read(engine.peer("weights")[f"expert{max(expert, 0)}"], timeout=TIMEOUT_S)
    return {name: np.asarray(array) * (expert >= 0) for name, array in found.items()}


# -- the decoder -------------------------------------------------------------------------------------------------------


def empty_cache(rows: int = ROWS):
    """Returns what a step changes, all zeros: `kv`, keys and values of all layers, float32 `[LAYERS, 2, rows, LENGTH,
    HIDDEN]`, and `counts`, int32 `[EXPERTS]`, in which each expert's tokens are added up."""
    import jax.numpy as jnp

    return {"kv": jnp.zeros((LAYERS, 2, rows, LENGTH, HIDDEN), jnp.float32), "counts": jnp.zeros(EXPERTS, jnp.int32)}


def decode_step(dense, cache, tokens, positions, used, moe):
    """Returns the next token of each row, int32 `[rows]`, and the cache. A step that runs again returns the same, but
    for the counts.

    Args:
      dense: the weights that `load_dense` returns.
      cache: as of `empty_cache`.
      tokens, positions: int32 `[rows]`.
      used: bool `[rows]`, False for a row without a request.
      moe: `moe(layer, x [rows, HIDDEN], topk_idx, topk_weights) -> [rows, HIDDEN]`.
    """
    import jax
    import jax.numpy as jnp

    import xen_moe_jax as xm

    def norm(x):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)

    rows = jnp.arange(len(tokens))
    visible = jnp.arange(LENGTH) <= positions[:, None]
    x = dense["embedding"][tokens] + dense["position"][positions]
    kv, counts = cache["kv"], cache["counts"]
    for layer in range(LAYERS):
        query, key, value, out = dense["attention"][layer]
        h = norm(x)
        kv = kv.at[layer, 0, rows, positions].set(h @ key).at[layer, 1, rows, positions].set(h @ value)
        scores = jnp.einsum("bh,bsh->bs", h @ query, kv[layer, 0]) / HIDDEN**0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        x = x + jnp.einsum("bs,bsh->bh", weights, kv[layer, 1]) @ out
        h = norm(x)
        chosen, experts = jax.lax.top_k(jax.nn.softmax(h @ dense["router"][layer], axis=-1), TOP_K)
        experts = jnp.where(used[:, None], experts, -1).astype(jnp.int32)
        x = x + moe(layer, h, experts, chosen)
        counts = counts + xm.balance.count(experts, EXPERTS)
    return jnp.argmax(norm(x) @ dense["out"], axis=-1).astype(jnp.int32), {"kv": kv, "counts": counts}


def make_step(axis_name: str, kernels: bool, timeout_s: float = TIMEOUT_S):
    """Returns the jitted step of a rank, `step(dense, experts, cache, tokens, positions, used, active, placement)`,
    which takes over `cache`'s memory.

    `kernels`: True lets GPUs store into each other's memory; False sends rows through the host. `timeout_s`: seconds
    that kernels wait for a rank.
    """
    import jax

    import xen_moe_jax as xm

    if kernels:
        config = xm.KernelConfig(backend="cuda", timeout_s=timeout_s)
    else:
        config = xm.KernelConfig(chunk_tokens=ROWS * TOP_K)  # all rows in one round: a round costs more than its rows

    def step(dense, experts, cache, tokens, positions, used, active, placement):
        def moe(layer, x, topk_idx, topk_weights):
            routed = xm.dispatch(
                x, topk_idx, topk_weights, num_experts=EXPERTS, axis_name=axis_name, active=active,
                placement=placement, config=config,
            )  # fmt: skip
            hidden = jax.lax.ragged_dot(routed.x, experts["gate_up"][layer], routed.group_sizes)
            gate, up = hidden[:, :WIDTH], hidden[:, WIDTH:]
            y = jax.lax.ragged_dot(jax.nn.silu(gate) * up, experts["down"][layer], routed.group_sizes)
            return xm.combine(y, routed.handle, config=config)

        return decode_step(dense, cache, tokens, positions, used, moe)

    return jax.jit(step, donate_argnums=2)


def expected_tokens(folder: pathlib.Path, prompts: list[list[int]], totals: list[int]) -> list[list[int]]:
    """Returns the tokens that one process without ranks computes for each prompt; it applies each expert to all
    tokens, and decodes `BATCH` requests at the same time."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    loaded = [load_expert(folder, e) for e in range(EXPERTS)]
    experts = {name: jnp.stack([e[name] for e in loaded], axis=1) for name in loaded[0]}
    dense = jax.tree.map(jnp.asarray, load_dense(folder))

    def moe(layer, x, topk_idx, topk_weights):
        hidden = jnp.einsum("bh,ehf->bef", x, experts["gate_up"][layer])
        y = jax.nn.silu(hidden[..., :WIDTH]) * hidden[..., WIDTH:]
        y = jnp.einsum("bef,efh->beh", y, experts["down"][layer])
        return jnp.einsum("bkh,bk->bh", jnp.take_along_axis(y, topk_idx[..., None], axis=1), topk_weights)

    @jax.jit
    @jax.default_matmul_precision("highest")  # as in the ranks' processes
    def step(cache, tokens, position):
        return decode_step(dense, cache, tokens, jnp.full(BATCH, position), jnp.ones(BATCH, bool), moe)

    found = []
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
        known, lengths = np.zeros((BATCH, LENGTH), np.int32), np.ones(BATCH, np.int32)
        for row, prompt in enumerate(some):
            known[row, : len(prompt)], lengths[row] = prompt, len(prompt)
        cache = empty_cache(BATCH)
        for position in range(LENGTH - 1):
            out, cache = step(cache, known[:, position], position)
            known[:, position + 1] = np.where(position + 1 < lengths, known[:, position + 1], out)
        found += known.tolist()
    return [tokens[:total] for tokens, total in zip(found, totals, strict=False)]
