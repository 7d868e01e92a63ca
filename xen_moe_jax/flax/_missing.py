"""The error of the front ends where Flax is not installed."""


def named(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Returns an error that names the extra to install, for one that names the missing package."""
    package = (error.name or "flax").partition(".")[0]
    return ModuleNotFoundError(
        f"the layers of xen_moe_jax.flax need {package}, which is not installed: pip install 'xen-moe-jax[flax]'",
        name=package,
    )
