"""The same round trip by JAX's own collectives."""
