"""Arguments that are right in an unusual way, and contents that no check at trace time can see."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from tests.support.checks import assert_bits
from xen_moe_jax import _numbers, backends
from xen_moe_jax.backends.cuda import call

RANKS, T, H, K, E = 4, 8, 128, 2, 8


def place(mesh, *arrays):
    return jax.device_put(arrays, jax.NamedSharding(mesh, P("ep")))


def operands():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((RANKS * T, H)).astype(np.float32)
    return x, rng.integers(0, E, (RANKS * T, K)).astype(np.int32)


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint8, np.array, jnp.int32], ids=lambda kind: kind.__name__)
def test_numpy_integers_and_arrays_without_dimensions_are_integers(mesh4, kind):
    """And make the same program: a NumPy integer in a config or a spec would be compiled again."""
    seconds = kind(2) if kind is np.array else np.float32(2)
    config = xm.KernelConfig(num_sms=kind(8), chunk_tokens=kind(4), channel=kind(1), timeout_s=seconds)
    assert config == xm.KernelConfig(num_sms=8, chunk_tokens=4, channel=1, timeout_s=2.0)
    assert hash(config) == hash(dataclasses.replace(config, channel=1))
    assert all(type(v) in (int, float, str, type(None)) for v in dataclasses.asdict(config).values())
    idx, _ = xm.routing.top_k(jnp.ones((T, E)), kind(2))
    assert idx.shape == (T, 2)
    xm.routing.group_limited_top_k(jnp.ones((T, E)), kind(2), num_groups=kind(4), topk_groups=kind(2))
    xm.get_dispatch_layout(idx, num_experts=kind(E), num_ranks=kind(4), ranks_per_node=kind(2))
    assert xm.buffer_size_hint(num_tokens=kind(T), hidden=kind(H), num_ranks=kind(4)) == 0
    shapes = {"num_tokens": T, "hidden": H, "num_ranks": 4, "num_experts": E, "top_k": K, "nodes_per_token": 1}
    assert xm.perf_model(**{name: kind(n) for name, n in shapes.items()}) == xm.perf_model(**shapes)
    xm.Buffer(mesh4, "ep", num_tokens=kind(T), hidden=kind(H), channel=kind(1)).close()

    experts, rows, one, first = kind(E), kind(9), kind(1), kind(0)  # inside, an array of JAX's would be a traced one

    def body(x, idx):
        routed = xm.dispatch(x, idx, num_experts=experts, axis_name="ep", capacity=rows, alignment=one)
        assert all(type(v) is int for v in (routed.handle.spec.num_experts, routed.handle.spec.capacity))
        return xm.all_to_all(xm.combine(routed.x, routed.handle), "ep", first, first, tiled=True)

    jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep"))).lower(*place(mesh4, *operands()))


@pytest.mark.parametrize("value", [True, np.bool_(True), np.array(True), np.array([2]), 2.0, np.array(2.0), "2", None])
def test_what_is_no_integer_is_refused_alike_by_operations_and_configs(value):
    idx = jnp.zeros((T, K), jnp.int32)
    for refuses in (
        lambda: xm.get_dispatch_layout(idx, num_experts=value, num_ranks=1),
        lambda: xm.routing.top_k(jnp.ones((T, E)), value),
        lambda: xm.KernelConfig(channel=value),
    ):
        with pytest.raises((TypeError, ValueError), match=r"must be an int"):
            refuses()


def test_a_number_that_only_the_run_time_knows_is_no_integer():
    with pytest.raises(ValueError, match="KernelConfig.num_sms=.*: must be None or a positive int"):
        jax.jit(lambda n: xm.KernelConfig(num_sms=n) and n)(8)
    with pytest.raises(ValueError, match="KernelConfig.timeout_s=.*: must be seconds"):
        jax.jit(lambda n: xm.KernelConfig(timeout_s=n) and n)(8.0)


@pytest.mark.parametrize("value", [2, np.int8(2), 2.0, np.float32(2), np.array(2.0), jnp.bfloat16(2)])
def test_seconds_are_any_known_number(value):
    assert xm.KernelConfig(timeout_s=value) == xm.KernelConfig(timeout_s=2.0)


def test_numbers_that_no_kernel_could_hold():
    """XLA's attributes and Mosaic have them in 32 bits, and a time in nanoseconds."""
    for name in ("num_sms", "chunk_tokens", "ranks_per_node", "block_tokens", "vmem_limit_bytes", "collective_id"):
        with pytest.raises(ValueError, match=f"KernelConfig.{name}=2147483648: must be None or .*2\\*\\*31"):
            xm.KernelConfig(**{name: 2**31})
    longest = call.timeout_ns(xm.KernelConfig(timeout_s=1e30))
    assert call.timeout_ns(xm.KernelConfig(timeout_s=float("inf"))) == longest <= 2**63 - 1
    assert call.timeout_ns(xm.KernelConfig(timeout_s=1e-30)) == 1


