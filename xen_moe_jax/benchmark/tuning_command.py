"""`xen-moe-jax autotune`: measures candidate configs for shapes on this machine and keeps the best in a profile."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from xen_moe_jax import _profiles
from xen_moe_jax.benchmark import options as command_options
from xen_moe_jax.benchmark import report
from xen_moe_jax.benchmark.options import factor, positive

FEW_TOKENS = 512
"""Up to so many tokens a decode step is tuned for: the padded layout."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="xen-moe-jax autotune",
        description="Measures candidate KernelConfigs on this machine and keeps the best of each shape in a profile: a "
        "JSON file that xen_moe_jax.autotune.use() looks into when programs are lowered.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="FILE", help="the profile; entries of other shapes in it are kept")
    add("--tokens", type=positive, nargs="+", default=[4096, 128], help="tokens per rank (default 4096 128)")
    add("--dtypes", nargs="+", default=["bfloat16", "float8_e4m3fn"], help="of the tokens (default bfloat16, fp8)")
    add("--deepseek-v3", action="store_true", help="defaults of hidden 7168, 256 experts, top-8")
    add("--hidden", type=positive, help="elements of a token (default 1024)")
    add("--experts", type=positive, help="global number of experts (default 64)")
    add("--top-k", type=positive, help="experts per token (default 8)")
    add("--layout", help="grouped, ranked or padded (default: padded up to 512 tokens, else grouped)")
    add("--ranks", type=positive, help="default: every device")
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")
    add("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    add("--inner", type=positive, help="calls inside one compiled program (default by platform and size)")
    add("--repeats", type=positive, default=5)
    add("--seconds", type=factor, default=float("inf"), help="begin no shape after this long")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; 0, or 1 where the arguments cannot be measured or a shape was left out."""
    options = build_parser().parse_args(list(sys.argv[1:] if arguments is None else arguments))
    options.coordinator, options.num_processes = None, 1
    from xen_moe_jax import BackendUnavailable
    from xen_moe_jax.benchmark.command import start_jax

    try:
        command_options.check_writable("--output", options.output)
        if pathlib.Path(options.output).exists():
            _profiles.read(options.output)  # a foreign file is an error before the work, not after
        start_jax(options)
        return tune(options)
    except (ValueError, BackendUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def tune(options: argparse.Namespace) -> int:
    """Every shape in turn, saved as soon as it is known."""
    import jax

    from xen_moe_jax import KernelConfig
    from xen_moe_jax.benchmark import tuning
    from xen_moe_jax.benchmark.problem import make_problem
    from xen_moe_jax.benchmark.workload import BLOCK_SCALED_DTYPES, Workload

    sizes = command_options.model_sizes(options)
    began, left_out, known = time.monotonic(), [], set()
    for tokens in options.tokens:
        for dtype in options.dtypes:
            if time.monotonic() - began > options.seconds:
                left_out.append(f"{tokens} tokens {dtype}")
                continue
            work = Workload(
                tokens=tokens,
                dtype=dtype,
                layout=options.layout or ("padded" if tokens <= FEW_TOKENS else "grouped"),
                ranks=options.ranks or jax.device_count(),
                hidden=sizes["hidden"],
                experts=sizes["experts"],
                top_k=sizes["top_k"],
                pool=2,
            )
            # expert outputs are in the compute dtype whatever the tokens travelled in: one combine serves both
            compute = (tokens, "bfloat16" if dtype in BLOCK_SCALED_DTYPES else dtype)
            operations = ("dispatch",) if compute in known else ("dispatch", "combine")
            report.progress(f"{tokens} tokens {dtype} on {work.ranks} ranks, layout {work.layout}: drawing tokens")
            known.add(compute)
            problem = make_problem(work)
            tuned = tuning.autotune(
                problem,
                base=KernelConfig(backend=options.backend),
                operations=operations,
                inner=options.inner or command_options.default_inner(problem.platform, tokens) // 4,
                repeats=options.repeats,
                progress=report.progress,
            )
            tuning.save(options.output, work, tuned)
            for operation, found in tuned.items():
                (us,) = [m.us_median for m in found.measured if m.config == found.best]
                default = next(m.us_median for m in found.measured if m.config == KernelConfig(backend=options.backend))
                fields = ", ".join(f"{name}={getattr(found.best, name)}" for name in _profiles.TUNED_FIELDS)
                print(f"{tokens} tokens {dtype} {operation}: {us:.1f} us (default {default:.1f}) with {fields}")
    if left_out:
        print(f"left out, no time: {', '.join(left_out)}", file=sys.stderr)
    return int(bool(left_out))


if __name__ == "__main__":
    sys.exit(main())
