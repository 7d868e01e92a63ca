"""Compiled TPU programs, read without a TPU."""
