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
import json
import multiprocessing.connection
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from elastic_decoder import (
    EXPERTS,
    ROWS,
    SLOTS,
    TIMEOUT_S,
    VOCAB,
    empty_cache,
    expected_tokens,
    load_dense,
    load_expert,
    make_checkpoint,
    make_step,
    publish_experts,
    read_expert,
)

COUNT_STEPS = 32
"""Steps after which a rank tells the front how many tokens each expert has had."""
LEFT_OUT = 3
"""Exit status of a rank without which the others went on."""


class Settings(NamedTuple):
    """Holds the settings of all processes of a server. `kernels`: see `make_step`. `gpus`: number of GPUs, which the
    ranks take in turn. `timeout_s`: as in `elastic.Group`."""

    folder: str
    ranks: int
    kernels: bool = False
    gpus: int = 1
    timeout_s: float = TIMEOUT_S


# -- a rank ------------------------------------------------------------------------------------------------------------


class Row:
    """A request on a rank: its `known` tokens, prompt first. The next step takes the token at `position`."""

    def __init__(self, request: int, known: list[int], total: int) -> None:
        self.request, self.known, self.total, self.position = request, known, total, 0


class Rank:
    """The process of one rank."""

    def __init__(self, settings: Settings, slot: int) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import xen_moe_jax as xm

        jax.config.update("jax_default_matmul_precision", "highest")  # a GPU rounds float32 otherwise
        if settings.gpus > 1:  # JAX uses the first visible GPU; CUDA sees all GPUs, so that kernels reach their memory
            jax.config.update("jax_cuda_visible_devices", "0")
        ranks, timeout_s = settings.ranks, settings.timeout_s
        self.folder, self.engine = (folder := pathlib.Path(settings.folder)), None
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
        self.run = make_step(self.group.axis_name, settings.kernels, timeout_s)
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
        """Listens to JAX's events after the warm-up; raises RuntimeError for a compilation."""
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
            if message[0] == "plan":  # for all ranks: the group tells the others
                self.group.rebalance(xm.balance.from_experts(message[1], EXPERTS))
                continue
            self.rows[self.rows.index(None)] = Row(*message)
        return True

    def adopt(self, change, step: int, began: float) -> int:
        """Loads the experts that `change.fetch` names, and tells the front of the change. Returns the step to run.
        `step`: the step that this rank was to run. `began`: when this rank stopped for the change."""
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

    rank = Rank(Settings(*json.loads(given.settings)), given.rank)
    try:
        rank.serve(given.start_with)
    except xm.elastic.Evicted as error:
        print(f"rank {given.rank}: {error}", flush=True)
        os._exit(LEFT_OUT)  # the others go on in memory that this process has mapped, too: it touches nothing more


# -- the front ---------------------------------------------------------------------------------------------------------


class Front:
    """Starts ranks, hands out requests, collects tokens, and knows which rank has which request."""

    def __init__(self, settings: Settings) -> None:
        import xen_moe_jax  # noqa: F401  # `rebalance` needs it, and no token is taken while it is loaded

        self.settings, self.folder, self.ranks = settings, pathlib.Path(settings.folder), settings.ranks
        self.listener = multiprocessing.connection.Listener(str(self.folder / "front"), "AF_UNIX", backlog=self.ranks)
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
        environment, gpus = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, self.settings.gpus
        if self.settings.kernels:  # a rank has one GPU, also where more are visible
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[(slot + i) % gpus] for i in range(gpus))
        arguments = ["--rank", str(slot), "--start-with", str(start_with), "--settings", json.dumps(self.settings)]
        self.processes[slot] = subprocess.Popen([sys.executable, __file__, *arguments], env=environment)
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
        last plan, and gives the plan to one member. Does nothing where no token was counted, or where the members have
        too few slots for all experts."""
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
        with contextlib.suppress(OSError):  # that rank has ended: the caller plans again
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
    ranks: int = 3,
    seconds: float = 2.0,
    plot: str | None = None,
    kernels: bool = False,
    transfer: bool = False,
    gpus: int = 1,
) -> dict:
    """Serves for about `seconds`: a rank is killed after a quarter of the time, and started again at once. When it has
    come back, the experts are placed anew.

    `kernels`, `gpus`: see `Settings`. `transfer`: ranks read experts from this process (`publish_experts`).

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
        with engine, Front(Settings(str(folder), ranks, kernels, gpus)) as front:
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
    parser.add_argument("--start-with", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is None and not 2 <= given.ranks <= 256:
        parser.error(f"--ranks {given.ranks}: must be 2 to 256: one is killed, and the others go on")
    if given.gpus < 1:
        parser.error(f"--gpus {given.gpus}: must be at least 1")
    if given.plot and not os.access(pathlib.Path(given.plot).absolute().parent, os.W_OK):  # before the run, not after
        parser.error(f"--plot {given.plot}: no folder that can be written; name another file")
    if given.rank is not None:
        rank_main(given)
    else:
        outcome = main(given.ranks, given.seconds, given.plot, given.kernels, given.transfer, given.gpus)
        outcome["all right"] = outcome.pop("tokens") == outcome.pop("expected")
        print(outcome)
