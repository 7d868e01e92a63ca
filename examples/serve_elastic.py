"""A server that outlives its ranks: requests in, tokens out, while ranks are killed and come back.

    python -m examples.serve_elastic --ranks 4 --seconds 30 --plot tokens.png     # kills a rank, and prints all PIDs
    kill -9 PID                               # to kill another one by hand; the front starts it again, too

The front process hands each request to one rank and collects tokens. Every rank is a process with a JAX runtime of its
own (`xm.elastic`), which decodes its requests with a small decoder: attention over its own KV cache, experts spread
over all ranks, most of them with a replica. When a rank is killed, the others retract the step under way, agree on the
ranks that are left, load the experts that have no replica from the checkpoint, and run the step again: the same
program, the same tokens. The front gives the lost rank's requests, with the tokens that were delivered, to the other
ranks. A rank that is started loads, compiles and warms up alone, and is let in between two steps. Ranks count tokens by
expert; the front plans anew which rank holds which experts, and all ranks go over to that between two steps, with the
same program.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

VOCAB, HIDDEN, LAYERS, EXPERTS, TOP_K, WIDTH = 64, 32, 2, 8, 2, 32
SLOTS = 4
"""Slots for experts on a rank: two ranks can hold all experts."""
ROWS, LENGTH = 4, 48
"""Requests that a rank decodes at the same time, and tokens of the longest request."""
COUNT_STEPS = 32
"""Steps after which a rank tells the front how many tokens each expert has had."""
BATCH = 64
"""Requests that `expected_tokens` decodes at the same time."""
TIMEOUT_S = 20.0
LEFT_OUT = 3
"""Exit status of a rank without which the others went on."""


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
    import numpy as np

    decode, found = _plain(folder), []
    for first in range(0, len(prompts), BATCH):
        some = prompts[first : first + BATCH]
        known = np.zeros((BATCH, LENGTH), np.int32)
        for row, prompt in enumerate(some):
            known[row, : len(prompt)] = prompt
        lengths = np.asarray([len(prompt) for prompt in some] + [1] * (BATCH - len(some)), np.int32)
        found += np.asarray(decode(known, lengths)).tolist()
    return [tokens[:total] for tokens, total in zip(found, totals, strict=False)]


def _plain(folder: pathlib.Path):
    """Returns `decode(known [BATCH, LENGTH], lengths [BATCH])`, which continues prompts of these lengths."""
    import jax
    import jax.numpy as jnp

    loaded = [load_expert(folder, e) for e in range(EXPERTS)]
    experts = {name: jnp.stack([e[name] for e in loaded], axis=1) for name in loaded[0]}
    dense = jax.tree.map(jnp.asarray, load_dense(folder))

    def moe(layer, x, topk_idx, topk_weights):
        hidden = jnp.einsum("bh,ehf->bef", x, experts["gate_up"][layer])
        y = jax.nn.silu(hidden[..., :WIDTH]) * hidden[..., WIDTH:]
        y = jnp.einsum("bef,efh->beh", y, experts["down"][layer])
        return jnp.einsum("bkh,bk->bh", jnp.take_along_axis(y, topk_idx[..., None], axis=1), topk_weights)

    @jax.default_matmul_precision("highest")  # as in the ranks' processes
    def decode(known, lengths):
        def step(carry, position):
            known, cache = carry
            positions = jnp.full(BATCH, position)
            out, cache = decode_step(dense, cache, known[:, position], positions, jnp.ones(BATCH, bool), moe)
            following = jnp.where(position + 1 < lengths, known[:, position + 1], out)
            return (known.at[:, position + 1].set(following), cache), None

        return jax.lax.scan(step, (known, empty_cache(BATCH)), jnp.arange(LENGTH - 1))[0][0]

    return jax.jit(decode)


# -- a rank ------------------------------------------------------------------------------------------------------------


class Row:
    """A request on a rank: its `known` tokens, prompt first. The next step takes the token at `position`."""

    def __init__(self, request: int, known: list[int], total: int) -> None:
        self.request, self.known, self.total, self.position = request, known, total, 0


class Rank:
    """The process of one rank. `timeout_s`: as in `elastic.Group`."""

    def __init__(
        self,
        folder: pathlib.Path,
        ranks: int,
        slot: int,
        kernels: bool = False,
        gpus: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import xen_moe_jax as xm

        jax.config.update("jax_default_matmul_precision", "highest")  # a GPU rounds float32 otherwise
        if gpus > 1:  # JAX uses the first visible GPU; CUDA sees all GPUs, so that kernels reach their memory
            jax.config.update("jax_cuda_visible_devices", "0")
        self.folder, self.engine = folder, None
        if (folder / "weights").exists():
            import xen_moe_jax.transfer as xt

            self.engine = xt.Engine(name=f"rank{slot}-{os.getpid()}")
            self.engine.connect((folder / "weights").read_bytes(), timeout=TIMEOUT_S)
        self.front = multiprocessing.connection.Client(str(folder / "front"), "AF_UNIX")
        self.front.send(slot)
        base = xm.balance.plan(np.ones(EXPERTS), num_ranks=ranks, slots_per_rank=SLOTS, min_replicas=1)
        self.group = xm.elastic.Group(folder / "group", ranks, slot=slot, placement=base, timeout_s=timeout_s)
        self.dense = jax.tree.map(jnp.asarray, load_dense(folder))
        loaded = [self.load(int(e)) for e in self.group.experts]
        self.experts = {name: jnp.stack([e[name] for e in loaded], axis=1) for name in loaded[0]}
        self.put = jax.jit(
            lambda all_of, one, slot: jax.tree.map(lambda a, b: a.at[:, slot].set(b), all_of, one), donate_argnums=0
        )
        self.run = make_step(self.group.axis_name, kernels, timeout_s)
        self.cache, self.rows, self.advanced, self.ending = empty_cache(), [None] * ROWS, [], False
        self.counted = np.zeros(EXPERTS, np.int32)
        self.now_members()
        for slot_of_mine in range(SLOTS):  # warm up, alone
            self.put_expert(slot_of_mine, int(self.group.experts[slot_of_mine]))
        for _ in range(2):  # the second step takes the cache that the first one returned, as all later steps do
            self.step()
        xm.check()
        jax.monitoring.register_event_duration_secs_listener(self.note_compilation)

    @staticmethod
    def note_compilation(event: str, seconds: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            raise RuntimeError(f"something was compiled after the warm-up, for {seconds:.1f} s")

    def load(self, expert: int) -> dict:
        """Returns the weights of an expert, from the front's memory or from the checkpoint."""
        return load_expert(self.folder, expert) if self.engine is None else read_expert(self.engine, expert)

    def now_members(self) -> None:
        """Puts the mask of the members and the placement, operands of the step, on the device."""
        import jax

        self.members = jax.device_put((self.group.active(), self.group.placement))

    def put_expert(self, slot: int, expert: int) -> None:
        """Loads the weights of an expert into a slot of this rank."""
        import numpy as np

        self.experts = self.put(self.experts, self.load(expert), np.int32(slot))

    def step(self):
        """Runs a step; returns the next token of each row, which must not be used where `xm.check()` then raises."""
        import jax
        import numpy as np

        rows = [row or Row(-1, [0], 0) for row in self.rows]
        tokens = np.asarray([row.known[row.position] for row in rows], np.int32)
        positions = np.asarray([row.position for row in rows], np.int32)
        used = np.asarray([row is not None for row in self.rows])
        out, self.cache = self.run(self.dense, self.experts, self.cache, tokens, positions, used, *self.members)
        return jax.device_get(out)

    def commit(self, step: int, out) -> None:
        """Sends the step's tokens to the front, once the step is known to be good on every rank."""
        import jax

        said, self.advanced = [], []
        for place, row in enumerate(self.rows):
            if row is None:
                continue
            row.position += 1
            self.advanced.append(row)
            if row.position == len(row.known):
                row.known.append(int(out[place]))
                said.append((row.request, row.position, row.known[-1]))
            if row.position + 1 >= row.total:
                self.rows[place] = None
        if said:
            self.front.send(("tokens", said))
        if step % COUNT_STEPS == 0:
            counts = jax.device_get(self.cache["counts"])
            self.front.send(("counts", (counts - self.counted).tolist()))
            self.counted = counts

    def take_requests(self) -> bool:
        """Takes new requests, and perhaps a plan, from the front. Returns False once the front has told this rank to
        end."""
        import xen_moe_jax as xm

        while self.front.poll():
            message = self.front.recv()
            if message is None:
                return False
            if message == "end":
                self.ending = True
                self.front.send(("ending",))
                continue
            if message[0] == "plan":  # for all ranks; the group tells them
                self.group.rebalance(xm.balance.from_experts(message[1], EXPERTS))
                continue
            self.rows[self.rows.index(None)] = Row(*message)
        return True

    def adopt(self, change, step: int, began: float) -> int:
        """Loads the experts that `change.fetch` names; returns the step to run."""
        for slot, expert in change.fetch:
            self.put_expert(slot, expert)
        self.now_members()
        if change.step < step:  # some rank has not completed the last step: all run it again, and send no token twice
            for row in self.advanced:
                row.position -= 1
        self.advanced = []
        stopped = time.monotonic() - began
        experts = self.group.placement.experts.tolist()
        self.front.send(("change", change.view, change.joined, change.lost, len(change.fetch), stopped, experts))
        return change.step

    def serve(self, start_with: int) -> None:
        """Joins the group, and decodes requests until the front tells this rank to end."""
        import xen_moe_jax as xm

        self.front.send(("ready", time.monotonic()))
        change = self.group.join(start_with=start_with, timeout_s=120.0)
        step = self.adopt(change, 0, time.monotonic())
        while self.take_requests():
            began = time.monotonic()
            if (change := self.group.boundary(step)) is not None:
                step = self.adopt(change, step, began)
            out = self.step()
            try:
                xm.check()
            except xm.OperationFailed as error:
                if self.ending:  # a rank has ended before this one
                    break
                print(f"rank {self.group.rank}: {error}", flush=True)
                began = time.monotonic()
                step = self.adopt(self.group.recover(step), step, began)
                continue
            self.commit(step, out)
            step += 1
        self.group.close()
        xm.check()  # a group that is closed has no failure
        if self.engine is not None:
            self.engine.close()


