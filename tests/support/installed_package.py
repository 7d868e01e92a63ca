"""Checks that the installed package is whole: `python installed_package.py [--cuda]`, by its interpreter, elsewhere.

It needs the package's own requirements alone. It checks that the imported package is the installed one, that the
TPU kernels and py.typed came along, that an operation runs, that the doctor finds no fault, and with --cuda, that the
CUDA modules are there and load on a machine without a GPU and a driver.
"""

import argparse
import importlib
import importlib.util
import os
import pathlib
import sysconfig

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import xen_moe_jax as xm
from xen_moe_jax import doctor


def check_files(cuda: bool) -> None:
    package = pathlib.Path(xm.__file__).parent
    site = pathlib.Path(sysconfig.get_path("platlib"))
    assert package.parent.resolve() == site.resolve(), f"imported {package}, not the installed wheel"
    assert (package / "py.typed").exists(), "py.typed is missing"
    assert not (package / "pallas_kernels").is_symlink(), "pallas_kernels is a link that points out of the wheel"
    importlib.import_module("xen_moe_jax.pallas_kernels")
    assert (importlib.util.find_spec("xen_moe_jax._cuda") is not None) == cuda, f"the CUDA module, wanted: {cuda}"
    if cuda:
        importlib.import_module("xen_moe_jax._cuda")
        assert importlib.util.find_spec("xen_moe_jax._nvshmem"), "the NVSHMEM module is missing"


def check_round_trip() -> None:
    """Identity experts: combine(dispatch(x)) is the sum of a token's weights times x."""

    @jax.jit
    @jax.shard_map(in_specs=P("ep"), out_specs=P("ep"))
    def layer(x, experts, weights):
        routed = xm.dispatch(x, experts, weights, num_experts=8, axis_name="ep")
        return xm.combine(routed.x, routed.handle)

    jax.set_mesh(jax.make_mesh((4,), ("ep",)))
    x = jax.random.normal(jax.random.key(0), (16, 128))
    experts = jax.random.randint(jax.random.key(1), (16, 2), 0, 8)
    out = layer(*jax.device_put((x, experts, jnp.full((16, 2), 0.5)), P("ep")))
    assert jnp.allclose(out, x, atol=1e-6), "the round trip does not return the tokens"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuda", action="store_true", help="the wheel must have the CUDA modules")
    options = parser.parse_args()
    check_files(options.cuda)
    check_round_trip()
    report = doctor.examine()
    print(doctor.render(report))
    faults = [finding for findings in report.values() for finding in findings if finding.ok is False]
    assert not faults, f"the doctor finds faults: {faults}"
    assert doctor.tested_jax()[0] is not None, "the metadata does not say which jax is the oldest"
    print(f"xen-moe-jax {xm.__version__} with jax {jax.__version__}: the wheel is whole")


if __name__ == "__main__":
    main()
