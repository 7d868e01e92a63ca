"""The demo: trains a small byte-level MoE language model on 8 virtual CPU devices (`python -m examples.demo`)."""
