"""Entry point of `python -m xen_moe_jax.benchmark`."""

import sys

from xen_moe_jax.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
