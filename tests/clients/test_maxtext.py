"""MaxText 0.2.5 itself: its routed layer on the drop-in and on dispatch and combine, beside its own dense path.

`make maxtext-test` installs it in an environment of its own; elsewhere these tests are skipped.
"""

import importlib.metadata
import importlib.util
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xen_moe_jax as xm
from tests.support import ROOT

VERSION = "0.2.5"
if importlib.util.find_spec("maxtext") is None:
    pytest.skip("MaxText is not installed here: make maxtext-test installs and runs it", allow_module_level=True)
if (found := importlib.metadata.version("maxtext")) != VERSION:
    pytest.skip(f"MaxText {found} is installed, and this is about {VERSION}", allow_module_level=True)
if jax.device_count() != 8:
    pytest.skip(
        f"eight devices are shared out between axes, and there are {jax.device_count()}", allow_module_level=True
    )

os.environ["DECOUPLE_GCLOUD"] = "TRUE"  # MaxText then looks for nothing of Google's cloud
import maxtext  # noqa: E402
from flax import nnx  # noqa: E402
from flax.linen import partitioning  # noqa: E402
from maxtext.configs import pyconfig  # noqa: E402
from maxtext.layers import initializers, moe  # noqa: E402
from maxtext.trainers.pre_train import train  # noqa: E402
from maxtext.utils import maxtext_utils  # noqa: E402

STEPS = 6
MODEL = {
    "decoder_block": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "base_num_decoder_layers": 2,
    "base_emb_dim": 64, "base_mlp_dim": 128, "base_moe_mlp_dim": 128, "base_num_query_heads": 4,
    "base_num_kv_heads": 4, "head_dim": 16, "vocab_size": 256, "max_target_length": 32, "per_device_batch_size": 2,
    "ici_expert_parallelism": 4, "ici_fsdp_parallelism": 2, "attention": "dot_product", "megablox": False,
    "dtype": "float32", "matmul_precision": "highest",
}  # fmt: skip
"""A tiny Mixtral, and the settings for a CPU."""
RUN = {
    "dataset_type": "synthetic", "steps": STEPS, "learning_rate": 0.01, "warmup_steps_fraction": 0.0,
    "enable_checkpointing": False, "hardware": "cpu", "skip_jax_distributed_system": True, "log_config": False,
    "enable_tensorboard": False, "enable_goodput_recording": False, "monitor_goodput": False,
    "sharding_tolerance": 1.0,
}  # fmt: skip


@pytest.fixture
def experts(monkeypatch):
    """`examples/maxtext_experts.py`. What its `install` replaces comes back after the test."""
    spec = importlib.util.spec_from_file_location("maxtext_experts", ROOT / "examples" / "maxtext_experts.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in ("permute", "unpermute", "get_expert_parallelism_size"):
        monkeypatch.setattr(moe.RoutedMoE, name, getattr(moe.RoutedMoE, name))
    monkeypatch.setattr(moe, "RouteOutput", moe.RouteOutput)
    return module


@pytest.fixture
def use_dispatch_and_combine(experts, monkeypatch):
    """A call that puts dispatch and combine into MaxText, whose own exchange must not run afterwards."""

    def exchange(*_, **__):
        raise AssertionError("MaxText's own exchange was called")

    def use():
        experts.install()
        monkeypatch.setattr(jax.lax, "ragged_all_to_all", exchange)

    return use


@pytest.fixture
def drop_in(monkeypatch):
    """The one line; the list that it returns has an entry for every call that MaxText traced."""
    calls = []

    def counted(*arguments, **options):
        calls.append(None)
        return xm.ragged_all_to_all(*arguments, **options)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", counted)
    return calls


def arguments(folder, **options):
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    named = {"run_name": "test", "base_output_directory": str(folder), **MODEL, **RUN, **options}
    return ["train", base, *(f"{name}={value}" for name, value in named.items())]


def losses(folder, **options):
    """float64 `[STEPS]`: the loss of every step, as MaxText writes it."""
    metrics = folder / "metrics.json"
    train.main(arguments(folder, metrics_file=str(metrics), **options))
    return np.array([json.loads(line)["learning/loss"] for line in metrics.read_text().splitlines()])


@pytest.fixture(scope="module")
def dense_losses(tmp_path_factory):
    """MaxText's dense path: every expert on every token, and no exchange of rows."""
    found = losses(tmp_path_factory.mktemp("dense"), sparse_matmul=False)
    assert found.shape == (STEPS,) and found[-1] < 0.6 * found[0], found  # it learns, so that the gradients count
    return found


def same(found, expected):
    print(f"largest difference of {STEPS} losses from the dense path: {np.abs(found - expected).max():.2e}")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


def test_its_own_branch_trains_on_the_drop_in(dense_losses, tmp_path, drop_in):
    same(losses(tmp_path), dense_losses)
    assert drop_in, "MaxText exchanged no rows"


def test_it_trains_with_dispatch_and_combine(dense_losses, tmp_path, use_dispatch_and_combine):
    use_dispatch_and_combine()
    same(losses(tmp_path), dense_losses)


def layer_of(config, mesh):
    return moe.RoutedMoE(
        config=config, num_experts=config.num_experts, num_experts_per_tok=config.num_experts_per_tok, mesh=mesh,
        kernel_init=initializers.nd_dense_init(1.0, "fan_in", "truncated_normal"), kernel_axes=("embed", None),
        intermediate_dim=config.moe_mlp_dim, dtype=config.dtype, rngs=nnx.Rngs(params=0),
    )  # fmt: skip


def evaluate(folder, chosen=None, force_dropless=False, **options):
    """One routed layer of MaxText's: outputs, gradients of input and weights, and whether rows were dropped."""
    config = pyconfig.initialize(arguments(folder, **options))
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)
    keys = jax.random.split(jax.random.key(0), 3)
    x, target = (jax.random.normal(key, (16, 32, 64)) for key in keys[:2])
    with jax.set_mesh(mesh), partitioning.axis_rules(config.logical_axis_rules):
        layer = layer_of(config, mesh)
        layer.force_dropless = force_dropless
        graph, weights, rest = nnx.split(layer, nnx.Param, ...)
        leaves, tree = jax.tree.flatten(weights)
        weights = tree.unflatten([jax.random.normal(keys[2], a.shape) * a.shape[-2] ** -0.5 if a.ndim > 1 else
                                  jax.random.normal(keys[2], a.shape) for a in leaves])  # fmt: skip

        def loss(weights, x):
            layer = nnx.merge(graph, weights, rest)
            y, balance, bias = layer(x, forced_routed_experts=chosen)
            flags = nnx.to_pure_dict(nnx.pop(layer, nnx.Intermediate))["moe_has_overflow"]
            total = (y * target).sum() + (0.0 if balance is None else balance)
            return total, {"y": y, "balance": balance, "bias": bias, "overflow": jnp.any(flags[0])}

        gradients, found = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(weights, x)
    return {**found, "gradients": gradients}


