"""The other process of `python -m benchmarks transfer`: it holds windows and reports arrivals.

Reads one JSON command a line, answers with one JSON object a line.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from typing import Any


class Target:
    def __init__(self) -> None:
        import jax
        import numpy as np

        import xen_moe_jax.transfer as xt
        from xen_moe_jax.transfer import _device

        self.jax, self.np = jax, np
        self.device = _device.default()
        self.engine = xt.Engine(name="target")
        self.windows: dict[str, Any] = {}
        self.agent: Any = None
        self.registered: tuple = ()

    def describe(self) -> dict:
        return {"descriptor": self.engine.descriptor.hex(), "device": str(self.device)}

    def window(self, name: str, pages: int, page_bytes: int) -> dict:
        aval = self.jax.ShapeDtypeStruct((pages, page_bytes), self.np.uint8)
        self.windows[name] = self.engine.window(aval, name=name)
        return {}

    def take(self, name: str, writes: int) -> dict:
        """Waits for the writes, closes the window, and hashes its contents."""
        with self.engine.counter(name, expect=writes) as counter:
            counter.wait(60)
        array = self.windows.pop(name).commit(60, last=True)
        return {"hash": hashlib.blake2b(self.np.asarray(array).tobytes()).hexdigest()}

    def nixl(self, window: str, nbytes: int) -> dict:
        """Makes memory for NIXL to write into: on the CPU the memory of a window, on a GPU memory of the driver, as a
        window's is."""
        from nixl._api import nixl_agent, nixl_agent_config

        from xen_moe_jax.transfer import _device, _memory

        if self.agent is None:
            self.agent = nixl_agent("target", nixl_agent_config(backends=["UCX"]))
        (block,) = self.windows[window].open_generation.blocks
        if block.shards[0].memory == "cuda":
            block = _memory.Block((nbytes,), self.np.dtype(self.np.uint8), None)
        pointer, memory = block.shards[0].pointer, "VRAM" if block.shards[0].memory == "cuda" else "DRAM"
        device = _device.ordinal(self.device) if memory == "VRAM" else 0
        self.registered = self.agent.register_memory([(pointer, nbytes, device, "")], memory), block
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"metadata": metadata, "pointer": pointer, "device": device, "memory": memory}

    def nixl_end(self) -> dict:
        self.agent.deregister_memory(self.registered[0])
        self.registered = ()
        return {}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Output of libraries is no answer.
    if sys.argv[1:]:
        import jax

        # With `jax_cuda_visible_devices` JAX 0.11.2 counts devices in two ways, and its own operations fail.
        jax.config.update("jax_default_device", jax.local_devices()[int(sys.argv[1])])
    target = Target()
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = getattr(target, command.pop("do"))(**command)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
