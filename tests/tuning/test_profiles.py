"""Tuned configs: measured, kept in a profile, looked up when a program is lowered; a profile that does not fit is
refused."""

import contextlib
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import _profiles, autotune, doctor
from xen_moe_jax._spec import Spec
from xen_moe_jax.backends import reference
from xen_moe_jax.tuning import command as tuning_command
from xen_moe_jax.tuning.problem import make_problem
from xen_moe_jax.tuning.workload import Workload

SMALL = Workload(tokens=24, hidden=128, experts=8, top_k=3, ranks=4, pool=3)


@pytest.fixture(scope="module")
def problem():
    return make_problem(SMALL)


def test_autotune_measures_saves_and_loads(tmp_path, problem, monkeypatch):
    monkeypatch.setattr("xen_moe_jax.tuning.search.check_tunable", lambda *_: None)
    base = xm.KernelConfig(backend="reference", channel=3)
    configs = [dataclasses.replace(base, chunk_tokens=n) for n in (None, 8, 24)]
    tuned = autotune.autotune(problem, base=base, configs=configs, inner=2, repeats=2)
    assert set(tuned) == {"dispatch", "combine"}
    for entry in tuned.values():
        assert {m.config for m in entry.measured} == set(configs)
        times = [m.us_median for m in entry.measured]
        assert times == sorted(times) and times[0] > 0 and entry.best == entry.measured[0].config
    path = tmp_path / "tuned.json"
    autotune.save(path, SMALL, tuned)
    assert autotune.load(path, SMALL, base) == {name: entry.best for name, entry in tuned.items()}
    other = dataclasses.replace(SMALL, tokens=25)
    assert autotune.load(path, other, base) == {}
    autotune.save(path, other, tuned)
    assert autotune.load(path, SMALL, base) and autotune.load(path, other, base)


def test_nothing_is_tuned_on_the_reference_backend(problem, tmp_path, capsys):
    """It runs one program for every config: the fastest of several measurements would be noise."""
    for given in ({}, {"configs": [xm.KernelConfig(), xm.KernelConfig(chunk_tokens=8)]}):
        with pytest.raises(ValueError, match="nothing to tune on cpu: the reference backend runs the same program"):
            autotune.autotune(problem, **given)
    path = tmp_path / "profile.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xen_moe_jax.tuning.arguments.start_jax", lambda *_: None)
        assert tuning_command.main(["--output", str(path)]) == 1
    assert "nothing to tune" in capsys.readouterr().err and not path.exists()


def test_shapes_left_out_by_the_time_limit_are_no_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("xen_moe_jax.tuning.arguments.start_jax", lambda *_: None)
    monkeypatch.setattr("xen_moe_jax.tuning.search.check_tunable", lambda *_: None)
    assert tuning_command.main(["--output", str(tmp_path / "p.json"), "--seconds", "1e-9", "--tokens", "8"]) == 0
    assert "left out after --seconds 1e-09: 8 tokens bfloat16, 8 tokens float8_e4m3fn" in capsys.readouterr().err


def test_autotune_bad_input(tmp_path, problem):
    with pytest.raises(ValueError, match="operations"):
        autotune.autotune(problem, operations=("sort",))
    with pytest.raises(ValueError, match="at least one"):
        autotune.autotune(problem, configs=[])
    with pytest.raises(ValueError, match="ranks=4"):
        make_problem(SMALL, mesh=jax.make_mesh((2,), ("ep",), devices=jax.devices()[:2]))
    for count in ({"inner": 0}, {"repeats": 0}):
        with pytest.raises(ValueError, match="=0: must be at least 1"):
            autotune.autotune(problem, **count)


@pytest.fixture
def profile(tmp_path):
    """A file of tuned configs, as `save` writes it, and its content."""
    config = xm.KernelConfig(chunk_tokens=8)
    tuned = {"dispatch": autotune.Tuned("dispatch", (autotune.Measured(config, 2.0, 1.0, 3.0),))}
    autotune.save(tmp_path / "tuned.json", SMALL, tuned)
    assert autotune.load(tmp_path / "tuned.json", SMALL) == {"dispatch": config}
    return tmp_path / "tuned.json", json.loads((tmp_path / "tuned.json").read_text())


