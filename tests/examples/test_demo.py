"""The demo's parts, that its two checks can fail, and a short run of the whole."""

import io
import os
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")
pytest.importorskip("optax", reason="needs xen-moe-jax[flax]")

from examples.demo import bigram, command, text
from examples.demo.dense import Comparison, DenseModel, comparable
from examples.demo.model import ModelConfig
from examples.demo.report import Progress, load_table
from examples.demo.training import Trainer, optimizer
from tests.support import HANG_S, ROOT, quick_compiler
from xen_moe_jax.flax import MoEConfig

SMALL = ModelConfig(
    layers=2,
    heads=2,
    context=16,
    dense_size=32,
    moe=MoEConfig(hidden_size=32, intermediate_size=16, num_experts=8, top_k=2, capacity_factor=1.5),
)


@pytest.fixture(scope="module")
def trainer():
    if jax.device_count() < 8 or jax.default_backend() != "cpu":
        pytest.skip("the demo runs on 8 virtual CPU devices")
    mesh = command.virtual_mesh()
    with jax.set_mesh(mesh):
        yield Trainer(SMALL, mesh, optimizer(1e-2, 30), seed=0)


def windows(count, seed=0):
    """Bytes that repeat with period 3: easy to learn."""
    rng = np.random.default_rng(seed)
    return (rng.integers(0, 3, (count, 1)) + np.arange(SMALL.context + 1)).astype(np.uint8) % 3 + 65


