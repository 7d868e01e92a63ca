"""The experts' matmul is a choice: by name, by a function, or with experts of your own."""

import dataclasses
import json
import re
import subprocess
import sys
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import HANG_S, ROOT

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

import xen_moe_jax as xm
from tests.support.layers import (
    CONFIG,
    GPT_OSS,
    assert_same_gradients,
    biased,
    layer,
    make_mesh,
    run,
    run_with_gradients,
    tokens,
)
from xen_moe_jax import doctor
from xen_moe_jax.experts import grouped_matmul, hopper
from xen_moe_jax.flax import memory


def dense_groups(rows, weights, group_sizes):
    """Every row by every expert's weights, then its own picked: slow, and no `ragged_dot`."""
    ends = jnp.cumsum(group_sizes)
    own = jnp.sum(jnp.arange(rows.shape[0])[:, None] >= ends[None, :], axis=1)
    used = own[:, None] < len(group_sizes)
    every = jnp.einsum("ca,lab->lcb", jnp.where(used, rows, 0), weights)
    picked = every[jnp.minimum(own, len(group_sizes) - 1), jnp.arange(rows.shape[0])]
    return jnp.where(used, picked, jnp.nan)  # unspecified: no caller may read these rows


@pytest.fixture
def forget():
    grouped_matmul.automatic.cache_clear()
    yield
    grouped_matmul.automatic.cache_clear()


