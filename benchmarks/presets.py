"""The arguments with which Bazel runs each mode: small ones for a CPU, where a run proves that a mode measures and
checks, and those of the published figures for GPUs."""

from __future__ import annotations

import dataclasses

_TINY = "--tokens 32 --hidden 256 --experts 16 --top-k 2 --inner 2 --repeats 2"
_LAYER = "--tokens 16 --hidden 64 --experts 8 --top-k 2 --width 32 --inner 1 --repeats 1"
_WHOLE = "--tokens 4096 --hidden 4096 --experts 64 --top-k 8 --width 1536 --capacity-factor 1.25"


@dataclasses.dataclass(frozen=True)
class Preset:
    """The arguments of a mode, in the words of a shell.

    cpu: arguments of a run on virtual CPU devices, which takes seconds.
    gpu: arguments of a run on every GPU of the host; None for a mode without figures of GPUs.
    writes: whether the mode takes `--json FILE`.
    """

    cpu: str
    gpu: str | None
    writes: bool = True


PRESETS = {
    "ops": Preset(f"{_TINY} --peers 'padded all_to_all'", "--deepseek-v3 --tokens 4096"),
    "low-latency": Preset(f"{_TINY} --peers none", "--deepseek-v3 --tokens 128 --unroll 20"),
    "sweep-sms": Preset(
        f"{_TINY} --num-sms 2 4 --operations dispatch", "--deepseek-v3 --tokens 4096 --operations dispatch,combine"
    ),
    "overlap": Preset(f"{_TINY} --operations dispatch", "--deepseek-v3 --tokens 4096 --operations dispatch,combine"),
    "jax-best": Preset(
        "--ranks 2 --tokens 8 --hidden 128 --experts 4 --top-k 2 --inner 1 --repeats 1 --settings default "
        "--peer-operations 'round trip'",
        "--deepseek-v3 --repeats 3",
    ),
    "layer": Preset(f"{_LAYER} --ways 'all_gather + psum_scatter'", _WHOLE),
    "model": Preset(f"{_LAYER} --ways 'all_gather + psum_scatter'", _WHOLE),
    "decode-step": Preset(
        "--hidden 128 --experts 8 --top-k 2 --ranks 2 --layers 3 --intermediate 16 --batches 1 5 --replays 9 "
        "--peer-replays 6 --peers none",
        "--hidden 7168 --experts 256 --top-k 8",
    ),
    "transfer": Preset("--sizes 2048 --peers none", ""),
    "tpu-static": Preset("--generations v5e --cases low-latency", None),
    "tpu-bundles": Preset("--case low-latency", None),
    "tpu-chip": Preset("counted --generation v5e --cases low-latency", None),
    "tpu-layer": Preset("--topologies v5e:4x4 --matmuls ragged_dot", None),
    "all-gather": Preset("--ranks 2 --rows 4 --hidden 256 --matmul 16 64 128 --inner 2 --repeats 1", ""),
    "grouped-matmul": Preset(
        "--rows 96 --capacity 128 --hidden 128 --width 32 --experts 3 --inner 1 --repeats 1 --dtype float32 "
        "--only 'padded einsum'",
        "",
    ),
    "nnx-layer": Preset(
        "--tokens 16 --hidden 64 --width 32 --experts 8 --top-k 2 --inner 1 --repeats 1 --plans '4 chunks'", ""
    ),
    "train": Preset(
        "--layers 2 --hidden 64 --heads 2 --dense-size 128 --experts 8 --width 32 --top-k 2 --context 32 --batch 2 "
        "--steps 2 --warm-up 1",
        "",
    ),
    "suite": Preset("cpu --only 'decode 32'", "gpu"),
    "table": Preset("--check", None, writes=False),
    "transfer-table": Preset("--check", None, writes=False),
}
"""Mode of `python -m benchmarks` -> its arguments under Bazel."""