def test_the_expert_parallel_model_equals_the_dense_one(trainer):
    batch = np.random.default_rng(0).integers(0, 256, (16, SMALL.context + 1)).astype(np.uint8)
    _, logits, load = trainer.evaluate(batch)
    dense_logits, gap = DenseModel(trainer.exact_graph, trainer.state)(batch[:, :-1])
    clear = comparable(gap)
    assert clear.mean() > 0.9
    np.testing.assert_allclose(logits[clear], dense_logits[clear], rtol=0, atol=1e-5)
    assert load.shape == (SMALL.layers // 2, 8) and (load.sum(1) == 16 * SMALL.context * 2).all()


def test_the_comparison_notices_one_wrong_expert(trainer):
    batch = np.random.default_rng(0).integers(0, 256, (16, SMALL.context + 1)).astype(np.uint8)
    _, logits, _ = trainer.evaluate(batch)
    wrong = jax.tree.map(lambda leaf: leaf, trainer.state)
    down = wrong["blocks"][1]["ffn"]["down"]
    down[...] = down[...].at[3].mul(1.5)
    dense_logits, gap = DenseModel(trainer.exact_graph, wrong)(batch[:, :-1])
    difference = np.abs(logits - dense_logits)[comparable(gap)].max()
    assert not Comparison(float(difference), 1.0, 1.0, 1.0).equal


@pytest.mark.parametrize(
    "values, equal",
    [
        ((1e-5, 0.97, 1.0, 1.0), True),
        ((2e-3, 0.97, 1.0, 1.0), False),
        ((float("nan"), 0.97, 1.0, 1.0), False),
        ((1e-5, 0.2, 1.0, 1.0), False),
        ((1e-5, 0.97, 1.0, 1.1), False),
    ],
)
def test_comparison(values, equal):
    assert Comparison(*values).equal is equal


def test_a_comparison_stops_at_the_first_near_tie():
    gap = np.array([[1.0, 1.0, 1e-7, 1.0], [1e-7, 1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(comparable(gap), [[True, True, False, False], [False] * 4])


def test_training_learns(trainer):
    losses = [trainer.step(windows(16, step)).loss for step in range(30)]
    assert losses[0] > 4 and losses[-1] < 0.5
    assert trainer.held_out_loss(windows(16, 99), 8) < 0.5
    gate = trainer.state["blocks"][1]["ffn"]["gate"][...]
    assert {shard.data.shape[0] for shard in gate.addressable_shards} == {2}, "experts stay split over ep=4"


def test_bigram_by_hand():
    """ "abababab": a is followed by b alone, so p(b|a) = (4 - D)/4 + D/4 * continuation(b), continuation about 1/2."""
    train = np.frombuffer(b"abababab", np.uint8)
    continuation = (1 + 1 / 256) / 3
    expected = -np.log((4 - 0.75) / 4 + 0.75 / 4 * continuation)
    assert bigram.held_out_loss(train, np.frombuffer(b"ab", np.uint8)[None]) == pytest.approx(expected)
    unseen = bigram.held_out_loss(train, np.frombuffer(b"xy", np.uint8)[None])
    assert unseen == pytest.approx(-np.log(1 / 256 / 3)), "a byte never seen still has a probability"


def test_bigram_of_random_bytes_is_no_better_than_uniform():
    train, held_out = np.random.default_rng(0).integers(0, 256, (2, 200_000)).astype(np.uint8)
    assert np.log(256) < bigram.held_out_loss(train, text.consecutive_windows(held_out, 128)) < np.log(256) + 0.5


def test_split_holds_out_every_tenth_block(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 41 * text.BLOCK).astype(np.uint8)
    (tmp_path / "text").write_bytes(data.tobytes())
    split = text.load(str(tmp_path / "text"))
    np.testing.assert_array_equal(split.held_out, data[: -text.BLOCK].reshape(4, 10, text.BLOCK)[:, 9].reshape(-1))
    assert len(split.train) + len(split.held_out) == len(data)
    cut = text.consecutive_windows(split.held_out, 128)
    np.testing.assert_array_equal(cut[:-1, -1], cut[1:, 0])
    np.testing.assert_array_equal(cut[0], split.held_out[:129])


def test_progress_and_table():
    out = io.StringIO()
    progress = Progress(40, 100, out)
    for step in range(1, 41):
        progress.show(step, 1.5, 2.0 if step > 1 else None)
    lines = out.getvalue().splitlines()
    assert len(lines) == 21 and "40/40" in lines[-1] and "tokens/s" in lines[-1] and "loss 1.500" in lines[-1]
    table = load_table(np.array([[10, 20, 30, 40]]), (1,), num_ranks=2)
    assert "10.0%" in table and "1.60" in table
    assert [line.split()[:2] for line in table.splitlines()[1:5]] == [["0", "0"], ["1", "0"], ["2", "1"], ["3", "1"]]


def run_demo(*arguments, timeout=HANG_S):
    environment = os.environ | {"XLA_FLAGS": quick_compiler.flags(), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "examples.demo", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def test_bad_arguments(tmp_path, capsys):
    assert command.main(["--text", str(tmp_path / "none")]) == 2
    assert f"--text {tmp_path}/none: cannot be read (No such file or directory)" in capsys.readouterr().out
    (tmp_path / "short").write_text("short")
    assert command.main(["--text", str(tmp_path / "short")]) == 2
    assert "5 bytes; needs at least 100000" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        command.main(["--steps", "0"])
    with pytest.raises(SystemExit, match="2"):
        command.main(["--seed", str(2**63)])
    assert f"--seed {2**63}: must be" in capsys.readouterr().err
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        command.main(["--output", str(tmp_path / "file" / "folder")])
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_short_run_is_checked_but_not_judged_by_its_loss(tmp_path):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    done = run_demo("--steps", "2", "--output", str(tmp_path))
    assert "PASS  expert-parallel equals dense" in done.stdout, done.stdout + done.stderr
    assert "----  held-out loss" in done.stdout and "not judged after 2 steps" in done.stdout
    assert "FAIL" not in done.stdout and done.returncode == 0
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("steps", "loss", "equal", "status"),
    [
        (command.STEPS, -1.0, True, 0),
        (command.STEPS, 99.0, True, 1),
        (2, 99.0, True, 0),
        (2, -1.0, False, 1),
    ],
)
def test_verdicts(monkeypatch, tmp_path, capsys, steps, loss, equal, status):
    """The whole command with its training and its models replaced: its verdict on their results, and its status."""
    comparison = Comparison(1e-6 if equal else 1.0, 0.97, loss, loss)
    fake = types.SimpleNamespace(num_parameters=1, exact_graph=None, state=None)
    monkeypatch.setattr("examples.demo.training.Trainer", lambda *a: fake)
    monkeypatch.setattr(command, "_train", lambda *a: command._History())
    monkeypatch.setattr(command, "_compare_with_dense", lambda *a: (comparison, np.ones((2, 16), int)))
    monkeypatch.setattr("examples.demo.sampling.sample", lambda *a: ["text"])
    monkeypatch.setattr(command, "_draw", lambda *a: None)
    assert command.main(["--steps", str(steps), "--output", str(tmp_path)]) == status
    out = capsys.readouterr().out
    assert ("FAIL" in out) == bool(status) and ("not judged" in out) == (steps < command.STEPS)


def test_without_flax_no_folder_is_left(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["--output", str(tmp_path / "out")])
    assert "the demo needs flax" in capsys.readouterr().err and not (tmp_path / "out").exists()
