"""MoE layers of Hugging Face checkpoints: Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss, read from safetensors files.

Needs the extra "hugging-face" (`pip install "xen-moe-jax[hugging-face]"`); nothing is downloaded.
"""

from xen_moe_jax.flax.hugging_face.load import LoadedLayer, load_hugging_face

__all__ = ["LoadedLayer", "load_hugging_face"]