@pytest.mark.parametrize("field", ["device", "xen-moe-jax", "jax", "jaxlib"])
def test_configs_tuned_elsewhere_are_refused_with_the_reason(profile, field):
    path, content = profile
    content["entries"][0]["machine"][field] = "another"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=f"tuned with {field} another where this is .*: tune again here"):
        autotune.load(path, SMALL)
    assert autotune.load(path, dataclasses.replace(SMALL, ranks=2)) == {}, "another shape was never tuned"


@pytest.mark.parametrize(
    "damage",
    [
        lambda c: "[1, 2",
        lambda c: json.dumps([c]),
        lambda c: json.dumps(c | {"format": "another"}),
        lambda c: json.dumps(c | {"entries": [{"machine": {}}]}),
        lambda c: json.dumps(c).replace('"chunk_tokens": 8', '"chunk_tokens": -8'),
        lambda c: json.dumps(c).replace('"chunk_tokens"', '"unknown_field"'),
        lambda c: json.dumps(c).replace('"dispatch"', '"sort"'),
    ],
)
def test_damaged_and_foreign_profiles_are_refused(profile, damage):
    path, content = profile
    text = damage(content)
    path.write_text(text)
    for use in (lambda: autotune.load(path, SMALL), lambda: autotune.save(path, SMALL, {})):
        with pytest.raises(ValueError, match=r"tuned.json: not a file of tuned configs \(.*\); make it with"):
            use()
    assert path.read_text() == text, "a file that is refused is not overwritten"


@pytest.mark.parametrize(("platform", "field"), [("gpu", "num_sms"), ("tpu", "block_tokens")])
def test_candidates_start_with_the_default_and_differ(platform, field):
    found = autotune.candidates(xm.KernelConfig(channel=2), platform, 64)
    assert found[0] == xm.KernelConfig(channel=2) and len(set(found)) == len(found) > 3
    assert all(c.channel == 2 for c in found) and len({getattr(c, field) for c in found}) > 3


def test_the_best_leaves_thread_blocks_over_where_that_costs_nothing():
    def measured(us, **fields):
        return autotune.Measured(xm.KernelConfig(**fields), us, us, us)

    times = (measured(100.0, num_sms=96), measured(100.5), measured(100.9, num_sms=32), measured(130.0, num_sms=16))
    assert autotune.Tuned("dispatch", times).best.num_sms == 32
    assert autotune.Tuned("dispatch", times[1:2]).best == xm.KernelConfig()


# ------------------------------------------------------------------------------------------------------ looked up
KIND = "An accelerator"
CONFIG = {"mode": "auto", "num_sms": None, "chunk_tokens": 8, "block_tokens": None}


def entry(config=CONFIG, operations=("dispatch", "combine"), machine=None, **workload):
    """An entry of a profile for `SMALL` on `KIND`."""
    return {
        "machine": _profiles.machine(KIND) | (machine or {}),
        "workload": dataclasses.asdict(SMALL) | workload,
        "operations": {name: {"us_median": 1.0, "config": config} for name in operations},
    }


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """Makes a folder of shipped profiles of the given entries, on a machine whose devices are called `KIND`."""

    def make(*entries, text=None):
        (tmp_path / "a.json").write_text(text or json.dumps({"format": _profiles.FORMAT, "entries": entries}))
        monkeypatch.setattr(_profiles, "SHIPPED", tmp_path)
        monkeypatch.setattr(_profiles, "device_kind", lambda mesh: KIND)
        _profiles.forget()
        return tmp_path / "a.json"

    yield make
    monkeypatch.undo()
    _profiles.forget()


def spec(tokens=24, ranks=4, experts=8, top_k=3, layout="grouped"):
    return Spec(("ep",), (ranks,), experts, tokens, top_k, layout, ranks * tokens * top_k)


def found(operation="dispatch", config=None, hidden=128, dtype="bfloat16", wire=None, **changes):
    return _profiles.resolve(
        config or xm.KernelConfig(), operation, spec(**changes), hidden, dtype, wire, mesh=None
    ).chunk_tokens


