"""`KernelConfig`: how an operation runs. It never changes the meaning of an operation."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from xen_moe_jax._numbers import as_float, as_int, is_one_of

BACKENDS = (None, "reference", "pallas", "cuda")
MODES = ("auto", "throughput", "low_latency")


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tuning of one operation. Frozen and hashable: equal configs share a compiled program.

    No field changes a result, but `ranks_per_node` on a single axis changes the order in which `combine` adds.

    Attributes:
      backend: None chooses by platform; "reference", "pallas" or "cuda" insists.
      mode: "auto" picks by the number of tokens; "throughput" or "low_latency" insists.
      num_sms: CUDA: thread blocks (one per SM) that an operation may occupy; None is the tuned default.
      chunk_tokens: tokens that cross to another node together (CUDA, at most 32) or in one round (reference); None is
        the tuned default.
      ranks_per_node: consecutive ranks that share a fast link (NVLink); None: all ranks of a single axis, and of two
        axes all of the fast one. It states a fact about the machine: a `combine` adds inside each node first, as two
        axes do, and CUDA kernels cross to another node once per token. It must divide the ranks of a single axis, and
        be the fast axis's size of two. On CUDA one process with all GPUs is needed.
      channel: workspace number. Independent operations that may run at the same time need different channels.
      timeout_s: CUDA: seconds to wait for a peer before the operation fails; 0 waits for ever. Ten minutes, because
        other ranks may be compiling or writing a checkpoint; a process that has died is noticed within 10 s all the
        same.
      block_tokens: TPU: tokens per grid step; None is the per-generation default.
      vmem_limit_bytes: TPU: VMEM budget; None is the per-generation default.
      collective_id: TPU: id of the barrier semaphore; operations that may overlap need different ids.
      interpret: TPU kernels in interpret mode (tests): None, True, or a `pltpu.InterpretParams`.
    """

    backend: str | None = None
    mode: str = "auto"
    num_sms: int | None = None
    chunk_tokens: int | None = None
    ranks_per_node: int | None = None
    channel: int = 0
    timeout_s: float = 600.0
    block_tokens: int | None = None
    vmem_limit_bytes: int | None = None
    collective_id: int | None = None
    interpret: Any = None

    def __post_init__(self) -> None:
        if not is_one_of(self.backend, BACKENDS):
            raise ValueError(f"KernelConfig.backend={self.backend!r}: must be one of {BACKENDS}")
        if not is_one_of(self.mode, MODES):
            raise ValueError(f"KernelConfig.mode={self.mode!r}: must be one of {MODES}")
        for name in ("num_sms", "chunk_tokens", "ranks_per_node", "block_tokens", "vmem_limit_bytes"):
            self._integer(name, "must be None or a positive int below 2**31", least=1)
        self._integer("channel", "must be an int in [0, 16)", least=0, below=16, optional=False)
        self._integer("collective_id", "must be None or an int in [0, 2**31)", least=0)
        seconds = as_float(self.timeout_s)
        if seconds is None or seconds < 0:
            raise ValueError(f"KernelConfig.timeout_s={self.timeout_s!r}: must be seconds >= 0 (0 waits for ever)")
        object.__setattr__(self, "timeout_s", seconds)
        if not (self.interpret is None or isinstance(self.interpret, bool) or _is_interpret_params(self.interpret)):
            raise ValueError(
                f"KernelConfig.interpret={self.interpret!r}: must be None, True, False or a pltpu.InterpretParams"
            )

    def _integer(self, name: str, remedy: str, *, least: int, below: int = 2**31, optional: bool = True) -> None:
        """Checks a field; a NumPy integer becomes an int, so that equal configs are equal and hashable alike."""
        value = getattr(self, name)
        if value is None and optional:
            return
        number = as_int(value)
        if number is None or not least <= number < below:
            raise ValueError(f"KernelConfig.{name}={value!r}: {remedy}")
        object.__setattr__(self, name, number)


@dataclasses.dataclass(frozen=True)
class RowsInHalves(KernelConfig):
    """Tuning of dispatch and combine around experts whose bfloat16 rows come from `experts.on_tpu.product_in_halves`.

    On a TPU whose generation makes rows in halves, the rows `[C, H]` lie in memory as `[2 C, H / 2]`, and the combine
    reads them so. Values do not depend on it.
    """

    @classmethod
    def of(cls, config: KernelConfig | None, **added: Any) -> Self:
        """Returns a config with the same fields; of those that a subclass adds it has `added`."""
        config = config or DEFAULT_CONFIG
        return cls(**{field.name: getattr(config, field.name) for field in dataclasses.fields(KernelConfig)}, **added)


@dataclasses.dataclass(frozen=True)
class RowsLater(RowsInHalves):
    """Tuning of a dispatch whose rows `experts.waves` brings, and of the combine behind these experts. The dispatch
    makes all other results but their router weights, and rows and weights that nothing may read.

    Attributes:
      row_wire: the `Wire` of the rows.
    """

    row_wire: Any = None


def _is_interpret_params(value: Any) -> bool:
    """Compares the type by name: importing Pallas takes a second, which only its users should pay."""
    return type(value).__name__ == "InterpretParams" and type(value).__module__.startswith("jax.")


DEFAULT_CONFIG = KernelConfig()