def test_a_wire_names_its_dtype_however_it_is_given():
    assert xm.Wire(jnp.int8) == xm.Wire(np.dtype("int8")) == xm.Wire("int8")


@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_start_and_done_have_the_signature_of_the_operation(operation):
    whole, start = (inspect.signature(getattr(xm, name)) for name in (operation, f"{operation}_start"))
    assert list(whole.parameters.values()) == list(start.parameters.values())
    assert start.return_annotation == "Flight"


def test_a_buffer_that_is_too_small_is_refused(mesh4, monkeypatch):
    """On a backend that needs memory: here its answer is made up, its check is not."""
    reference = backends.load("reference")
    monkeypatch.setattr(reference, "buffer_size_hint", lambda **sizes: 1000, raising=False)
    xm.Buffer(mesh4, "ep", num_tokens=T, hidden=H, size_bytes=1000).close()
    assert xm.Buffer(mesh4, "ep", num_tokens=T, hidden=H).size_bytes == 1000
    with pytest.raises(ValueError, match="size_bytes=1: operations of these shapes need 1000 bytes on every rank"):
        xm.Buffer(mesh4, "ep", num_tokens=T, hidden=H, size_bytes=1)


def test_an_unknown_backend_is_not_taken_for_plain_jax():
    with pytest.raises(ValueError, match="backend 'triton': must be"):
        backends.load("triton")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_no_rows_are_quantized_to_no_rows(dtype):
    empty = xm.quantize(jnp.zeros((0, 200)), dtype)
    assert empty.values.shape == (0, 200) and empty.scales.shape == (0, 2)
    assert xm.dequantize(empty).shape == (0, 200)


@pytest.mark.parametrize("hidden", [200, 384])
def test_blocks_that_an_explicit_axis_divides(mesh4, hidden):
    """Values and rows stay sharded as the array is: 384 elements of 4 devices are three blocks of 128."""
    given = np.random.default_rng(0).standard_normal((2, hidden)).astype(np.float32)
    x = jax.device_put(given, jax.NamedSharding(mesh4, P(None, "ep")))

    def there_and_back(x):
        scaled = xm.quantize(x, "int8")
        return scaled, xm.dequantize(scaled), xm.quantize_weights(x[None])

    found, expected = (jax.jit(there_and_back)(a) for a in (x, given))
    jax.tree.map(lambda a, b: assert_bits(a, np.asarray(b), "on explicit axes"), found, expected)
    assert found[0].values.sharding == found[1].sharding == x.sharding
    assert_bits(xm.dequantize(xm.quantize(x, "int8")), np.asarray(expected[1]), "outside of jit")


