"""`KernelConfig`: how an operation runs. It never changes what an operation means."""

from __future__ import annotations

import dataclasses
from typing import Any

BACKENDS = (None, "reference", "pallas", "cuda")
MODES = ("auto", "throughput", "low_latency")


@dataclasses.dataclass(frozen=True)
class KernelConfig:
    """Tuning of one operation. Frozen and hashable: equal configs share a compiled program.

    Attributes:
      backend: None chooses by platform; "reference", "pallas" or "cuda" insists.
      mode: "auto" picks by the number of tokens; "throughput" or "low_latency" insists.
      num_sms: CUDA: thread blocks (one per SM) that an operation may occupy; None is the tuned default.
      chunk_tokens: tokens that share one arrival flag (CUDA) or one round (reference); None is the tuned default.
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
    channel: int = 0
    timeout_s: float = 600.0
    block_tokens: int | None = None
    vmem_limit_bytes: int | None = None
    collective_id: int | None = None
    interpret: Any = None

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"KernelConfig.backend={self.backend!r}: must be one of {BACKENDS}")
        if self.mode not in MODES:
            raise ValueError(f"KernelConfig.mode={self.mode!r}: must be one of {MODES}")
        for name in ("num_sms", "chunk_tokens", "block_tokens", "vmem_limit_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value <= 0):
                raise ValueError(f"KernelConfig.{name}={value!r}: must be None or a positive int")
        if not isinstance(self.channel, int) or isinstance(self.channel, bool) or not 0 <= self.channel < 16:
            raise ValueError(f"KernelConfig.channel={self.channel!r}: must be an int in [0, 16)")
        if isinstance(self.timeout_s, bool) or not isinstance(self.timeout_s, int | float) or not self.timeout_s >= 0:
            raise ValueError(f"KernelConfig.timeout_s={self.timeout_s!r}: must be seconds >= 0 (0 waits for ever)")
        if self.collective_id is not None and (not isinstance(self.collective_id, int) or self.collective_id < 0):
            raise ValueError(f"KernelConfig.collective_id={self.collective_id!r}: must be None or an int >= 0")


DEFAULT_CONFIG = KernelConfig()
