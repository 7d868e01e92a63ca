"""The server of `examples/serve_elastic.py` under fire: ranks that decode are killed at random moments and started
again, and every token is compared with the token that one process without ranks computes.

    JAX_PLATFORMS=cpu python -m tests.elastic.serve_chaos --kills 60 --seed 1 [--stops]

With `--stops`, members are also stopped at any moment: some wake soon, some after the others have gone on without them,
and some are killed while they are stopped, by the others or by this program.

A rank that is started compiles its programs, which takes seconds of a core: hundreds of kills take hours with this
server, and a minute with `tests/elastic/chaos.py`, whose members have no programs.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import random
import shutil
import signal
import tempfile
import time
from unittest import mock

from tests.support import ROOT, quick_compiler

SHORT_S = 1.5
"""Time limit of a group whose members are stopped, seconds."""
STILL_S = 300.0
"""Seconds without a token that count as a hang. Members that cannot hold all experts wait for a rank that compiles."""


def example():
    """The module of the example."""
    spec = importlib.util.spec_from_file_location("serve_elastic", ROOT / "examples" / "serve_elastic.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(
    ranks: int,
    kills: int,
    seed: int,
    least: int = 2,
    seconds: float = 1e9,
    kernels: bool = False,
    transfer: bool = False,
    gpus: int = 1,
    later: int = 0,
    plot: pathlib.Path | None = None,
    stops: bool = False,
) -> dict:
    """Serves until `kills` ranks have been killed, or `seconds` have gone by. The last `later` of the ranks were never
    there when the group begins. `transfer`: ranks read experts from this process's memory, and ranks that start after
    half of the kills from the checkpoint. `plot`: file for a picture (`serve_elastic.draw`). `stops`: stops ranks, too.

    Returns:
      kills, joins, requests, tokens: their numbers. wrong: requests with another token than expected. fetched: experts
      that ranks have loaded because no rank that was left held them, or for a new plan. ended: exit statuses of the
      ranks that were told to end. Lists of seconds: pause_s, from a kill to the next token; ready_s, from a rank's
      start to its being ready; let_in_s, from a newcomer's being ready to its first step; stopped_s, for which the
      other ranks stopped for it; planned_s, for which ranks stopped to place the experts anew; agreed_s, from a failed
      step to the next one. With `stops` also left_out_s, from the stop of a rank to the next token of the others, which
      went on without it; and the numbers stops, left_out and starved: ranks that were stopped, ranks of these without
      which the others went on, and ranks that were not stopped and without which the others went on all the same.

    Raises:
      RuntimeError: a rank ended by itself, or no token came for `STILL_S`.
    """
    serve = example()
    rng = random.Random(seed)
    folder = pathlib.Path(tempfile.mkdtemp(prefix="xen_moe_serve_", dir="/dev/shm"))
    killed: list[float] = []
    counts = {"stops": 0, "left_out": [], "starved": 0} if stops else {}
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}  # as servers do; not for calls of the host
    try:
        serve.make_checkpoint(folder)
        engine = serve.publish_experts(folder) if transfer else contextlib.nullcontext()
        limit = SHORT_S if stops else serve.TIMEOUT_S
        settings = serve.Settings(str(folder), ranks, kernels, gpus, limit)
        with mock.patch.dict(os.environ, cache), engine, serve.Front(settings) as front:
            for slot in range(ranks - later):
                front.start(slot, start_with=ranks - later)
            began = last = time.monotonic()
            next_kill, seen = 0.0, 0
            ended: set[int] = set()  # PIDs
            stopped: dict[int, tuple[int, float, float]] = {}  # PID, when it was stopped, and when it goes on, by slot
            while len(killed) < kills and time.monotonic() - began < seconds or not front.done():
                now = time.monotonic()
                if transfer and len(killed) * 2 >= kills:
                    (folder / "weights").unlink(missing_ok=True)
                if len(killed) < kills and now - began < seconds:
                    while len(front.waiting) < 2:
                        number = len(front.tokens)
                        front.submit([rng.randrange(serve.VOCAB) for _ in range(1 + number % 5)], 8 + number % 40)
                front.pump(0.01)
                for slot, process in front.processes.items():
                    if process.poll() is not None and process.pid not in ended:
                        if not stops or process.returncode not in (serve.LEFT_OUT, -signal.SIGKILL):
                            raise RuntimeError(f"rank {slot} has ended by itself with {process.returncode}")
                        ended.add(process.pid)
                        pid, when, _ = stopped.pop(slot, (0, 0.0, 0.0))
                        if pid == process.pid:
                            counts["left_out"].append((slot, when))
                        else:
                            counts["starved"] += 1
                for slot, (pid, _, until) in stopped.items():
                    if now > until and pid not in ended:
                        front.processes[slot].send_signal(signal.SIGCONT)
                tokens = sum(what for _, kind, what in front.log[seen:] if kind == "tokens")
                seen = len(front.log)
                last = now if tokens or not front.where else last
                if now - last > STILL_S:
                    raise RuntimeError(f"no token for {STILL_S:g} s; members {front.members}")
                spare = len(front.members) - least
                if spare > 0 and now > next_kill and len(killed) < kills:
                    victims = rng.sample(sorted(front.members), min(spare, 1 + (rng.random() < 0.2)))
                    starting = sorted({s for s, p in front.processes.items() if p.poll() is None} - front.members)
                    if starting and rng.random() < 0.2:
                        victims.append(rng.choice(starting))
                    next_kill = now + 0.8 * rng.random()
                    if stops and rng.random() < 0.25:
                        slot = victims[0]
                        front.processes[slot].send_signal(signal.SIGSTOP)
                        lasts = rng.choice((0.05, 0.5, 1.0, 2.0, 1e9 if kernels else 3.0)) * SHORT_S
                        stopped[slot] = front.processes[slot].pid, now, now + lasts
                        counts["stops"] += 1
                        next_kill += rng.choice((0.0, lasts if lasts < 1e6 else 2 * SHORT_S))
                        continue
                    for slot in victims:
                        front.kill(slot)
                        front.processes[slot].wait()
                        ended.add(front.processes[slot].pid)
                        killed.append(now)
                if rng.random() < 0.01:
                    front.rebalance()
                front.restart()
                for slot in sorted({*range(ranks)} - {*front.processes}) if front.members else ():
                    front.start(slot)
            result = _figures(serve, front, killed, counts)
            result["ended"] = list(front.close().values())
        if plot is not None:
            serve.draw(front, plot)
        return result
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _figures(serve, front, killed: list[float], counts: dict) -> dict:
    right = serve.expected_tokens(front.folder, list(front.prompts.values()), list(front.totals.values()))
    wrong = [number for number, tokens in front.tokens.items() if tokens != right[number]]
    log = front.log
    members, pauses, let_in, stopped, agreed, planned = set(), [], [], [], [], []
    fetched, ready, started, took, begun = 0, {}, {}, [], None
    for place, (when, kind, what) in enumerate(log):
        if kind == "kill" and what in members:
            members.discard(what)
            later = list(enumerate(log[place:], place))
            again = next((i for i, (_, k, w) in later if k == "ready" and w[0] == what), len(log))
            # There is no change where a newcomer was killed before the others had let it in.
            change = next((i for i, (_, k, w) in later[: again - place] if k == "change" and what in w[3]), None)
            after = [t for t, k, w in log[change:] if k == "tokens" and w] if change is not None else []
            pauses += [after[0] - when] if after else []
        elif kind == "start":
            started[what] = when
        elif kind == "ready":
            ready[what[0]] = when
            took.append(when - started[what[0]])
        elif kind == "change":
            slot, view, joined, lost, loaded, seconds = what
            fetched += loaded
            begun = view if begun is None else begun
            if slot in ready:
                waited = when - ready.pop(slot)
                let_in += [waited] if view > begun else []  # the first ones wait for each other
            elif joined and not lost:
                stopped.append(seconds)
            elif lost:
                agreed.append(seconds)
            else:
                planned.append(seconds)
            members.add(slot)
    left_out = []
    for slot, when in counts.get("left_out", []):
        change = next((i for i, (t, k, w) in enumerate(log) if t > when and k == "change" and slot in w[3]), len(log))
        after = [t for t, k, w in log[change:] if k == "tokens" and w]
        left_out += [after[0] - when] if after else []
    return {
        **counts,
        **({"left_out": len(counts["left_out"]), "left_out_s": left_out} if counts else {}),
        "kills": len(killed),
        "joins": len(let_in),
        "requests": len(front.tokens),
        "tokens": sum(what for _, kind, what in log if kind == "tokens"),
        "wrong": wrong,
        "fetched": fetched,
        "pause_s": pauses,
        "ready_s": took,
        "let_in_s": let_in,
        "stopped_s": stopped,
        "agreed_s": agreed,
        "planned_s": planned,
        "seconds": log[-1][0] - log[0][0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--transfer", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--later", type=int, default=0)
    parser.add_argument("--plot", type=pathlib.Path, metavar="FILE.png")
    parser.add_argument("--stops", action="store_true")
    given = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"{quick_compiler.FLAGS} --xla_backend_optimization_level=0 --xla_gpu_autotune_level=0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    figures = run(
        given.ranks,
        given.kills,
        given.seed,
        seconds=given.seconds,
        kernels=given.kernels,
        transfer=given.transfer,
        gpus=given.gpus,
        later=given.later,
        plot=given.plot,
        stops=given.stops,
    )
    for name in [name for name, value in figures.items() if name.endswith("_s")]:
        values = sorted(figures[name]) or [float("nan")]
        figures[name] = {"median": values[len(values) // 2], "most": values[-1], "number": len(figures[name])}
    print(figures)
    if figures["wrong"] or any(figures["ended"]):
        raise SystemExit("wrong tokens, or ranks that ended with an error")


if __name__ == "__main__":
    main()