def test_rows_that_do_not_exist_count_as_dropped(mesh4):
    """A handle whose positions were overwritten: nothing is read out of bounds, other tokens keep their sum."""
    x, idx = operands()

    def body(x, idx, bad):
        routed = xm.dispatch(x, idx, num_experts=E, axis_name="ep")
        positions = routed.handle.positions
        beyond = jnp.where(positions[:, 0] >= 0, 2**30, positions[:, 0])
        damaged = jnp.where(bad.reshape(-1)[:1] > 0, positions.at[:, 0].set(beyond), positions)
        handle = dataclasses.replace(routed.handle, positions=damaged)
        return xm.combine(routed.x, routed.handle), xm.combine(routed.x, handle)

    program = jax.jit(jax.shard_map(body, mesh=mesh4, in_specs=P("ep"), out_specs=P("ep")))
    whole, damaged = (np.asarray(a) for a in program(*place(mesh4, x, idx, np.ones((RANKS, 1), np.int32))))
    first = np.arange(RANKS * T) % T == 0
    assert_bits(damaged[~first], whole[~first], "tokens whose rows exist")
    assert not damaged[first].any()


ROWS, AT = np.zeros((T, H), np.float32), np.zeros(RANKS, np.int32)
IDX, WEIGHTS, DOWN = np.zeros((T, K), np.int32), np.zeros((E // RANKS, H, 4)), np.zeros((E // RANKS, 4, H))
RAGGED = dict.fromkeys(("input_offsets", "send_sizes", "output_offsets", "recv_sizes"), AT) | {"axis_name": "ep"}
CALLS = {
    "all_gather": (xm.all_gather, {"x": ROWS, "axis_name": "ep"}),
    "all_to_all": (xm.all_to_all, {"x": ROWS, "axis_name": "ep", "split_axis": 0, "concat_axis": 0, "tiled": True}),
    "ragged_all_to_all": (xm.ragged_all_to_all, RAGGED | {"operand": ROWS, "output": ROWS}),
    "all_gather_matmul": (xm.all_gather_matmul, {"x": ROWS, "w": ROWS.T, "axis_name": "ep"}),
    "moe_mlp": (
        xm.moe_mlp,
        {"x": ROWS, "topk_idx": IDX, "topk_weights": None, "gate": WEIGHTS, "up": WEIGHTS, "down": DOWN}
        | {"num_experts": E, "axis_name": "ep"},
    ),
    "dispatch": (xm.dispatch, {"x": ROWS, "topk_idx": IDX, "num_experts": E, "axis_name": "ep"}),
}


@pytest.mark.parametrize(
    ("name", "argument", "value", "words"),
    [
        ("all_gather", "x", "rows", "is a str: must be an array"),
        ("all_gather", "to", [], r"to=\[\]: must be one of \('varying'"),
        ("all_gather", "axis_index_groups", 4, "axis_index_groups=4: must be a list of lists"),
        ("all_to_all", "x", np.array(["a"]), "x has dtype <U1: must be an array of numbers"),
        ("all_to_all", "axis_index_groups", [0, 1, 2, 3], "must be a list of lists"),
        ("all_to_all", "axis_index_groups", np.array(3), r"axis_index_groups=array\(3\): must be a list of lists"),
        ("ragged_all_to_all", "output", None, "is a NoneType: must be an array"),
        ("ragged_all_to_all", "send_sizes", 2**40, r"send_sizes=1099511627776: integers must be in \[-2147"),
        ("all_gather_matmul", "w", object(), "is a object: must be an array"),
        ("all_gather_matmul", "w", jnp.zeros((H, 2), "float8_e4m3fn"), "w float8_e4m3fn: no dtype has both"),
        ("moe_mlp", "topk_idx", [[1, 2], [3]], "is a list: must be an array"),
        ("moe_mlp", "combine_wire", "int9", "combine_wire='int9': must be"),
        ("dispatch", "num_experts", 2**31, "num_experts=2147483648: must be <= 2147483647"),
        ("dispatch", "alignment", 2**30, "alignment=1073741824, capacity=2147483648: row numbers are int32"),
        ("dispatch", "active", 2**40, "active=1099511627776: integers must be in .* int32"),
    ],
)
def test_bad_arguments_of_operations_are_named(mesh4, name, argument, value, words):
    function, given = CALLS[name]
    with pytest.raises((TypeError, ValueError), match=rf"{name}: .*{words}"):
        call = lambda: function(**(given | {argument: value}))  # noqa: E731
        jax.eval_shape(jax.shard_map(call, mesh=mesh4, in_specs=(), out_specs=P(), check_vma=False))


def test_groups_are_any_sequence_of_sequences(mesh4):
    """A drop-in takes every sequence of sequences that `jax.lax` takes as groups."""
    function, given = CALLS["all_gather"]

    def program(groups):
        call = lambda: function(**given, axis_index_groups=groups)  # noqa: E731
        return str(jax.make_jaxpr(jax.shard_map(call, mesh=mesh4, in_specs=(), out_specs=P(), check_vma=False))())

    expected = program([[0, 2], [1, 3]])
    assert expected != program([[0, 1], [2, 3]])
    array = np.array([[0, 2], [1, 3]])
    for groups in ((range(0, 4, 2), range(1, 4, 2)), array, jnp.asarray(array), list(array), list(jnp.asarray(array))):
        assert program(groups) == expected, groups


def deleted(array):
    """JAX refuses the values of a deleted array with the kind of error that it has for shards on other processes."""
    array = jnp.asarray(array)
    array.delete()
    return array


ROUTING = np.zeros((2, T, K), np.int32)
MODEL = {"num_tokens": T, "hidden": H, "num_ranks": 2, "num_experts": E, "top_k": K}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda p: p.route(IDX.astype(np.float32), 0), r"route: topk_idx is float32\[8, 2\]: must be integers"),
        (lambda p: p.route(IDX, 0.5), r"route: rank is float32\[\]: must be one integer"),
        (lambda p: p.without([True]), r"without: alive is bool\[1\]: must be bool\[2\]"),
        (lambda p: xm.balance.moves(p, 3), "new is a int: must be a Placement"),
        (lambda p: xm.balance.count(IDX, E, mask="all"), "mask is a str: must be an array"),
        (lambda p: xm.balance.plan([[1, 2], [3]], 2, 2), "counts is a list: must be an array whose values are known"),
        (lambda p: jax.jit(lambda c: xm.balance.plan(c, 2, 2).experts)(IDX[0]), "counts is a .*Tracer"),
        (lambda p: xm.balance.plan(deleted(np.ones(E)), 2, 2), "counts must be an array whose .* known: .*delet"),
        (lambda p: xm.balance.home(2**40, 2), "num_experts=1099511627776: must be <= 2147483647"),
        (lambda p: xm.buffer_size_hint(num_tokens=T, hidden=H, num_ranks=2, slots_per_rank=-1), "slots_per_rank=-1"),
        (lambda p: xm.perf_model("combine", **MODEL, intermediate=4), "intermediate=4.* operation='balance'"),
        (lambda p: xm.Links(fast=-1.0), "Links.fast=-1.0: must be a number > 0"),
        (lambda p: xm.Links(hop=(1.0, float("nan"))), "Links.hop=.*: must be two numbers"),
        (lambda p: xm.Links(hop=[1.0, 2.0, 3.0]), "Links.hop=.*: must be two numbers"),
        (lambda p: xm.Links(hop=1.0), "Links.hop=1.0: must be two numbers"),
        (lambda p: xm.routing.router_scores(jnp.ones((T, E)), "relu"), "router_scores: score='relu': must be one of"),
        (lambda p: xm.routing.top_k(jnp.ones((T, E)), 2, scale="1"), "top_k: scale is a str: must be an array"),
        (lambda p: xm.routing.top_k(jnp.ones((T, E)), 2, scale=True), "top_k: scale has dtype bool: must be real"),
        (lambda p: xm.routing.top_k(jnp.ones((T, E)), 2, scale=np.ones(3)), r"top_k: scale has .*\(8, 2\)"),
        (lambda p: xm.routing.top_k(jnp.ones((2, 4, E)), 2, scale=np.ones((3, 1))), r"top_k: scale has .*\(2, 4, 1\)"),
    ],
)  # fmt: skip
def test_bad_arguments_outside_operations_are_named(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call(xm.balance.home(E, 2))


def test_a_buffer_has_an_axis_once(mesh4):
    with pytest.raises(ValueError, match=r"Buffer: axis_name=\('ep', 'ep'\): must be .* two different names"):
        xm.Buffer(mesh4, ("ep", "ep"), num_tokens=T, hidden=H)


@pytest.mark.parametrize("kind", [list, np.array, jnp.array])
def test_pairs_of_links_are_any_sequence_of_two_numbers(kind):
    found = xm.Links(fast=kind(2.0) if kind is not list else 2, hop=kind([0.25, 0.5]))
    assert found == xm.Links(fast=2.0, hop=(0.25, 0.5)) and len({found, xm.Links(fast=2.0, hop=(0.25, 0.5))}) == 1


def test_routes_of_no_tokens_and_unsigned_routings():
    placement = xm.balance.home(E, 2)
    assert placement.route(np.zeros((0, K), np.int32), 0).shape == (0, K)
    given, unsigned = (xm.perf_model("dispatch", topk_idx=ROUTING.astype(d), **MODEL) for d in (np.int32, np.uint8))
    assert given == unsigned


def test_a_prediction_while_something_else_is_traced():
    """It is arithmetic on known numbers, and the same inside a program that is traced; a traced placement is named."""
    home = xm.balance.home(MODEL["num_experts"], MODEL["num_ranks"])

    def predictions():
        by_home = xm.perf_model("combine", topk_idx=ROUTING, placement=home, **MODEL)
        return by_home, xm.perf_model("balance", topk_idx=ROUTING, intermediate=4, **MODEL)

    outside, inside = predictions(), []
    jax.eval_shape(lambda: inside.extend(predictions()))
    assert tuple(inside) == outside
    with pytest.raises(TypeError, match="perf_model: placement is a .*Tracer: must be an array whose values are known"):
        jax.eval_shape(lambda p: xm.perf_model("combine", topk_idx=ROUTING, placement=p, **MODEL), home)


def test_counts_are_numbers_of_any_float_dtype():
    wide, narrow = (xm.balance.plan(np.array([4, 1, 2]).astype(d), 2, 2) for d in ("float64", "bfloat16"))
    assert_bits(narrow.experts, wide.experts, "experts")


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_numbers_that_jax_would_cut_are_named(dtype):
    """JAX would make 3 rows of 2**32 + 3."""
    mesh = jax.make_mesh((1,), ("ep",), devices=jax.devices()[:1])

    def moved(size):
        sizes = np.array([size], dtype)
        x = jnp.ones((4, 2))
        return xm.ragged_all_to_all(x, x, sizes * 0, sizes, sizes * 0, sizes, axis_name="ep")

    run = jax.shard_map(lambda: moved(3), mesh=mesh, in_specs=(), out_specs=jax.P("ep"))
    assert run().shape == (4, 2)
    with pytest.raises(TypeError, match=r"ragged_all_to_all: send_sizes=array.*must be in \[.*32"):
        jax.eval_shape(jax.shard_map(lambda: moved(2**32 + 3), mesh=mesh, in_specs=(), out_specs=jax.P("ep")))


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_an_index_beyond_int32_is_an_unused_slot(dtype):
    """JAX would cut 2**32 to expert 0."""
    home, far = xm.balance.home(E, 2), np.full((2, T, K), 2**32, dtype)
    far[0, 0, 0] = E - 1
    assert home.route(far[0], 0).ravel().tolist() == [E - 1, *[-1] * (T * K - 1)]
    assert xm.balance.count(far[0], E).tolist() == [*[0] * (E - 1), 1]
    placed, at_home = (xm.perf_model(topk_idx=far, placement=p, **MODEL) for p in (home, None))
    assert placed == at_home and placed.rows_fast == 1


def test_an_array_of_jax_is_taken_without_a_transfer():
    weights = jnp.ones((E, 2))
    with jax.transfer_guard("disallow"):
        assert _numbers.array(weights, "move", "weights") is weights
