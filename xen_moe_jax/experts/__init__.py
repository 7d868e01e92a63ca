"""The experts' own computation on the rows of a rank: grouped matmuls, activations, and the MLP made of them.

Nothing here needs Flax. Modules are imported when they are first named: the kernels for Hopper GPUs take as long to
import as the rest of the library.
"""
