"""Peers: the library's round trip, written with JAX's own collectives."""
