"""Grouped matmuls for Hopper GPUs, in Pallas (Mosaic GPU): persistent kernels over rows `[C, A]` sorted by group.

| module | contents |
|---|---|
| `tiles` | the division of the work: a thread block's tile, and the groups' rows into tiles |
| `claims` | the tiles that a thread block computes: a fixed share, or the next unclaimed one |
| `ring` | loads with TMA, multiplications with wgmma, stores with TMA, and the barriers between them |
| `gather` | stages whose rows are copied one by one, by an index |
| `rows` | rows times the weights of their groups, as they lie or transposed; the sum of two; two with an activation |
| `activations` | the activations of experts and their derivatives |
| `contraction` | the sum over a group's rows: gradients of weights |
| `float8_rows`, `float8_contraction` | the same in fp8, with scales of blocks |
| `float8_quantize` | operands of the matmuls in fp8 |
"""
