"""Bad arguments: the error names the argument, its value and the remedy."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.support import HANG_S

pytest.importorskip("flax", reason="needs xen-moe-jax[flax]")

from flax import nnx

from tests.support.layers import CONFIG, H, layer, make_mesh, tokens
from xen_moe_jax.flax.linen import MoE as LinenMoE
from xen_moe_jax.flax.linen import variables_of
from xen_moe_jax.flax.nnx import MoE

CONFIG_ERRORS = [
    ({"hidden_size": 0}, ValueError, r"hidden_size=0: must be a positive int"),
    ({"intermediate_size": 2.5}, ValueError, r"intermediate_size=2.5"),
    ({"num_experts": True}, ValueError, r"num_experts=True"),
    ({"top_k": 9}, ValueError, r"top_k=9: must be <= num_experts=8"),
    ({"num_shared_experts": -1}, ValueError, r"num_shared_experts=-1"),
    ({"score": "tanh"}, ValueError, r"score='tanh': must be one of \('softmax', 'sigmoid', 'sparsemixer', 'uniform'\)"),
    ({"balancing": "luck"}, ValueError, r"balancing='luck'"),
    ({"layout": "ranked"}, ValueError, r"layout='ranked'.*xm.dispatch"),
    ({"num_groups": 3}, ValueError, r"num_groups=3: must divide num_experts=8"),
    ({"num_groups": 4, "topk_groups": 5}, ValueError, r"topk_groups=5"),
    ({"num_groups": 8, "topk_groups": 1}, ValueError, r"top_k=2.*hold only 1"),
    ({"weight_scale": float("nan")}, ValueError, r"weight_scale=nan"),
    ({"capacity": -1}, ValueError, r"capacity=-1"),
    ({"capacity": 4, "capacity_factor": 1.0}, ValueError, r"not both"),
    ({"capacity_factor": 0}, ValueError, r"capacity_factor=0"),
    ({"capacity": 4, "layout": "padded"}, ValueError, r"capacity=4: only layout='grouped'"),
    ({"drop": "random"}, ValueError, r"drop='random': must be one of \('position', 'source', 'weight'\)"),
    ({"drop": "weight", "layout": "padded"}, ValueError, r"drop='weight': only layout='grouped'"),
    ({"alignment": 8, "layout": "padded"}, ValueError, r"alignment=8: only layout='grouped'"),
    ({"axis_name": ()}, ValueError, r"axis_name=\(\)"),
    ({"axis_name": ["ep"]}, ValueError, r"axis_name=\['ep'\]: must be a mesh axis name, or a tuple"),
    ({"param_dtype": None}, ValueError, r"param_dtype=None: must be a floating-point dtype"),
    ({"param_dtype": "float8_e4m3fn"}, ValueError, r"param_dtype='float8_e4m3fn': .*dtype of 16 bits or more"),
    ({"dtype": "float64"}, ValueError, r"dtype='float64': must be None or one of \('float32', 'bfloat16', 'float16'\)"),
    ({"axis_name": ("ep", "ep")}, ValueError, r"axis_name"),
    ({"axis_name": ("a", "b"), "token_axes": ("a",)}, ValueError, r"token_axes=\('a',\).*includes axis_name"),
    ({"token_axes": ("dp", "tp"), "tensor_axis": "tp"}, ValueError, r"token_axes.*replicated over 'tp'"),
    ({"tensor_axis": "ep"}, ValueError, r"tensor_axis='ep'.*other than axis_name='ep'"),
    ({"activation": "tanh"}, ValueError, r"activation='tanh': must be one of \('swiglu'"),
    ({"activation_limit": 0}, ValueError, r"activation_limit=0"),
    ({"expert_bias": 1}, ValueError, r"expert_bias=1: must be True or False"),
    ({"choice": "hash"}, ValueError, r"balancing='aux_loss': choice='hash' has no balance"),
    ({"score": "uniform"}, ValueError, r"score='uniform': only choice='hash'"),
    ({"z_loss_weight": -1}, ValueError, r"z_loss_weight=-1"),
    ({"layout": "padded", "grouped_matmul": max}, ValueError, r"grouped_matmul=.*max.*layout='padded' .*use 'auto'"),
    ({"num_chunks": 0}, ValueError, r"num_chunks=0: must be a positive int"),
    ({"remat": "some"}, ValueError, r"remat='some': must be one of \('none', 'experts', 'all'\)"),
    ({"experts": 3}, TypeError, r"experts=3: must be a callable \(rows, group_sizes, weights\)"),
    ({"apply_weights_to": "x"}, ValueError, r"apply_weights_to='x': must be one of \('rows', 'activation', 'input'\)"),
    (
        {"apply_weights_to": "activation", "experts": print},
        ValueError,
        r"apply_weights_to='activation': experts=\.\.\.",
    ),
    ({"group_best": 0}, ValueError, r"group_best=0: must be a positive int"),
    ({"min_score_sum": 1e-12, "score": "sigmoid"}, ValueError, r"min_score_sum=1e-12: only score='softmax'"),
    ({"min_score_sum": 1e-12, "normalize_weights": False}, ValueError, r"min_score_sum=1e-12.*leave it 0"),
    ({"score": "sparsemixer"}, ValueError, r"normalize_weights=True: sparsemixer needs False"),
    (
        {"score": "sparsemixer", "normalize_weights": False, "balancing": "bias"},
        ValueError,
        r"balancing='bias': sparsemixer chooses by the logits",
    ),
    ({"shared_intermediate_size": 0}, ValueError, r"shared_intermediate_size=0: must be None or a positive int"),
    ({"shared_intermediate_size": 8, "num_shared_experts": 1}, ValueError, r"num_shared_experts=1.*use 0"),
    ({"shared_expert_gate": True}, ValueError, r"shared_expert_gate=True: needs a shared expert"),
    ({"grouped_matmul": "fast"}, ValueError, r"grouped_matmul='fast': must be one of .* or a callable"),
    ({"expert_sharding": ("ep",)}, ValueError, r"expert_sharding"),
    ({"kernel": "fast"}, TypeError, r"kernel='fast'.*KernelConfig"),
    ({"dtype": "int32"}, ValueError, r"dtype='int32'"),
]


@pytest.mark.parametrize("changes, error, message", CONFIG_ERRORS, ids=[str(c[0]) for c in CONFIG_ERRORS])
def test_config(changes, error, message):
    with pytest.raises(error, match=message):
        dataclasses.replace(CONFIG, **changes)


CALLABLE_ERRORS = {
    "narrower": (lambda rows, *_: rows[..., :3], ValueError, r"returned shape \[8, 3\]: must be \[8, 16\]"),
    "fewer rows": (lambda rows, *_: rows[:1], ValueError, r"returned shape \[1, 16\]: must be \[8, 16\]"),
    "nothing": (lambda *_: None, TypeError, r"returned a NoneType: must return one array"),
    "several": (lambda rows, *_: (rows, rows), TypeError, r"returned a tuple: must return one array"),
    "integers": (lambda rows, *_: rows.astype(int), TypeError, r"returned dtype int32: must be floating point"),
}


@pytest.mark.parametrize("name", CALLABLE_ERRORS)
@pytest.mark.parametrize("replicated", [False, True])
def test_experts_of_your_own_that_return_no_rows(name, replicated):
    """If tokens are replicated, missing rows would silently become zeros in the output."""
    experts, error, message = CALLABLE_ERRORS[name]
    where = {"token_axes": ()} if replicated else {}
    moe = layer(dataclasses.replace(CONFIG, experts=experts, capacity=None if replicated else 8, **where))
    with pytest.raises(error, match=rf"^experts=<lambda> {message}"):
        jax.eval_shape(moe, jnp.asarray(tokens(4)))


def test_a_grouped_matmul_that_returns_another_shape():
    moe = layer(dataclasses.replace(CONFIG, grouped_matmul=lambda rows, weights, sizes: rows))
    with pytest.raises(ValueError, match=r"grouped_matmul=.*<lambda> returned shape \[8, 16\]: must be \[8, 24\]"):
        jax.eval_shape(moe, jnp.asarray(tokens(4)))


def test_experts_of_another_dtype_leave_the_output_in_that_of_the_tokens():
    config = dataclasses.replace(CONFIG, experts=lambda rows, *_: rows.astype(jnp.float32))
    y, _ = jax.eval_shape(layer(config), jnp.zeros((4, H), jnp.bfloat16))
    assert y.dtype == jnp.bfloat16


def test_config_is_required():
    with pytest.raises(TypeError, match="MoEConfig"):
        MoE({"hidden_size": 4}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="MoEConfig"):
        LinenMoE({"hidden_size": 4}).init(jax.random.key(0), jnp.zeros((4, 4)))


@pytest.mark.parametrize(
    "x, kwargs, error, message",
    [
        (np.zeros((4, H + 1), np.float32), {}, ValueError, r"x has shape \(4, 17\).*hidden_size=16"),
        (np.zeros((4, H), np.int32), {}, TypeError, r"x has dtype int32.*embed"),
        (np.zeros((4, H), np.float32), {"mask": np.ones(3, bool)}, ValueError, r"mask is bool\[3\]: must be bool\[4\]"),
        (np.zeros((4, H), np.float32), {"mask": np.ones(4)}, ValueError, r"mask is float64\[4\]"),
        ([[0.0] * H], {}, TypeError, "x is a list: must be an array"),
        (np.zeros((4, H), np.float32), {"mask": [True] * 4}, TypeError, "mask is a list: must be an array"),
        (np.zeros((4, H), np.float32), {"token_ids": np.ones(4, int)}, ValueError, r"token_ids is an array.*'top_k'"),
    ],
)
def test_input(x, kwargs, error, message):
    with pytest.raises(error, match=message):
        layer(CONFIG)(x, **kwargs)


def test_mesh_without_the_axis():
    mesh = make_mesh((4,), ("data",))
    with pytest.raises(ValueError, match=r"axis_name='ep': the mesh has axes \('data',\).*add the axis"):
        layer(CONFIG, mesh=mesh)
    moe = layer(CONFIG)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="axis_name='ep'"):
        moe(jnp.asarray(tokens(4)))


def test_unknown_token_axes():
    config = dataclasses.replace(CONFIG, token_axes=("batch", "ep"))
    with pytest.raises(ValueError, match=r"token_axes=\('batch', 'ep'\): the mesh has axes"):
        layer(config, mesh=make_mesh((2, 4), ("dp", "ep")))(jnp.asarray(tokens(8)))


def test_half_manual_expert_axes():
    config = dataclasses.replace(CONFIG, axis_name=("node", "gpu"))
    moe = layer(config)
    call = jax.shard_map(
        lambda x: moe(x)[0],
        mesh=make_mesh((2, 4), ("node", "gpu")),
        in_specs=jax.P("node"),
        out_specs=jax.P("node"),
        axis_names={"node"},
    )
    with pytest.raises(ValueError, match=r"manual over \['node'\] only"):
        jax.jit(call)(tokens(8))


def test_tokens_that_the_expert_axis_does_not_split():
    """In the caller's `shard_map`, split over another axis alone: JAX's own words for it name no argument."""
    moe = layer(CONFIG)
    call = jax.shard_map(
        lambda x: moe(x)[0], mesh=make_mesh((2, 4), ("dp", "ep")), in_specs=jax.P("dp"), out_specs=jax.P("dp")
    )
    with pytest.raises(
        ValueError,
        match=r"token_axes=None: x varies over \['dp'\].*same on all ranks of \['ep'\].*token_axes=\('dp',\)",
    ):
        jax.jit(call)(tokens(8))


def test_wrong_number_of_experts_in_a_shard():
    mesh = make_mesh((2, 4), ("dp", "ep"))
    graph, state = nnx.split(layer(CONFIG))
    specs = jax.tree.map(lambda _: jax.P(), state)
    specs["gate"] = specs["gate"].replace(jax.P("dp"))
    call = jax.shard_map(
        lambda state, x: nnx.merge(graph, state)(x)[0],
        mesh=mesh,
        in_specs=(specs, jax.P(("dp", "ep"))),
        out_specs=jax.P(("dp", "ep")),
    )
    with pytest.raises(ValueError, match=r"gate holds 4 experts on this rank: expected 2 .* check the in_specs"):
        jax.jit(call)(state, tokens(8))


def test_update_bias_needs_a_bias():
    moe = layer(CONFIG)
    with pytest.raises(ValueError, match="balancing='aux_loss'.*needs balancing='bias'"):
        moe.update_bias(moe(jnp.asarray(tokens(4)))[1])


def test_update_bias_takes_the_metrics_of_a_call():
    moe = layer(dataclasses.replace(CONFIG, balancing="bias"))
    for metrics, name in ((None, "NoneType"), (jnp.ones(8), "ArrayImpl")):
        with pytest.raises(TypeError, match=f"update_bias: metrics is a {name}: must be the MoEMetrics of a call"):
            moe.update_bias(metrics)


@pytest.mark.parametrize("adopt", [functools.partial(MoE.from_weights, CONFIG), variables_of], ids=["nnx", "linen"])
def test_weights_are_arrays_by_name(adopt):
    with pytest.raises(TypeError, match="weights is a list: must be a dict of arrays by name"):
        adopt([jnp.ones((H, 8))])
    for weight, name in (([1.0, 2.0], "list"), (None, "NoneType")):
        with pytest.raises(TypeError, match=rf"weights\['router'\] is a {name}: must be an array"):
            adopt({"router": weight})


def test_without_flax_the_error_says_what_to_install():
    code = (
        "import sys; sys.modules['flax'] = None\n"
        "import xen_moe_jax.flax as f; assert f.MoEConfig\n"
        "try: f.nnx\n"
        "except ModuleNotFoundError as error: assert \"pip install 'xen-moe-jax[flax]'\" in str(error), error\n"
        "else: raise SystemExit('no error')\n"
        "assert not hasattr(f, 'torch')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


def test_the_layer_is_asked_for_without_its_front_end():
    with pytest.raises(ImportError, match=r"from xen_moe_jax\.flax\.nnx import MoE, or from xen_moe_jax\.flax\.linen"):
        from xen_moe_jax.flax import MoE  # noqa: F401


def test_a_mesh_is_a_mesh():
    with pytest.raises(TypeError, match="mesh is a tuple: must be a jax.sharding.Mesh"):
        MoE(CONFIG, mesh=("ep",), rngs=nnx.Rngs(0))
