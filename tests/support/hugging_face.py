"""Small seeded checkpoints with each family's own names, shapes and quirks, and the expected results of their MoE
layers.

Written from the models' published definitions, in float64 NumPy, and not from the library.
"""

import json

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

H, F, E, K = 128, 64, 8, 3
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def best(scores, k):
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


class Model:
    """Random tensors by the family's names, as they stand in the file, and as float64 for the evaluation."""

    def __init__(self, seed, dtype):
        self.rng, self.dtype = np.random.default_rng(seed), dtype
        self.file, self.exact = {}, {}

    def add(self, name, *shape, scale=None):
        value = self.rng.normal(size=shape) * (shape[-1] ** -0.5 if scale is None else scale)
        self.keep(name, value.astype(self.dtype))
        return name

    def keep(self, name, array, exact=None):
        self.file[name] = array
        self.exact[name] = array.astype(np.float64) if exact is None else exact

    def write(self, folder, config, parts=1):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        names = [f"model-{part + 1:05}-of-{parts:05}.safetensors" for part in range(parts)]
        for part, name in enumerate(names):
            tensors = {n: np.ascontiguousarray(a) for i, (n, a) in enumerate(self.file.items()) if i % parts == part}
            save_file(tensors, folder / name, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {n: names[i % parts] for i, n in enumerate(self.file)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))


MLP = ("gate_proj", "up_proj", "down_proj")
MIXTRAL = ("w1", "w3", "w2")


class Block(Model):
    """The router and the experts of a layer, one matrix a tensor.

    Args:
      kind: the model type.
      place: of the block in the layer.
      names: of an expert's matrices.
      start: of every name.
    """

    def __init__(self, kind, seed, dtype, layer, place="mlp", names=MLP, gate_scale=None, start="model."):
        super().__init__(seed, dtype)
        self.prefix, self.names = f"{start}layers.{layer}.{place}", names
        self.config = {"model_type": kind, "hidden_size": H, "intermediate_size": F, "hidden_act": "silu"}
        self.add(f"{self.prefix}.gate.weight", E, H, scale=gate_scale)
        for e in range(E):
            for name, shape in zip(names, ((F, H), (F, H), (H, F)), strict=True):
                self.add(self.expert(e, name), *shape)

    def write(self, folder, config, parts=1):
        super().write(folder, self.config | config, parts)

    def expert(self, e, name):
        return f"{self.prefix}.experts.{e}.{name}.weight"

    def logits(self, x):
        return x @ self.exact[f"{self.prefix}.gate.weight"].T

    def run(self, x, chosen, weights):
        y = np.zeros_like(x)
        for t in range(len(x)):
            for e, share in zip(chosen[t], weights[t], strict=True):
                gate, up, down = (self.exact[self.expert(e, name)] for name in self.names)
                y[t] += share * (down @ (silu(gate @ x[t]) * (up @ x[t])))
        return y


def of(scores, chosen, normalize=True):
    """The scores of the chosen experts, divided by their sum."""
    weights = np.take_along_axis(scores, chosen, 1)
    return weights / weights.sum(1, keepdims=True) if normalize else weights


