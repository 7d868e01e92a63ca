"""Fields of `MoEConfig` about the communication: how rows travel between the ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

from xen_moe_jax._config import DEFAULT_CONFIG, KernelConfig
from xen_moe_jax._quantize import parse_wire


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicationFields:
    """Communication: how rows travel between the ranks.

    Attributes:
      wire: the format of dispatched rows: None, "float8_e4m3fn", "int8" or "mxfp4" (not on TPUs).
      combine_wire: the format of combined rows, as in `wire`.
      kernel: tuning of the communication; never changes the results.
    """

    wire: str | None = None
    combine_wire: str | None = None
    kernel: KernelConfig = DEFAULT_CONFIG


def check_communication(config: Any) -> None:
    """Raises ValueError or TypeError for the first of these fields of a `MoEConfig` that is wrong."""
    if not isinstance(config.kernel, KernelConfig):
        raise TypeError(f"MoEConfig.kernel={config.kernel!r}: must be a xen_moe_jax.KernelConfig")
    for name in ("wire", "combine_wire"):
        try:
            parse_wire(getattr(config, name), name)
        except ValueError as error:
            raise ValueError(f"MoEConfig.{error}") from None
