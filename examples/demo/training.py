"""Training and evaluation of the language model on a mesh: data over ("dp", "ep"), experts over "ep"."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from examples.demo.model import LanguageModel, ModelConfig, next_byte_losses


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Host values of one step: loss in nats per byte, rows dropped, and load int32 `[MoE layers, E]`."""

    loss: float
    dropped: int
    load: np.ndarray


def optimizer(learning_rate: float, steps: int) -> optax.GradientTransformation:
    """AdamW with warm-up, cosine decay and clipping."""
    warm_up = max(1, min(30, steps // 4))
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, learning_rate, warm_up, max(steps, warm_up + 1), 0.05 * learning_rate
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=0.1))


class Trainer:
    """The model's state and its compiled steps. Use it under `jax.set_mesh(mesh)`."""

    def __init__(
        self, config: ModelConfig, mesh: jax.sharding.Mesh, tx: optax.GradientTransformation, seed: int
    ) -> None:
        def build(config: ModelConfig) -> LanguageModel:
            return LanguageModel(config, rngs=nnx.Rngs(seed))

        # Training bounds its buffers and may drop rows; evaluation must not, so it has no capacity.
        exact = dataclasses.replace(config, moe=dataclasses.replace(config.moe, capacity_factor=None))
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: build(config)))
        self.exact_graph = nnx.graphdef(nnx.eval_shape(lambda: build(exact)))
        self._data = jax.NamedSharding(mesh, jax.P(("dp", "ep")))
        self._tx = tx
        # Under jit the sharding names of the parameters decide where each one is made.
        self.state = jax.jit(lambda: nnx.state(build(config)))()
        self._optimizer_state = tx.init(self.state)
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))
        self._evaluate = jax.jit(functools.partial(self._losses, self.exact_graph))

    @property
    def num_parameters(self) -> int:
        """Scalars in the model."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.state))

    @staticmethod
    def _losses(graph: Any, state: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array, Any]:
        logits, metrics = nnx.merge(graph, state)(windows[:, :-1])
        return next_byte_losses(logits, windows[:, 1:]), logits, metrics

    def _train_step(self, state: Any, optimizer_state: Any, windows: jax.Array) -> tuple[Any, Any, jax.Array, Any]:
        def objective(state: Any) -> tuple[jax.Array, Any]:
            losses, _, metrics = self._losses(self._graph, state, windows)
            loss = losses.mean()
            return loss + sum(m.aux_loss for m in metrics), (loss, metrics)

        gradients, (loss, metrics) = jax.grad(objective, has_aux=True)(state)
        updates, optimizer_state = self._tx.update(gradients, optimizer_state, state)
        return optax.apply_updates(state, updates), optimizer_state, loss, metrics

    def step(self, windows: np.ndarray) -> StepReport:
        """One optimiser step on uint8 `[batch, length + 1]`; `batch` divides by the devices."""
        batch = jax.device_put(windows, self._data)
        self.state, self._optimizer_state, loss, metrics = self._step(self.state, self._optimizer_state, batch)
        load = np.stack([m.tokens_per_expert for m in metrics])
        return StepReport(float(loss), sum(int(m.num_dropped) for m in metrics), load)

    def evaluate(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Without drops: losses `[batch, length]`, logits `[batch, length, 256]`, load `[MoE layers, E]`."""
        losses, logits, metrics = self._evaluate(self.state, jax.device_put(windows, self._data))
        return np.asarray(losses), np.asarray(logits), np.stack([m.tokens_per_expert for m in metrics])

    def held_out_loss(self, windows: np.ndarray, batch: int) -> float:
        """Mean nats per byte over whole batches of `windows`."""
        batches = [windows[i : i + batch] for i in range(0, len(windows) - batch + 1, batch)]
        return float(np.mean([self.evaluate(b)[0].mean() for b in batches]))
