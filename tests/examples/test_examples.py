"""Every script in examples/ runs, and the result of its `main` is right."""

import importlib.util
import subprocess
import sys

import jax
import pytest

from tests.support import HANG_S, ROOT, lateness, transfer

FOLDER = ROOT / "examples"
CHECKED = {}
TRANSFER = {"prefill_decode", "push_weights"}
ELSEWHERE = {"maxtext_experts": "clients/test_maxtext.py"}
"""Examples that need another library, and the file of tests that runs them."""
PARTS = {"elastic_decoder"}
"""Modules of examples that run as parts of others."""
LIMITS = {"serve_elastic": {"pause_s": 2, "let_in_s": 10, "stopped_s": 2, "planned_s": 2}}
"""Seconds below which results of an example are, without the time in which this machine's other programs ran."""


def checks(name):
    def register(check):
        CHECKED[name] = check
        return check

    return register


@checks("train_nnx")
def _training_learns(losses):
    assert len(losses) == 60
    assert losses[-1] < 0.3 * losses[0]


@checks("infer_linen_padded")
def _layouts_agree(difference):
    # bfloat16 outputs of size about 1; the two matmuls may sum in different orders.
    assert difference <= 2**-6


@checks("swap_all_to_all")
def _the_swap_changes_nothing(largest_difference):
    assert largest_difference == 0.0


@checks("fp8_gradient")
def _fp8_costs_a_few_percent(errors):
    # An e4m3 element is off by 2**-4 of itself at most, by 2.6 % in the mean square: the outputs must show some of it.
    assert set(errors) == {"output", "gradient of x", "gradient of the router", "gradient of the experts"}
    assert all(1e-4 < error < 0.08 for error in errors.values()), errors


@checks("decode_hugging_face")
def _the_cache_changes_nothing(relative_difference):
    # float32, the same sums over other shapes
    assert relative_difference < 1e-4


@checks("dual_batch")
def _the_schedule_changes_nothing(report):
    # bfloat16, and matmuls that XLA may cut differently
    assert set(report) == {"decode", "training"}
    assert all(result["relative difference"] < 2**-7 for result in report.values())


@checks("prefill_decode")
def _two_processes_say_what_one_says(result):
    assert result["lost"] == ["prefill-0"]
    assert result["tokens"] == result["expected"] and len(set(result["tokens"])) > 4


@checks("serve_elastic")
def _a_kill_and_a_newcomer_change_no_token(result):
    assert result["tokens"] == result["expected"] and len(result["tokens"]) > 8
    assert len({token for tokens in result["tokens"] for token in tokens}) > 16
    before, after = result["busiest"]
    assert after < 1.2 and after <= before
    assert result["ended"] == [0] * 3


@checks("push_weights")
def _every_generation_is_whole(result):
    assert result["lost"] == ["trainer-0"]
    assert result["whole"] == [True] * 4


def test_every_example_is_checked():
    assert {path.stem for path in FOLDER.glob("*.py")} == set(CHECKED) | set(ELSEWHERE) | PARTS
    assert all(name in (ROOT / "tests" / file).read_text() for name, file in ELSEWHERE.items())


@pytest.mark.parametrize("name", sorted(CHECKED))
def test_example(name, capsys):
    if name in TRANSFER:
        transfer.require()
    else:
        pytest.importorskip("flax", reason="this example needs xen-moe-jax[flax]")
    if name == "decode_hugging_face":
        pytest.importorskip("safetensors", reason="needs xen-moe-jax[hugging-face]")
    if 16 % jax.device_count():
        pytest.skip(f"the examples split 16 experts; {jax.device_count()} devices do not divide them")
    spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    with lateness.Lateness() as late:
        result = example.main()
    CHECKED[name](result)
    for what, limit in LIMITS.get(name, {}).items():
        assert late.without(result[what]) < limit, (what, result[what])
    assert capsys.readouterr().out.strip(), "an example says what it found"


@pytest.mark.parametrize("given", [["--ranks", "1"], ["--gpus", "0"], ["--plot", "/nowhere/tokens.png"]], ids=str)
def test_the_server_refuses_what_cannot_be_served(given):
    command = [sys.executable, "-m", "examples.serve_elastic", *given]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2 and f"error: {' '.join(given)}: " in done.stderr, done.stderr