def test_a_function_takes_the_place_of_ragged_dot():
    """One that leaves NaN past the last group: neither the outputs nor a gradient may meet them, biases included."""
    mesh, x, target = make_mesh((2,), ("ep",)), tokens(8), tokens(8, seed=9)
    config = dataclasses.replace(GPT_OSS, capacity_factor=1.5)
    expected = run_with_gradients(biased(layer(config)), x, target, mesh)
    mine = biased(layer(dataclasses.replace(config, grouped_matmul=dense_groups)))
    y, _, gradients = run_with_gradients(mine, x, target, mesh)
    np.testing.assert_allclose(y, expected[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(gradients, expected[2])


@pytest.mark.parametrize("layout", ["grouped", "padded"])
def test_experts_of_your_own(layout):
    seen = {}

    def twice(rows, group_sizes, weights):
        seen.update(rows=rows.shape, sizes=group_sizes.shape, weights={n: w.shape for n, w in weights.items()})
        return 2 * rows

    config = dataclasses.replace(CONFIG, experts=twice, layout=layout, balancing="none")
    x = tokens(8)
    y, _ = run(layer(config), x, make_mesh((2,), ("ep",)))
    np.testing.assert_allclose(y, 2 * x, rtol=1e-6)  # weights add up to one
    assert seen["rows"] == ((16, 16) if layout == "grouped" else (4, 8, 16))
    assert seen["sizes"] == (4,) and seen["weights"] == {"gate": (4, 16, 24), "up": (4, 16, 24), "down": (4, 24, 16)}


def test_expert_ids_of_the_rows():
    mesh = make_mesh((2,), ("ep",))
    idx = jnp.asarray([[0, 3], [3, 1], [2, 5], [-1, 3]], jnp.int32)

    def on_mesh(layout, alignment):
        @jax.jit
        @jax.shard_map(mesh=mesh, in_specs=jax.P("ep"), out_specs=jax.P("ep"))
        def ids(idx):
            x = jnp.ones((idx.shape[0], 128))
            routed = xm.dispatch(x, idx, num_experts=6, axis_name="ep", layout=layout, alignment=alignment)
            return routed.expert_ids()[None], routed.group_sizes[None]

        return ids

    for alignment in (1, 4):
        got, sizes = on_mesh("grouped", alignment)(idx)
        for rank in range(2):
            expected = np.repeat(np.arange(3), sizes[rank])
            np.testing.assert_array_equal(got[rank][: len(expected)], expected)
            assert (got[rank][len(expected) :] == 3).all()
        assert sizes.sum() == (7 if alignment == 1 else 20)
    for layout in ("ranked", "padded"):
        with pytest.raises(ValueError, match=f"expert_ids: layout='{layout}' has no groups.*topk_idx"):
            on_mesh(layout, 1)(idx)


def test_auto_warns_once_on_a_gpu_without_tokamax(monkeypatch, forget):
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    with pytest.warns(UserWarning, match=r"few percent of a GPU's peak: pip install 'xen-moe-jax\[tokamax\]'"):
        assert grouped_matmul.automatic("gpu") == "ragged_dot"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert grouped_matmul.automatic("gpu") == "ragged_dot"
        assert grouped_matmul.automatic("cpu") == grouped_matmul.automatic("tpu") == "ragged_dot"
        assert "Pallas kernels for bfloat16 and float32" in grouped_matmul.describe("tpu")["choice"]


def test_what_leaves_the_hopper_kernels_says_so_once(monkeypatch, forget):
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    grouped_matmul.warn_once.cache_clear()
    rows, weights = jnp.zeros((8, 72), jnp.float32), jnp.zeros((2, 72, 48), jnp.float32)
    with pytest.warns(
        UserWarning, match=r"float32\[C, 72\] by float32\[2, 72, 48\] leaves .*: float32 is none of .*twelfth"
    ):
        assert not grouped_matmul.by_hopper("auto", rows, weights)
    with pytest.warns(
        UserWarning, match="72 or 48 is below 128 or no multiple of 32, so the weights are padded by a copy of 0 MiB"
    ):
        assert grouped_matmul.by_hopper("auto", rows.astype("bfloat16"), weights.astype("bfloat16"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not grouped_matmul.by_hopper("auto", rows, weights)  # said already
        assert not grouped_matmul.by_hopper("ragged_dot", rows, weights)
        assert grouped_matmul.why_not(2880, 2880, jnp.bfloat16) is None


@pytest.mark.parametrize(
    ("hidden", "says"),
    [
        (40, "40 or 128 is below 128 or no multiple of 32, so the weights are padded by a copy of 0 MiB in every call"),
        (2880, "this library's kernels multiply experts of 2880 by 128 in bfloat16, and copy no weights"),
    ],
)
def test_memory_and_doctor_say_beforehand_what_is_slow(hidden, says, capsys):
    sizes = f"--hidden {hidden} --width 128"
    assert memory.main(f"{sizes} --tokens 8 --ranks 2 --experts 4 --top-k 2".split()) == 0
    assert says in re.search("On a Hopper GPU: .*", capsys.readouterr().out)[0]
    doctor.main(["--json", *sizes.split()])
    findings = json.loads(capsys.readouterr().out)["Experts' grouped matmul"]
    assert says in findings[-1]["detail"] and findings[-1]["ok"] is (None if "padded" in says else True)


def test_doctor_asks_for_both_sizes(capsys):
    for given, message in (("--hidden 64", "given together"), ("--hidden 0 --width 8", "--hidden 0: must be at least")):
        with pytest.raises(SystemExit):
            doctor.main(given.split())
        assert message in capsys.readouterr().err


def test_tokamax_where_it_is_installed(monkeypatch, forget):
    """A stand-in with tokamax's signature: it is called with the types that `shard_map` checks."""
    calls = []

    def stand_in(lhs, rhs, group_sizes, *, manual_axis_type):
        calls.append(manual_axis_type)
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    module = types.ModuleType("tokamax")
    module.ragged_dot = stand_in
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(grouped_matmul, "installed", lambda: True)
    assert {p: grouped_matmul.automatic(p) for p in ("gpu", "tpu", "cpu")} == {
        "gpu": "tokamax",
        "tpu": "tokamax",
        "cpu": "ragged_dot",
    }
    x, mesh = tokens(8), make_mesh((2,), ("ep",))
    y, _ = run(layer(dataclasses.replace(CONFIG, grouped_matmul="tokamax")), x, mesh)
    np.testing.assert_array_equal(y, run(layer(CONFIG), x, mesh)[0])
    assert len(calls) == 3 and calls[0].varying == {"ep"}


def test_the_weights_gradient_that_tokamax_gets_wrong_is_not_used(monkeypatch):
    """On a Hopper GPU: a stand-in whose gradient of the weights is wrong, as tokamax's was measured to be."""

    @jax.custom_vjp
    def wrong(lhs, rhs, group_sizes):
        return jax.lax.ragged_dot(lhs, rhs, group_sizes)

    def backward(kept, cotangent):
        _, pull = jax.vjp(lambda lhs, rhs: jax.lax.ragged_dot(lhs, rhs, kept[2]), *kept[:2])
        by_rows, by_weights = pull(cotangent)
        return by_rows, 1.5 * by_weights, None

    wrong.defvjp(lambda *kept: (wrong(*kept), kept), backward)
    module = types.ModuleType("tokamax")
    module.ragged_dot = lambda lhs, rhs, group_sizes, *, manual_axis_type: wrong(lhs, rhs, group_sizes)
    monkeypatch.setitem(sys.modules, "tokamax", module)
    monkeypatch.setattr(grouped_matmul, "installed", lambda: True)
    monkeypatch.setattr(hopper, "on_hopper", lambda: True)
    x, target, mesh = tokens(8), tokens(8, seed=9), make_mesh((2,), ("ep",))
    config = dataclasses.replace(CONFIG, balancing="none")
    expected = run_with_gradients(layer(dataclasses.replace(config, grouped_matmul="ragged_dot")), x, target, mesh)
    got = run_with_gradients(layer(dataclasses.replace(config, grouped_matmul="tokamax")), x, target, mesh)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(got[2], expected[2])


def test_tokamax_asked_for_and_missing(monkeypatch):
    monkeypatch.setattr(grouped_matmul, "installed", lambda: False)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'xen-moe-jax\[tokamax\]', or use 'auto'"):
        layer(dataclasses.replace(CONFIG, grouped_matmul="tokamax"))(jnp.asarray(tokens(4)))


def test_the_real_tokamax():
    pytest.importorskip("tokamax", reason="needs xen-moe-jax[tokamax]")
    x, target, mesh = tokens(8), tokens(8, seed=9), make_mesh((2,), ("ep",))
    expected = run_with_gradients(layer(CONFIG), x, target, mesh)
    got = run_with_gradients(layer(dataclasses.replace(CONFIG, grouped_matmul="tokamax")), x, target, mesh)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-5, atol=1e-5)
    assert_same_gradients(got[2], expected[2])


@pytest.mark.parametrize("has, platform, choice", [(True, "gpu", "tokamax"), (False, "gpu", "ragged_dot")])
def test_doctor_shows_the_choice(monkeypatch, has, platform, choice):
    monkeypatch.setattr(grouped_matmul, "installed", lambda: has)
    finding = doctor.grouped_matmul_of(platform)
    assert choice in finding.detail and finding.ok is (True if has else None)
    assert ("xen-moe-jax[tokamax]" in finding.remedy) is not has
    assert "Experts' grouped matmul" in doctor.examine()


def test_the_benchmark_checks_and_times(tmp_path):
    """Tiny sizes, on this machine: a candidate that runs has times and small errors, any other has its reason."""
    out = tmp_path / "out.json"
    sizes = "--rows 96 --capacity 128 --hidden 128 --width 32 --experts 3 --inner 1 --repeats 1 --dtype float32"
    only = ["--only", "padded einsum", "jax mosaic gpu"]  # a kernel of Hopper GPUs
    command = [sys.executable, "-m", "benchmarks", "grouped-matmul", "--json", str(out), *sizes.split(), *only]
    subprocess.run(command, check=True, timeout=HANG_S, capture_output=True, cwd=ROOT)
    report = json.loads(out.read_text())
    runs, missing = (report["candidates"][name] for name in only[1:])
    assert max(runs["errors"].values()) < 1e-5 and runs["times"]["experts with gradients"]["median_us"] > 0
    assert "no tiling of the kernel compiles" in missing["error"] and "times" not in missing
    assert report["shape"]["capacity"] == 128 and report["versions"]["jax"]