def agree(got, expected):
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        place = jax.tree_util.keystr(path)
        other = dict(jax.tree_util.tree_leaves_with_path(got))[path]
        assert place == "['overflow']" or np.abs(value).max() > 1e-3, f"nothing is tested about {place}"
        np.testing.assert_allclose(other, value, rtol=1e-4, atol=1e-4, err_msg=place)


def chosen_by_hand():
    """Router replay: int32 `[batch, length, top-k]`, two experts for each token, some slots unused."""
    chosen = jnp.argsort(jax.random.uniform(jax.random.key(3), (16, 32, 8)))[..., :2]
    return jnp.where(jax.random.uniform(jax.random.key(4), chosen.shape) < 0.2, -1, chosen)


LAYERS = {
    "tensor parallelism": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2},
    "biases of experts": {"mlp_bias": True},
    "balancing loss": {"load_balance_loss_weight": 0.1},
    "checked varying axes": {"check_vma": True},
    "weights on the input": {"decoder_block": "llama4", "num_experts_per_tok": 1},
    "bias of the router": {
        "decoder_block": "deepseek", "routed_bias": True, "routed_score_func": "sigmoid",
        "routed_bias_update_rate": 0.1, "shared_experts": 1, "first_num_dense_layers": 1,
    },
    "router replay": {"chosen": chosen_by_hand},
}  # fmt: skip


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_its_layer_computes_what_it_did(options, tmp_path, drop_in, use_dispatch_and_combine):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    expected = evaluate(tmp_path, **options)
    use_dispatch_and_combine()
    agree(evaluate(tmp_path, **options), expected)


def test_a_bounded_buffer_says_that_it_overflowed(tmp_path, drop_in, use_dispatch_and_combine):
    """`ragged_buffer_factor` is the capacity. MaxText's all-to-all drops rows and leaves its flag False."""
    everything = evaluate(tmp_path)
    own = evaluate(tmp_path, ragged_buffer_factor=0.75)
    assert not own["overflow"]
    use_dispatch_and_combine()
    dropped = evaluate(tmp_path, ragged_buffer_factor=0.75)
    np.testing.assert_allclose(dropped["y"], own["y"], rtol=1e-4, atol=1e-4)  # the same rows are dropped
    assert dropped["overflow"] and jax.tree.all(jax.tree.map(lambda a: np.isfinite(a).all(), dropped))
    whole = np.isclose(dropped["y"], everything["y"], rtol=1e-4, atol=1e-4).all(-1)
    assert 0.3 < whole.mean() < 0.95  # a quarter of the rows and more is gone, and each is one of a token's two
    for enough in ({"ragged_buffer_factor": 4.0}, {"ragged_buffer_factor": 0.75, "force_dropless": True}):
        agree(evaluate(tmp_path, **enough), everything)


def test_another_release_is_refused(experts, monkeypatch):
    monkeypatch.setattr(experts, "__version__", "0.3.0")
    with pytest.raises(RuntimeError, match="is for MaxText 0.2.5, and 0.3.0 is installed: compare what it replaces"):
        experts.install()
