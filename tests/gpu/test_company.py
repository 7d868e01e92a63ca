"""Operations and XLA's own collectives in one program, in the default configuration: no hang, and right results.

XLA may run a collective before, after or beside an operation of ours, on other streams; every rank may order them in
another way at run time. Each case runs in a process of its own under a hard time limit, because the fault to find is a
hang.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import pytest

from tests.gpu import processes

SECONDS = 150.0
COLLECTIVES = ("all_gather", "psum_scatter", "psum", "ppermute", "all_gather+psum_scatter")
CASES = {
    "grouped": {"layout": "grouped"},
    "grouped-fp8": {"layout": "grouped", "wire": "float8_e4m3fn"},
    "grouped-int8": {"layout": "grouped", "wire": "int8"},
    "ranked": {"layout": "ranked"},
    "ranked-fp8": {"layout": "ranked", "wire": "float8_e4m3fn"},
    "padded": {"layout": "padded"},
    "padded-fp8": {"layout": "padded", "wire": "float8_e4m3fn"},
    "exchange": {},
    "gather": {},
    "gather_matmul": {},
}


def child(*arguments: str) -> None:
    """This file as a program, in the environment that a user has: no flags, the default configuration."""
    env = processes.environment(JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_MEM_FRACTION="0.4")
    env.pop("XLA_FLAGS", None)
    finished = processes.run_all([[sys.executable, __file__, *arguments]], seconds=SECONDS, env=env)
    processes.assert_finished(finished)
    assert "PASSED" in finished[0].output, finished[0].output[-2000:]


@pytest.mark.gpu2
@pytest.mark.parametrize("case", CASES)
def test_beside_every_collective(case):
    child("--case", case, "--collectives", ",".join(COLLECTIVES), "--tokens", "1024", "--hidden", "2048")


@pytest.mark.gpu2
def test_the_case_of_the_widening_wire():
    """bf16 rows, fp8 wire, 4096 tokens of 4096, default configuration, beside all_gather + psum_scatter of 128 MiB."""
    arguments = ["--case", "grouped-fp8", "--collectives", "all_gather+psum_scatter", "--mib", "128"]
    child(*arguments, "--tokens", "4096", "--hidden", "4096", "--calls", "20")


@pytest.mark.gpu2
def test_every_sm_asked_for_still_ends():
    """More than is safe: slow or a named error, never a hang, never a wrong result without one."""
    arguments = ["--case", "grouped-fp8", "--collectives", "all_gather+psum_scatter", "--mib", "128", "--timeout", "5"]
    child(*arguments, "--tokens", "4096", "--hidden", "4096", "--calls", "5", "--num-sms", "132", "--may-fail")


@pytest.mark.gpu2
def test_beside_a_kernel_that_fills_the_gpu():
    child("--case", "grouped", "--collectives", "matmul", "--mib", "512", "--tokens", "1024", "--hidden", "2048")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", choices=CASES, default="grouped")
    parser.add_argument("--collectives", default="all_gather")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--mib", type=int, default=32, help="of a rank's share in the collective")
    parser.add_argument("--calls", type=int, default=10)
    parser.add_argument("--num-sms", type=int)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--may-fail", action="store_true", help="a named error will do as well as a right result")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--ranks", type=int, default=0)
    options = parser.parse_args()

    import jax
    import numpy as np

    import xen_moe_jax as xm

    mesh = jax.sharding.Mesh(np.array(jax.devices()[: options.ranks or None]), ("ep",))
    config = xm.KernelConfig(backend=options.backend, num_sms=options.num_sms, timeout_s=options.timeout)
    for name in options.collectives.split(","):
        program, args = build(mesh, config, name, options)
        reference, _ = build(mesh, xm.KernelConfig(backend="reference"), "none", options)
        expected = np.asarray(reference(*args)[0]).view(np.uint16)
        try:
            results = [program(*args) for _ in range(options.calls)]
            for out, other in results:
                assert np.isfinite(np.asarray(other, np.float32)).all(), (
                    f"{name}: the collective's result is not finite"
                )
                wrong = int(np.sum(np.asarray(out).view(np.uint16) != expected))
                assert not wrong or np.isnan(np.asarray(out, np.float32)).all(), f"{name}: {wrong} wrong elements"
            xm.check()
        except (xm.OperationFailed, jax.errors.JaxRuntimeError) as error:
            if not (options.may_fail and "xen_moe_jax" in str(error)):
                raise
            print(f"{name}: {error}")
            break
        print(f"{name}: {options.calls} calls right", flush=True)
    print("PASSED")
    return 0


def build(mesh, config, name, options):
    """A program with an operation of ours before, beside and after the collective, and its operands."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import xen_moe_jax as xm

    experts, top_k, spec = 4 * mesh.size, 2, P("ep")
    case = dict(CASES[options.case])
    layout = case.get("layout")

    def ours(x, idx, weights):
        if options.case.startswith("gather"):  # the rows of the next rank
            if options.case == "gather":
                rows = xm.all_gather(x, "ep", config=config)
            else:
                throughput = dataclasses.replace(config, mode="throughput")
                rows = xm.all_gather_matmul(x, jnp.eye(x.shape[1], dtype=x.dtype), "ep", config=throughput)
            return rows.reshape(-1, *x.shape)[(jax.lax.axis_index("ep") + 1) % mesh.size]
        if layout is None:
            return xm.all_to_all(x, "ep", 0, 0, tiled=True, config=config)
        routed = xm.dispatch(x, idx, weights, num_experts=experts, axis_name="ep", config=config, **case)
        return xm.combine(routed.x, routed.handle, wire=case.get("wire"), config=config)

    def theirs(z):
        if name == "all_gather":
            return jnp.max(jax.lax.all_gather(z, "ep"), axis=0)
        if name == "psum_scatter":
            return jax.lax.psum_scatter(z, "ep", tiled=True)
        if name == "psum":
            return jax.lax.psum(z, "ep")
        if name == "ppermute":
            return jax.lax.ppermute(z, "ep", [(i, (i + 1) % mesh.size) for i in range(mesh.size)])
        if name == "all_gather+psum_scatter":
            return jax.lax.psum_scatter(jax.lax.all_gather(z, "ep", tiled=True) * 0.5, "ep", tiled=True)
        if name == "matmul":
            square = z[: z.shape[0] // 1024 * 1024].reshape(-1, 1024)
            return square @ (square[:1024] * 1e-3)
        return z

    def body(x, idx, weights, z):
        first = ours(x, idx, weights)  # before
        other = theirs(z)  # nothing orders it against the next two: XLA may run it beside them
        second = ours(first, idx, weights)
        after = theirs(z + 0 * jnp.sum(second).astype(z.dtype))
        third = ours(second, idx, weights)
        return third, (jnp.sum(other.astype(jnp.float32)) + jnp.sum(after.astype(jnp.float32))).reshape(1)

    rng = np.random.default_rng(0)
    rows = mesh.size * options.tokens
    values = (
        rng.standard_normal((rows, options.hidden)).astype(jnp.bfloat16),
        rng.integers(0, experts, (rows, top_k)).astype(np.int32),
        np.full((rows, top_k), 0.5, np.float32),
        np.ones(mesh.size * options.mib * 2**19, jnp.bfloat16),
    )
    sharding = NamedSharding(mesh, spec)
    args = tuple(jax.device_put(v, sharding) for v in values)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(spec,) * 4, out_specs=(spec, spec), check_vma=False)
    return jax.jit(mapped), args


if __name__ == "__main__":
    sys.exit(main())
