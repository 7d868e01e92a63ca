"""TPU kernels in Pallas: body and launcher per kernel, no policy.

| module | kernel |
|---|---|
| `record` | what one row looks like on the wire (in-kernel encode and decode) |
| `peers` | who may write to whom, and when: entry barrier, exit credits, row waits |
| `push` | token rows -> records -> staging of the ranks that need them |
| `place` | staged records -> rows of `routed.x` |
| `reduce_slots` | expert rank: a token's rows -> one partial record -> staging of the token's rank |
| `reduce_ranks` | token's rank: staged partial records -> output rows |
| `exchange` | one remote DMA per peer over contiguous runs; fused, or as start and done halves |
"""
