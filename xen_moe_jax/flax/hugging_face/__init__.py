"""MoE layers of Hugging Face checkpoints, read from safetensors files; `FAMILIES` has the models.

Needs the extra "hugging-face" (`pip install "xen-moe-jax[hugging-face]"`); nothing is downloaded.
"""

from xen_moe_jax.flax.hugging_face.checkpoint import Checkpoint
from xen_moe_jax.flax.hugging_face.families import FAMILIES, Family, register_family
from xen_moe_jax.flax.hugging_face.load import LoadedLayer, load_hugging_face
from xen_moe_jax.flax.hugging_face.readers import fused, matrices, transposed, vector

__all__ = [
    "FAMILIES",
    "Checkpoint",
    "Family",
    "LoadedLayer",
    "fused",
    "load_hugging_face",
    "matrices",
    "register_family",
    "transposed",
    "vector",
]
