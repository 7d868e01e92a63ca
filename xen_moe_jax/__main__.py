"""Entry point of `python -m xen_moe_jax`, the same as the `xen-moe-jax` command."""

import sys

from xen_moe_jax.cli import main

if __name__ == "__main__":
    sys.exit(main())
