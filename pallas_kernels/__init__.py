"""TPU kernels in Pallas: body and launcher per kernel, no policy. `hopper` has kernels for GPUs.

| module | contents |
|---|---|
| `record` | the layout of one row on the wire (in-kernel encode and decode) |
| `peers` | the ranks that a kernel spans; which rank signals and awaits which peer, and in which order |
| `send` | that order, run in a kernel: announce, await, send, drain, leave |
| `gather` | rows named by a table, into a double buffer |
| `launch` | the one call of `pallas_call`; block sizes, row groups |
| `push` | token rows -> records -> staging of the ranks that need them |
| `place` | staged records -> rows of `routed.x` |
| `reduce_slots` | expert rank: a token's rows -> one partial record -> staging of the token's rank |
| `reduce_ranks` | token's rank: staged partial records -> output rows |
| `pack_tokens`, `index_tokens`, `order_tokens` | few tokens: packing, indexing, and the tables of a combine |
| `decode_experts` | few rows an expert: all experts' MLPs, while weights stream through VMEM |
| `decode_layer`, `decode_routing` | few tokens: a whole layer, tokens to experts and back, and its tables |
| `decode_sums` | the end of such a layer on two cores: a token's rows become its sum |
| `forward` | records from another slice -> staging of the ranks of this slice |
| `exchange` | one remote DMA per peer over contiguous runs; synchronous, or as start and done |
"""