def test_a_profile_serves_its_own_shape_device_and_versions_only(shipped):
    shipped(entry())
    assert found() == 8 and found("combine") == 8
    for other in (
        {"ranks": 2}, {"experts": 16}, {"top_k": 2}, {"layout": "padded"}, {"hidden": 256}, {"dtype": "float32"},
        {"wire": "int8"}, {"tokens": 50}, {"tokens": 11}, {"operation": "redispatch"},
    ):  # fmt: skip
        assert found(**other) is None, other
    assert found(tokens=48) == 8 and found(tokens=12) == 8, "the number of tokens may differ by a factor of two"


@pytest.mark.parametrize("field", _profiles.MACHINE_FIELDS)
def test_a_foreign_profile_is_not_used_and_the_doctor_says_why(shipped, field):
    shipped(entry(machine={field: "another"}))
    assert found() is None
    (finding,) = doctor.profiles()
    assert finding.ok is None and "not used: " in finding.detail and f"{field} another where this is" in finding.detail


def test_the_nearest_number_of_tokens_is_taken(shipped):
    shipped(entry(tokens=16), entry(CONFIG | {"chunk_tokens": 3}, tokens=32))
    assert [found(tokens=tokens) for tokens in (16, 20, 26, 64)] == [8, 8, 3, 3]


def test_what_the_caller_set_is_kept(shipped):
    shipped(entry(CONFIG | {"num_sms": 32, "mode": "throughput"}))
    config = _profiles.resolve(
        xm.KernelConfig(num_sms=16, channel=2), "dispatch", spec(), 128, "bfloat16", None, mesh=None
    )
    assert config == xm.KernelConfig(num_sms=16, channel=2, chunk_tokens=8, mode="throughput")


def test_expert_outputs_are_not_block_scaled(shipped):
    shipped(entry(dtype="float8_e4m3fn", combine_wire="int8"))
    assert found(dtype="float8_e4m3fn") == 8 and found(dtype="bfloat16") is None
    assert found("combine", wire="int8") == 8 and found("combine") is None


def test_a_damaged_shipped_profile_warns_once_and_the_doctor_calls_it_a_fault(shipped):
    shipped(text='{"format": "xen_moe_jax')
    with pytest.warns(autotune.ProfileWarning, match=r"defaults instead of a profile: .*a\.json: not a file of tuned"):
        assert found() is None
    assert found() is None  # an error if it warned again: pytest.warns is not around it
    (finding,) = doctor.profiles()
    assert finding.ok is False and "not a file of tuned configs" in finding.detail and finding.remedy


def test_the_doctor_names_the_profiles_in_use(shipped):
    path = shipped(entry(machine={"device": jax.devices()[0].device_kind}))
    (finding,) = doctor.profiles()
    assert finding.name == path.name and finding.ok and "24 tokens of 128, bfloat16, grouped, 4 ranks" in finding.detail


def test_a_named_profile_comes_first_and_is_checked_when_it_is_named(shipped, tmp_path):
    shipped(entry())
    mine = tmp_path / "mine.txt"
    mine.write_text(json.dumps({"format": _profiles.FORMAT, "entries": [entry(CONFIG | {"chunk_tokens": 5})]}))
    with pytest.raises(autotune.ProfileError, match="mine.txt: device An accelerator where this is cpu; run xen-moe"):
        autotune.use(mine)
    here = {"device": jax.devices()[0].device_kind}
    both = [entry(CONFIG | {"chunk_tokens": 5}), entry(machine=here)]
    mine.write_text(json.dumps({"format": _profiles.FORMAT, "entries": both}))
    assert autotune.use(mine) == 1
    assert found() == 5
    autotune.forget()
    assert found() == 8
    mine.write_text("[]")
    with pytest.raises(autotune.ProfileError, match="mine.txt: not a file of tuned configs"):
        autotune.use(mine)
    with pytest.raises(FileNotFoundError):
        autotune.use(tmp_path / "none.json")


