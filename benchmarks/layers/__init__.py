"""Whole layers, their matmuls, and training."""
