import sys

from xen_moe_jax.demo.command import main

if __name__ == "__main__":
    sys.exit(main())