def test_a_lowered_program_runs_with_the_profile_and_gives_the_same_bits(shipped, monkeypatch):
    """The config that the backend is given, seen from inside the backend."""
    seen = []
    for name in ("dispatch", "combine"):
        genuine = getattr(reference.BACKEND, name)

        def spy(call, *operands, name=name, genuine=genuine):
            seen.append((name, call.config.chunk_tokens))
            return genuine(call, *operands)

        monkeypatch.setattr(reference.BACKEND, name, spy)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("ep",))
    idx = jnp.arange(4 * 24 * 3, dtype=jnp.int32).reshape(-1, 3) % 8
    x = jax.random.normal(jax.random.key(0), (4 * 24, 128), jnp.bfloat16)

    def run():
        def body(x, idx):
            routed = xm.dispatch(x, idx, jnp.full(idx.shape, 0.5), num_experts=8, axis_name="ep")
            return xm.combine(routed.x, routed.handle)

        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P("ep"), out_specs=P("ep")))(x, idx)

    shipped(entry())
    tuned = run()
    with _profiles.ignored():
        default = run()
    assert seen == [("dispatch", 8), ("combine", 8), ("dispatch", None), ("combine", None)]
    assert (tuned == default).all()


def test_several_kinds_of_devices_have_no_profile():
    devices = jax.devices()[:2]
    assert _profiles.device_kind(jax.make_mesh((2,), ("ep",), devices=devices)) == devices[0].device_kind
    assert _profiles.device_kind(jax.sharding.AbstractMesh((2,), ("ep",))) is None


def test_what_is_shipped_is_sound():
    """Every profile of the package can be read, was made on an accelerator, and leaves thread blocks to others."""
    for path in _profiles.shipped():
        for given in _profiles.read(path):
            assert given["machine"]["device"] != "cpu" and given["operations"]
            for saved in given["operations"].values():
                sms = saved["config"]["num_sms"]
                assert sms is None or sms <= 96, f"{path.name}: XLA's own collectives would find no thread block"
                assert saved["us_median"] <= min(c["us_median"] for c in saved["us_of_candidates"]) * 1.0101


# -------------------------------------------------------------------------------------------------- the command
def test_autotune_command_end_to_end(tmp_path, capsys):
    path = tmp_path / "profile.json"
    sizes = "--tokens 8 --hidden 128 --experts 8 --top-k 2 --ranks 2 --inner 1 --repeats 1".split()
    # start_jax would set the number of devices: they are there already
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr("xen_moe_jax.tuning.arguments.start_jax", lambda *_: None)
        patch.setattr("xen_moe_jax.tuning.search.check_tunable", lambda *_: None)
        patch.setattr("xen_moe_jax.tuning.search.candidates", lambda base, *_: [base, xm.KernelConfig(chunk_tokens=4)])
        assert tuning_command.main([*sizes, "--output", str(path)]) == 0
    entries = _profiles.read(path)
    assert [e["workload"]["dtype"] for e in entries] == ["bfloat16", "float8_e4m3fn"]
    assert [set(e["operations"]) for e in entries] == [{"dispatch", "combine"}, {"dispatch"}]
    assert "8 tokens bfloat16 dispatch" in capsys.readouterr().out


def test_a_size_that_is_given_wins_over_the_named_model(monkeypatch, tmp_path):
    """For `--deepseek-v3 --hidden 4096` the profile would otherwise name a shape that the user did not ask for."""
    asked = []
    monkeypatch.setattr("xen_moe_jax.tuning.arguments.start_jax", lambda *_: None)
    monkeypatch.setattr("xen_moe_jax.tuning.search.check_tunable", lambda *_: None)
    monkeypatch.setattr("xen_moe_jax.tuning.problem.make_problem", lambda work: asked.append(work) or 1 / 0)
    given = "--deepseek-v3 --hidden 4096 --tokens 8 --ranks 2 --output".split()
    with pytest.raises(ZeroDivisionError):
        tuning_command.main([*given, str(tmp_path / "p.json")])
    assert (asked[0].hidden, asked[0].experts, asked[0].top_k) == (4096, 256, 8)


def test_autotune_command_refuses_a_foreign_file_before_it_measures(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text("{}")
    assert tuning_command.main(["--output", str(path)]) == 1
    assert "not a file of tuned configs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"), [("tokens", 1.5), ("hidden", "8"), ("ranks", 0), ("seed", -1), ("seed", None)]
)
def test_a_workload_without_whole_numbers_is_refused(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r}: must be a"):
        Workload(**{name: value})