def rank_main(given: argparse.Namespace) -> None:
    """Runs the process of one rank."""
    import xen_moe_jax as xm

    rank = Rank(given.folder, given.ranks, given.rank, given.kernels, given.gpus, given.timeout)
    try:
        rank.serve(given.start_with)
    except xm.elastic.Evicted as error:
        print(f"rank {given.rank}: {error}", flush=True)
        os._exit(LEFT_OUT)  # the others go on in memory that this process has mapped, too: it touches nothing more


# -- the front ---------------------------------------------------------------------------------------------------------


class Front:
    """Starts ranks, hands out requests, collects tokens, and knows which rank has which request. `timeout_s`: as in
    `elastic.Group`."""

    def __init__(
        self,
        folder: pathlib.Path,
        ranks: int,
        kernels: bool = False,
        gpus: int = 1,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.folder, self.ranks, self.kernels, self.gpus, self.timeout_s = folder, ranks, kernels, gpus, timeout_s
        import xen_moe_jax  # noqa: F401  # `rebalance` needs it, and no token is taken while it is loaded

        self.listener = multiprocessing.connection.Listener(str(folder / "front"), "AF_UNIX", backlog=ranks)
        self.processes: dict[int, subprocess.Popen] = {}
        self.links: dict[int, multiprocessing.connection.Connection] = {}
        self.tokens: dict[int, list[int]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.totals: dict[int, int] = {}
        self.where: dict[int, int] = {}
        self.waiting: collections.deque[int] = collections.deque()
        self.members: set[int] = set()
        self.ending: set[int] = set()
        self.ended: dict[int, int] | None = None
        self.counts, self.experts, self.planned = [0] * EXPERTS, None, 0
        self.log: list[tuple[float, str, object]] = []
        """Events: time, kind and content. Kinds are "tokens" (content: their number), "kill", "start", "ready",
        "change", "lost" and "plan" (content: rows of the busiest rank over their mean, before and after it)."""

    def start(self, slot: int, start_with: int = 1) -> None:
        """Starts the process of a rank."""
        arguments = ["--rank", str(slot), "--folder", str(self.folder), "--ranks", str(self.ranks)]
        arguments += ["--gpus", str(self.gpus), "--timeout", str(self.timeout_s)] + ["--kernels"] * self.kernels
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        if self.gpus > 1:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(self.gpus)))).split(",")
            order = [visible[(slot + i) % self.gpus] for i in range(self.gpus)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(order)
        self.processes[slot] = subprocess.Popen(
            [sys.executable, __file__, *arguments, "--start-with", str(start_with)], env=environment
        )
        self.note("start", slot)

    def restart(self) -> None:
        """Starts the ranks again whose processes were killed, by hand or by the others. Nothing is started while the
        group has no member.

        Raises:
          RuntimeError: a rank has ended with an error, which it would repeat.
        """
        for slot, process in self.processes.items():
            status = process.poll()
            if status is not None and slot not in self.links and self.members:
                if status >= 0 and status != LEFT_OUT:
                    raise RuntimeError(f"rank {slot} has ended by itself with status {status}")
                self.start(slot)

    def note(self, kind: str, what: object) -> None:
        """Adds an event to the log."""
        self.log.append((time.monotonic(), kind, what))

    def submit(self, prompt: list[int], total: int) -> int:
        """Queues a request for `total` tokens, with the prompt. Returns its number; `tokens[number]` has its tokens."""
        number = len(self.tokens)
        self.prompts[number], self.tokens[number], self.totals[number] = list(prompt), list(prompt), total
        self.waiting.append(number)
        return number

    def kill(self, slot: int) -> None:
        """Kills the process of a rank, and notes it in the log."""
        self.processes[slot].kill()
        self.members.discard(slot)
        self.note("kill", slot)

    def pump(self, seconds: float) -> None:
        """Gives waiting requests to ranks that have room, and takes messages of ranks for at most `seconds`."""
        self._hand_out()
        links = {link: slot for slot, link in self.links.items()}
        listening = self.listener._listener._socket
        for found in multiprocessing.connection.wait([listening, *links], seconds):
            if found is listening:
                self._welcome()
                continue
            try:
                self._hear(links[found], found.recv())
            except (EOFError, OSError):
                self._lost(links[found])

    def _welcome(self) -> None:
        link = self.listener.accept()
        try:
            slot = link.recv()
        except (EOFError, OSError):
            return
        self.links[slot] = link

    def _hear(self, slot: int, message: tuple) -> None:
        kind, *rest = message
        if kind == "counts":
            self.counts = [a + b for a, b in zip(self.counts, rest[0], strict=True)]
        elif kind == "tokens":
            new = 0
            for request, place, token in rest[0]:
                have = self.tokens[request]
                if self.where.get(request) == slot and place == len(have):
                    have.append(token)
                    new += 1
                    if len(have) >= self.totals[request]:
                        del self.where[request]
            self.note("tokens", new)
        else:
            if kind == "change":
                self.experts = rest.pop()
                self.members.add(slot)
                self.planned += slot == min(self.members) and not rest[1] and not rest[2]
            elif kind == "ending":
                self.ending.add(slot)
            self.note(kind, (slot, *rest))

    def _lost(self, slot: int) -> None:
        self.links.pop(slot).close()
        self.members.discard(slot)
        self.note("lost", slot)
        back = [request for request, rank in self.where.items() if rank == slot]
        for request in back:
            del self.where[request]
        self.waiting.extendleft(reversed(back))

    def _hand_out(self) -> None:
        while self.waiting and self.members:
            load = collections.Counter(self.where.values())
            slot = min(self.members, key=lambda member: (load[member], member))
            if load[slot] >= ROWS:
                return
            request = self.waiting.popleft()
            self.where[request] = slot
            try:
                self.links[slot].send((request, self.tokens[request], self.totals[request]))
            except OSError:
                self._lost(slot)

    def rebalance(self) -> None:
        """Plans for the present members which rank holds which experts, from the tokens that were counted since the
        last plan, and gives the plan to one of them. Does nothing where nothing was counted, or too few are left."""
        import numpy as np

        import xen_moe_jax as xm

        if not any(self.counts) or len(self.members) * SLOTS < EXPERTS:
            return
        alive = np.asarray([slot in self.members for slot in range(self.ranks)])
        plan = xm.balance.plan(self.counts, self.ranks, SLOTS, alive=alive)
        both = [xm.balance.from_experts(self.experts, EXPERTS).without(alive), plan]
        rows = [np.append(self.counts / np.maximum(one.num_replicas, 1), 0)[one.experts].sum(axis=1) for one in both]
        self.note("plan", [float(one.max() / one[alive].mean()) for one in rows])
        self.counts = [0] * EXPERTS
        with contextlib.suppress(OSError):  # it has ended: the caller asks again
            self.links[min(self.members)].send(("plan", plan.experts.tolist()))

    def done(self) -> bool:
        """Returns True if no request waits or is being decoded."""
        return not self.waiting and not self.where

    def close(self) -> dict[int, int]:
        """Tells the ranks to end, and first that they will, so that none of them waits for those that have ended.
        Returns their exit statuses by slot. A rank that is still starting is killed."""
        if self.ended is not None:
            return self.ended
        limit = time.monotonic() + TIMEOUT_S
        told: set[int] = set()
        while self.members - self.ending and time.monotonic() < limit:
            self._tell("end", self.members - told)  # also those that come in now
            told |= self.members
            self.pump(0.1)
        members = sorted(self.members)
        self._tell(None, self.members)
        limit = time.monotonic() + TIMEOUT_S
        for slot in members:
            try:
                self.processes[slot].wait(max(0.01, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.processes[slot].send_signal(signal.SIGABRT)  # PYTHONFAULTHANDLER=1 lets it say where it is
        time.sleep(0.5 * any(self.processes[slot].poll() is None for slot in members))
        for process in self.processes.values():
            process.kill()  # nothing happens to those that have ended
            process.wait()
        self.listener.close()
        self.ended = {slot: self.processes[slot].returncode for slot in members}
        return self.ended

    def _tell(self, message: object, slots: set[int]) -> None:
        for slot in slots:
            with contextlib.suppress(OSError):
                self.links[slot].send(message)

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- a run -------------------------------------------------------------------------------------------------------------


def main(
    ranks: int = 4,
    seconds: float = 8.0,
    plot: str | None = None,
    kernels: bool = False,
    transfer: bool = False,
    gpus: int = 1,
) -> dict:
    """Serves for about `seconds`: a rank is killed after a quarter of the time, and started again at once. When it has
    come back, the experts are placed anew.

    `kernels`: see `make_step`. `transfer`: ranks read experts from this process (`publish_experts`). `gpus`: number of
    GPUs, which the ranks take in turn.

    Returns:
      `tokens` and `expected`: for each request the list of its tokens, and of the tokens that it should have.
      `pause_s`: the longest time without a token in the five seconds after the kill. `let_in_s`: seconds from the
      newcomer's being ready to its first step. `stopped_s`: the longest time for which another rank stopped for it.
      `busiest`: rows of the busiest rank over their mean, before and after the new plan. `planned_s`: the longest time
      for which a rank stopped for it. `ended`: the exit statuses of the ranks.
    """
    folder = pathlib.Path(tempfile.mkdtemp(prefix="xen_moe_serve_", dir="/dev/shm"))
    try:
        make_checkpoint(folder)
        engine = publish_experts(folder) if transfer else contextlib.nullcontext()
        with engine, Front(folder, ranks, kernels, gpus) as front:
            _serve(front, seconds)
            result = _report(front)
            result["ended"] = list(front.close().values())
        if plot:
            draw(front, plot)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serve(front: Front, seconds: float) -> None:
    for slot in range(front.ranks):
        front.start(slot, start_with=front.ranks)
    while len(front.members) < front.ranks:
        front.pump(0.1)
        if any(process.poll() is not None for process in front.processes.values()):
            raise RuntimeError("a rank has ended before it was ready")
    print("ranks:", {slot: process.pid for slot, process in front.processes.items()}, flush=True)
    began, victim, killed, asked = time.monotonic(), front.ranks - 1, False, 0.0
    back = False
    while time.monotonic() - began < seconds or not front.planned or not front.done():
        if time.monotonic() - began < seconds or not front.planned:
            while len(front.waiting) < front.ranks:
                number = len(front.tokens)
                front.submit([number % VOCAB, (7 * number + 3) % VOCAB], 12 + number % 24)
        front.pump(0.02)
        if not killed and time.monotonic() - began > seconds / 4:
            front.kill(victim)
            killed = True
        front.restart()
        back = killed and victim in front.members
        if back and not front.planned and time.monotonic() - asked > 5:
            asked = time.monotonic()
            front.rebalance()


def _report(front: Front) -> dict:
    expected = expected_tokens(front.folder, list(front.prompts.values()), list(front.totals.values()))
    times = [t for t, kind, _ in front.log if kind == "tokens"]
    killed = next(t for t, kind, _ in front.log if kind == "kill")
    after = [killed, *(t for t in times if killed < t < killed + 5)]
    ready = next(t for t, kind, what in front.log if kind == "ready" and t > killed)
    joined = next(t for t, kind, what in front.log if kind == "change" and t > ready)
    changes = [w for t, kind, w in front.log if kind == "change" and t > ready]
    return {
        "tokens": list(front.tokens.values()),
        "expected": expected,
        "pause_s": max(b - a for a, b in zip(after, after[1:], strict=False)),
        "let_in_s": joined - ready,
        "stopped_s": max(w[-1] for w in changes if w[2] and w[0] != front.ranks - 1),
        "busiest": [what for _, kind, what in front.log if kind == "plan"][-1],
        "planned_s": max(w[-1] for w in changes if not w[2] and not w[3]),
    }


def draw(front: Front, path: str | pathlib.Path) -> None:
    """Writes a picture of tokens per second over time, with kills, starts, plans and the moments at which ranks were
    ready."""
    from matplotlib.figure import Figure

    first = min(t for t, kind, _ in front.log if kind == "tokens")
    width = 0.25
    bins = collections.Counter()
    for t, kind, what in front.log:
        if kind == "tokens":
            bins[int((t - first) / width)] += what
    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    axes.step([i * width for i in range(max(bins) + 1)], [bins[i] / width for i in range(max(bins) + 1)], where="post")
    colors = {"kill": "red", "start": "gray", "ready": "green", "plan": "blue"}
    events = [(t, kind, what) for t, kind, what in front.log if t >= first and kind in colors]
    for t, kind, what in events:
        axes.axvline(t - first, color=colors[kind], linestyle=":")
        if len(events) < 12:  # else names would cover each other
            rank = what[0] if isinstance(what, tuple) else what
            text = kind if kind == "plan" else f"{kind} rank {rank}"
            axes.text(t - first, axes.get_ylim()[1], text, rotation=90, va="top", fontsize=8)
    axes.set(xlabel="seconds", ylabel="tokens/s", ylim=(0, None))
    figure.savefig(path, bbox_inches="tight")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--plot", metavar="FILE.png")
    parser.add_argument("--kernels", action="store_true", help="on GPUs: by CUDA kernels, not through the host")
    parser.add_argument("--gpus", type=int, default=1, help="with --kernels: the ranks take these GPUs in turn")
    parser.add_argument("--transfer", action="store_true", help="ranks read experts from the front, not from files")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--start-with", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given)
    else:
        outcome = main(given.ranks, given.seconds, given.plot, given.kernels, given.transfer, given.gpus)
        outcome["all right"] = outcome.pop("tokens") == outcome.pop("expected")
        print(outcome)
