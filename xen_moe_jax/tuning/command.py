"""`xen-moe-jax autotune`: measures candidate configs for shapes on this machine and keeps the best in a profile."""

from __future__ import annotations

import argparse
import pathlib
import sys
import time
from collections.abc import Sequence

from xen_moe_jax import _profiles
from xen_moe_jax.tuning import arguments
from xen_moe_jax.tuning.arguments import factor, positive

FEW_TOKENS = 512
"""Up to this many tokens a rank, the padded layout of a decode step is tuned."""


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line."""
    parser = arguments.Parser(
        prog="xen-moe-jax autotune",
        description="Measures candidate KernelConfigs on this machine and keeps the best of each shape in a profile: a "
        "JSON file that xen_moe_jax.autotune.use() looks into when programs are lowered. Needs GPUs or TPUs.",
    )
    add = parser.add_argument
    add("--output", required=True, metavar="FILE", help="the profile; entries of other shapes in it are kept")
    add("--tokens", type=positive, nargs="+", default=[4096, 128], help="tokens per rank (default 4096 128)")
    add("--dtypes", nargs="+", default=["bfloat16", "float8_e4m3fn"], help="of the tokens (default bfloat16, fp8)")
    arguments.add_sizes(add)
    add("--layout", help="grouped, ranked or padded (default: padded up to 512 tokens, else grouped)")
    add("--ranks", type=positive, help="default: every device")
    add("--platform", choices=("cpu", "gpu", "tpu"), help="default: JAX's own choice")
    add("--backend", choices=("reference", "pallas", "cuda"), help="default: by platform")
    add("--inner", type=positive, help="calls inside one compiled program (default by platform and size)")
    add("--repeats", type=positive, default=5)
    add("--seconds", type=factor, default=float("inf"), help="start no shape after this long; that is no error")
    return parser


def main(given: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0, or 1 where the arguments cannot be measured."""
    options = build_parser().parse_args(list(sys.argv[1:] if given is None else given))
    from xen_moe_jax import BackendUnavailable

    try:
        arguments.check_writable("--output", options.output)
        if pathlib.Path(options.output).exists():
            _profiles.read(options.output)  # a foreign file is an error before the work, not after
        arguments.start_jax(options.platform, options.ranks)
        tune(options)
    except (ValueError, BackendUnavailable, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def tune(options: argparse.Namespace) -> None:
    """Tunes every shape in turn and saves each as soon as it is known.

    Raises:
      ValueError: the backend has nothing to tune, or a shape cannot be measured.
    """
    import jax

    from xen_moe_jax import KernelConfig
    from xen_moe_jax.tuning import search
    from xen_moe_jax.tuning.problem import make_problem
    from xen_moe_jax.tuning.workload import BLOCK_SCALED_DTYPES, Workload

    base = KernelConfig(backend=options.backend)
    search.check_tunable(base, jax.devices()[0].platform)
    sizes = arguments.model_sizes(options)
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
                pool=2,
                **sizes,
            )
            # Expert outputs have the compute dtype, independent of the dtype in which the tokens travelled: one combine
            # serves both.
            compute = (tokens, "bfloat16" if dtype in BLOCK_SCALED_DTYPES else dtype)
            operations = ("dispatch",) if compute in known else ("dispatch", "combine")
            arguments.progress(f"{tokens} tokens {dtype} on {work.ranks} ranks, layout {work.layout}: drawing tokens")
            known.add(compute)
            problem = make_problem(work)
            tuned = search.autotune(
                problem,
                base=base,
                operations=operations,
                inner=options.inner or arguments.default_inner(problem.platform, tokens) // 4,
                repeats=options.repeats,
                progress=arguments.progress,
            )
            search.save(options.output, work, tuned)
            for operation, found in tuned.items():
                (us,) = [m.us_median for m in found.measured if m.config == found.best]
                default = next(m.us_median for m in found.measured if m.config == base)
                fields = ", ".join(f"{name}={getattr(found.best, name)}" for name in _profiles.TUNED_FIELDS)
                print(f"{tokens} tokens {dtype} {operation}: {us:.1f} us (default {default:.1f}) with {fields}")
    if left_out:
        print(f"left out after --seconds {options.seconds:g}: {', '.join(left_out)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