def of_best_groups(scores, groups, least):
    """`scores`, with `least` for experts outside of the two best of four groups."""
    allowed = np.zeros_like(groups, bool)
    np.put_along_axis(allowed, best(groups, 2), True, 1)
    return np.where(np.repeat(allowed, E // 4, 1), scores, least)


def mixtral(folder, layer=1, start="model."):
    model = Block("mixtral", 1, ml_dtypes.bfloat16, layer, "block_sparse_moe", MIXTRAL, start=start)
    model.write(folder, {"num_local_experts": E, "num_experts_per_tok": K, "num_hidden_layers": 2})

    def forward(x):
        scores = softmax(model.logits(x))
        chosen = best(scores, K)
        return model.run(x, chosen, of(scores, chosen))

    return layer, forward


def minimax_m2(folder, layer=1):
    """Sigmoid scores and a bias for the choice, with Mixtral's names."""
    model = Block("minimax_m2", 5, np.float32, layer, "block_sparse_moe", MIXTRAL)
    bias = model.add(f"{model.prefix}.e_score_correction_bias", E, scale=0.3)
    model.write(folder, {"num_local_experts": E, "num_experts_per_tok": K, "num_hidden_layers": 2})

    def forward(x):
        scores = sigmoid(model.logits(x))
        chosen = best(scores + model.exact[bias], K)
        return model.run(x, chosen, of(scores, chosen))

    return layer, forward


def qwen3_moe(folder, layer=3, normalize=False):
    """Layers 1, 3, ... have experts, and in some models the weights are not normalised."""
    model = Block("qwen3_moe", 2, np.float32, layer)
    config = {"intermediate_size": 999, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K}
    config |= {"norm_topk_prob": normalize, "decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4}
    model.write(folder, config, parts=3)

    def forward(x):
        scores = softmax(model.logits(x))
        chosen = best(scores, K)
        return model.run(x, chosen, of(scores, chosen, normalize=False))

    return layer, forward


def deepseek_v3(folder, layer=3, fp8=False):
    """Sigmoid scores, a bias for the choice, two of four groups, shared experts; fp8 with a scale per 128 x 128."""
    model, block = Block("deepseek_v3", 3, np.float32, layer), (48, 32)
    bias = model.add(f"{model.prefix}.gate.e_score_correction_bias", E, scale=0.3)
    shared = add_shared(model, f"{model.prefix}.shared_experts", 2 * F)
    if fp8:
        for name in [n for n in model.file if "experts" in n]:
            values = (model.file[name] * 64).astype(ml_dtypes.float8_e4m3fn)
            rows, columns = (-(-n // b) for n, b in zip(values.shape, block, strict=True))
            scales = model.rng.uniform(0.5, 2, (rows, columns)).astype(np.float32) / 64
            exact = values.astype(np.float64)
            for i in range(values.shape[0]):
                for j in range(values.shape[1]):
                    exact[i, j] *= scales[i // block[0], j // block[1]]
            model.keep(name, values, exact)
            model.keep(f"{name}_scale_inv", scales)
    config = {"moe_intermediate_size": F, "intermediate_size": 999, "first_k_dense_replace": 3, "moe_layer_freq": 1}
    config |= {"n_routed_experts": E, "num_experts_per_tok": K, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    config |= {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "num_hidden_layers": 4}
    config |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    if fp8:
        config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": list(block)}
    model.write(folder, config, parts=2)

    def forward(x):
        scores = sigmoid(model.logits(x))
        biased = scores + model.exact[bias]
        groups = np.sort(biased.reshape(len(x), 4, E // 4), axis=-1)[..., -2:].sum(-1)
        chosen = best(of_best_groups(biased, groups, -np.inf), K)
        return model.run(x, chosen, 2.5 * of(scores, chosen)) + run_shared(model.exact, shared, x)

    return layer, forward


def add_shared(model, place, width):
    for name, shape in zip(MLP, ((width, H), (width, H), (H, width)), strict=True):
        model.add(f"{place}.{name}.weight", *shape)
    return place


def run_shared(w, place, x):
    gate, up, down = (w[f"{place}.{name}.weight"] for name in MLP)
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def run_fused(gate_up, down, x, chosen, weights, into=None):
    """`gate_up [E, H, 2F]`, gate first, and `down [E, F, H]`; `into` are factors of the experts' input."""
    y = np.zeros_like(x)
    for t in range(len(x)):
        for slot, e in enumerate(chosen[t]):
            token = x[t] if into is None else x[t] * into[t, slot]
            gate, up = np.split(token @ gate_up[e], 2)
            y[t] += weights[t, slot] * ((silu(gate) * up) @ down[e])
    return y


def qwen2_moe(folder, layer=1, normalize=False):
    """A shared expert of a width of its own, behind a sigmoid gate."""
    model = Block("qwen2_moe", 6, np.float32, layer)
    shared = add_shared(model, f"{model.prefix}.shared_expert", 48)
    of_shared = model.add(f"{model.prefix}.shared_expert_gate.weight", 1, H)
    config = {"intermediate_size": 999, "moe_intermediate_size": F, "num_experts": E, "num_experts_per_tok": K}
    config |= {"norm_topk_prob": normalize, "num_hidden_layers": 2, "mlp_only_layers": []}
    model.write(folder, config | {"shared_expert_intermediate_size": 48}, parts=2)

    def forward(x):
        scores = softmax(model.logits(x))
        chosen = best(scores, K)
        gate = sigmoid(x @ model.exact[of_shared].T)
        return model.run(x, chosen, of(scores, chosen, normalize)) + gate * run_shared(model.exact, shared, x)

    return layer, forward


def deepseek_v2(folder, layer=1):
    """Softmax scores, groups by their best expert, a large factor and no normalisation."""
    model = Block("deepseek_v2", 8, ml_dtypes.bfloat16, layer, gate_scale=2 * H**-0.5)
    shared = add_shared(model, f"{model.prefix}.shared_experts", 2 * F)
    config = {"moe_intermediate_size": F, "intermediate_size": 999, "first_k_dense_replace": 1, "moe_layer_freq": 1}
    config |= {"n_routed_experts": E, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    config |= {"routed_scaling_factor": 16.0, "norm_topk_prob": False, "num_hidden_layers": 2}
    model.write(folder, config | {"scoring_func": "softmax", "topk_method": "group_limited_greedy"})

    def forward(x):
        scores = softmax(model.logits(x))
        chosen = best(of_best_groups(scores, scores.reshape(len(x), 4, E // 4).max(-1), 0), 2)
        return model.run(x, chosen, 16 * of(scores, chosen, normalize=False)) + run_shared(model.exact, shared, x)

    return layer, forward


def ernie(folder, layer=1, norm_min=0.3, bias=True):
    """Softmax scores and a bias for the choice; `norm_min` is large enough here to be met by some tokens."""
    model = Block("ernie4_5_moe", 9, np.float32, layer)
    name = model.add(f"{model.prefix}.moe_statics.e_score_correction_bias", 1, E, scale=0.3) if bias else None
    shared = add_shared(model, f"{model.prefix}.shared_experts", 2 * F)
    config = {"intermediate_size": 999, "moe_intermediate_size": F, "num_hidden_layers": 2, "moe_use_aux_free": bias}
    config |= {"moe_num_experts": E, "moe_k": K, "moe_num_shared_experts": 2, "moe_norm_min": norm_min}
    config |= {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1, "use_bias": False}
    model.write(folder, config)

    def forward(x):
        scores = softmax(model.logits(x))
        chosen = best(scores + (model.exact[name] if bias else 0), K)
        weights = of(scores, chosen, normalize=False)
        total = weights.sum(1, keepdims=True)
        assert (total > norm_min).any() and (not bias or norm_min < 0.1 or (total < norm_min).any())
        return model.run(x, chosen, weights / np.maximum(total, norm_min)) + run_shared(model.exact, shared, x)

    return layer, forward


def phimoe(folder, layer=1):
    """Mixtral's names; two experts, each weighed among those that are near the best one left (SparseMixer-v2)."""
    model = Block("phimoe", 10, ml_dtypes.bfloat16, layer, "block_sparse_moe", MIXTRAL)
    config = {"num_local_experts": E, "num_experts_per_tok": 2, "num_hidden_layers": 2}
    model.write(folder, config | {"router_jitter_noise": 0.2, "input_jitter_noise": 0.01})

    def forward(x):
        logits = model.logits(x)
        chosen = best(logits, 2)
        left, weights = logits.copy(), []
        for slot in range(2):
            top = left.max(1, keepdims=True)
            far = (top - logits) / np.maximum(np.abs(logits), top) > 2 * 0.2
            weights.append(np.take_along_axis(softmax(np.where(far, -np.inf, left)), chosen[:, slot : slot + 1], 1))
            np.put_along_axis(left, chosen[:, slot : slot + 1], -np.inf, 1)
        return model.run(x, chosen, np.concatenate(weights, 1))

    return layer, forward


def granite(folder, layer=0, kind="granitemoehybrid"):
    """Gate and up in one tensor for all experts, softmax over the chosen logits, a shared expert outside the block."""
    prefix = f"model.layers.{layer}"
    block, shared = f"{prefix}.block_sparse_moe", f"{prefix}.shared_mlp"
    model = Model(11, ml_dtypes.bfloat16)
    model.add(f"{block}.router.layer.weight", E, H)
    model.add(f"{block}.input_linear.weight", E, 2 * F, H)
    model.add(f"{block}.output_linear.weight", E, H, F)
    config = {"model_type": kind, "hidden_size": H, "intermediate_size": F, "num_local_experts": E}
    if kind != "granitemoe":
        model.add(f"{shared}.input_linear.weight", 96, H)
        model.add(f"{shared}.output_linear.weight", H, 48)
        config |= {"shared_intermediate_size": 48}
    model.write(folder, config | {"num_experts_per_tok": K, "num_hidden_layers": 1, "hidden_act": "silu"})

    def forward(x):
        w = model.exact
        logits = x @ w[f"{block}.router.layer.weight"].T
        chosen = best(logits, K)
        weights = softmax(np.take_along_axis(logits, chosen, 1))
        both, down = (w[f"{block}.{name}_linear.weight"].swapaxes(1, 2) for name in ("input", "output"))
        y = run_fused(both, down, x, chosen, weights)
        if kind != "granitemoe":
            gate, up = np.split(x @ w[f"{shared}.input_linear.weight"].T, 2, axis=1)
            y = y + (silu(gate) * up) @ w[f"{shared}.output_linear.weight"].T
        return y

    return layer, forward


def llama4(folder, layer=1, top_k=1, start="language_model.model."):
    """Experts as `[E, in, out]`, the token multiplied by the sigmoid of the logit, a shared expert, text and images."""
    prefix = f"{start}layers.{layer}.feed_forward"
    model = Model(12, ml_dtypes.bfloat16)
    model.add(f"{prefix}.router.weight", E, H)
    model.add(f"{prefix}.experts.gate_up_proj", E, H, 2 * F, scale=H**-0.5)
    model.add(f"{prefix}.experts.down_proj", E, F, H, scale=F**-0.5)
    add_shared(model, f"{prefix}.shared_expert", F)
    config = {"model_type": "llama4_text", "hidden_size": H, "intermediate_size": F, "intermediate_size_mlp": 999}
    config |= {"num_local_experts": E, "num_experts_per_tok": top_k, "num_hidden_layers": 4, "hidden_act": "silu"}
    config |= {"interleave_moe_layer_step": 2, "moe_layers": None}
    model.write(folder, {"model_type": "llama4", "text_config": config, "vision_config": {"hidden_size": 3}})

    def forward(x):
        w = model.exact
        logits = x @ w[f"{prefix}.router.weight"].T
        chosen = best(logits, top_k)
        into = sigmoid(np.take_along_axis(logits, chosen, 1))
        gate_up, down = (w[f"{prefix}.experts.{name}"] for name in ("gate_up_proj", "down_proj"))
        y = run_fused(gate_up, down, x, chosen, np.ones_like(into), into)
        return y + run_shared(w, f"{prefix}.shared_expert", x)

    return layer, forward


def gpt_oss(folder, layer=0, mxfp4=False):
    """All experts in one tensor, gate and up interleaved, biases everywhere, clipping; MXFP4 as published."""
    prefix = f"model.layers.{layer}.mlp"
    model = Model(4, ml_dtypes.bfloat16)
    model.add(f"{prefix}.router.weight", E, H)
    model.add(f"{prefix}.router.bias", E, scale=0.3)
    for name, (rows, columns) in (("gate_up_proj", (H, 2 * F)), ("down_proj", (F, H))):
        model.add(f"{prefix}.experts.{name}_bias", E, columns, scale=0.3)
        full = f"{prefix}.experts.{name}"
        if not mxfp4:
            model.add(full, E, rows, columns, scale=rows**-0.5)
            continue
        codes = model.rng.integers(0, 16, (E, columns, rows))
        exponents = model.rng.integers(122, 125, (E, columns, rows // 32)).astype(np.uint8)
        exact = np.empty((E, rows, columns))
        for e, o, i in np.ndindex(codes.shape):
            code = codes[e, o, i]
            sign = -1 if code >= 8 else 1
            exact[e, i, o] = sign * FP4[code % 8] * 2.0 ** (int(exponents[e, o, i // 32]) - 127)
        packed = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
        model.exact[full] = exact
        model.file[f"{full}_blocks"] = packed.reshape(E, columns, rows // 32, 16)
        model.file[f"{full}_scales"] = exponents
    config = {"model_type": "gpt_oss", "hidden_size": H, "intermediate_size": F, "num_local_experts": E}
    model.write(folder, config | {"num_experts_per_tok": K, "swiglu_limit": 0.9, "num_hidden_layers": 1})

    def forward(x):
        w = {name.removeprefix(f"{prefix}."): array for name, array in model.exact.items()}
        logits = x @ w["router.weight"].T + w["router.bias"]
        chosen = best(logits, K)
        weights = softmax(np.take_along_axis(logits, chosen, 1))
        y = np.zeros_like(x)
        for t in range(len(x)):
            for e, share in zip(chosen[t], weights[t], strict=True):
                both = x[t] @ w["experts.gate_up_proj"][e] + w["experts.gate_up_proj_bias"][e]
                gate, up = np.minimum(both[0::2], 0.9), np.clip(both[1::2], -0.9, 0.9)
                hidden = (up + 1) * gate / (1 + np.exp(-1.702 * gate))
                y[t] += share * (hidden @ w["experts.down_proj"][e] + w["experts.down_proj_bias"][e])
        return y

    return layer, forward
