"""`xen_moe_jax.transfer` beside other ways to write to another process."""
