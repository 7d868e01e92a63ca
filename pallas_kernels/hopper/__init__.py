"""Grouped matmuls for Hopper GPUs, in Pallas (Mosaic GPU): persistent kernels over rows `[C, A]` sorted by group.

| module | what |
|---|---|
| `tiles` | how the work is cut: a thread block's tile, and the groups' rows into tiles |
| `claims` | which tiles a thread block computes: every so many, or the next one that nobody has |
| `ring` | loads with TMA, multiplications with wgmma, stores with TMA, and what holds them apart |
| `rows` | rows times the weights of their groups, as they lie or transposed; the sum of two; SwiGLU of two |
| `contraction` | the sum over a group's rows: gradients of weights |
"""
