"""The oracle itself, against cases worked out by hand: two ranks, two tokens, four experts."""

import ml_dtypes
import numpy as np
import pytest

from tests.support import oracle

IDX = np.array([[[0, 2], [1, 0]], [[3, 0], [-1, 9]]])  # 9 is out of range
WEIGHTS = np.array([[[0.5, 0.25], [2.0, 4.0]], [[8.0, 0.125], [1.0, 1.0]]], np.float32)
X = np.array([[[1.0], [2.0]], [[3.0], [4.0]]], np.float32)


def test_grouped_by_hand():
    routed = oracle.dispatch(X, IDX, WEIGHTS, num_experts=4, capacity=6)
    assert routed.positions.tolist() == [
        [[[0, -1], [3, 1]], [[-1, 2], [-1, -1]]],
        [[[-1, 0], [-1, -1]], [[1, -1], [-1, -1]]],
    ]
    assert routed.rows[0, :4, 0].tolist() == [1, 2, 3, 2]
    assert routed.rows[1, :2, 0].tolist() == [1, 3]
    assert routed.weights[0, :4].tolist() == [0.5, 4.0, 0.125, 2.0]
    assert routed.group_sizes.tolist() == [[3, 1], [1, 1]]
    assert routed.recv_counts.tolist() == [[[2, 1], [1, 0]], [[1, 0], [0, 1]]]
    assert routed.specified.sum(1).tolist() == [4, 2]
    assert routed.topk_idx[1, 1].tolist() == [-1, -1]


def test_grouped_alignment_by_hand():
    routed = oracle.dispatch(X, IDX, WEIGHTS, num_experts=4, alignment=2, capacity=6)
    assert routed.group_sizes.tolist() == [[4, 2], [2, 2]]
    assert routed.num_tokens_per_expert.tolist() == [[3, 1], [1, 1]]
    assert routed.rows[0, :, 0].tolist() == [1, 2, 3, 0, 2, 0]
    assert routed.positions[0, 0, 1].tolist() == [4, 1]


def test_grouped_drop_by_hand():
    assert oracle.needed_rows(IDX, 4, "grouped") == 4
    routed = oracle.dispatch(X, IDX, WEIGHTS, num_experts=4, capacity=3)
    assert routed.positions[0, 0, 1].tolist() == [-2, 1]
    assert routed.num_dropped.tolist() == [1, 0]
    assert routed.recv_counts[0].tolist() == [[2, 1], [1, 0]]  # before dropping
    out = oracle.combine(routed.rows, routed, weighted=True)
    assert out[:, :, 0].tolist() == [[0.5 * 1 + 0.25 * 1, 4.0 * 2], [0.125 * 3 + 8.0 * 3, 0]]


def test_needed_rows_ignores_the_padding_of_the_last_group():
    assert oracle.needed_rows(IDX, 4, "grouped", alignment=8) == 9  # 3 -> 8, then one row
    assert oracle.needed_rows(IDX, 4, "ranked") == 3


def test_ranked_by_hand():
    routed = oracle.dispatch(X, IDX, WEIGHTS, num_experts=4, layout="ranked")
    assert routed.rows[0, :3, 0].tolist() == [1, 2, 3]
    assert routed.rows[1, :2, 0].tolist() == [1, 3]
    assert routed.local_idx[0, :3].tolist() == [[0, -1], [1, 0], [-1, 0]]
    assert routed.local_idx[1, :2].tolist() == [[-1, 0], [1, -1]]
    assert routed.weights[0, :3].tolist() == [[0.5, 0.0], [2.0, 4.0], [0.0, 0.125]]
    assert routed.recv_counts[:, :, 0].tolist() == [[2, 1], [1, 1]]
    assert routed.recv_counts[:, :, 1].tolist() == [[0, 0], [0, 0]]
    out = oracle.combine(routed.rows * np.array([1.0, 10.0], np.float32)[:, None, None], routed, weighted=False)
    assert out[:, :, 0].tolist() == [[11, 2], [33, 0]]


def test_padded_by_hand():
    routed = oracle.dispatch(X, IDX, WEIGHTS, num_experts=4, layout="padded")
    assert routed.rows.shape == (2, 2, 4, 1)
    assert routed.rows[0, :, :, 0].tolist() == [[1, 2, 3, 0], [2, 0, 0, 0]]
    assert routed.positions[0, 0, 1].tolist() == [4, 1]
    assert routed.num_tokens_per_expert.tolist() == [[3, 1], [1, 1]]


def test_padded_drops_a_duplicate_beyond_the_last_row():
    idx = np.zeros((1, 2, 2), int)  # both tokens name expert 0 twice: four rows, two places
    routed = oracle.dispatch(X[:1], idx, None, num_experts=1, layout="padded")
    assert routed.positions.tolist() == [[[[0, 1], [-2, -2]]]]
    assert routed.num_dropped.tolist() == [2]


def test_combine_rounds_every_partial_to_the_wire():
    # 1 + 2**-8 needs nine bits: as a bf16 partial it is 1, and two of them give 2, not 2 + 2**-7.
    idx = np.array([[[0, 0, 1, 1]], [[-1] * 4]])
    routed = oracle.dispatch(np.ones((2, 1, 1), ml_dtypes.bfloat16), idx, None, num_experts=2)
    y = np.array([[[1.0], [2.0**-8]] + [[0.0]] * (routed.rows.shape[1] - 2)] * 2).astype(ml_dtypes.bfloat16)
    assert float(oracle.combine(y, routed, weighted=False)[0, 0, 0]) == 2.0
    assert float(oracle.combine(y.astype(np.float32), routed, weighted=False)[0, 0, 0]) == 2 + 2.0**-7


def test_combine_two_axes_rounds_every_node():
    # Four ranks, two nodes. Node 0: 1 + 2**-8 rounds to 1 in bf16. One axis adds all four in float32.
    idx = np.full((4, 1, 4), -1)
    idx[0, 0] = [0, 1, 2, 3]
    routed = oracle.dispatch(np.ones((4, 1, 1), ml_dtypes.bfloat16), idx, None, num_experts=4)
    y = np.zeros(routed.rows.shape, ml_dtypes.bfloat16)
    y[:, 0, 0] = [1.0, 2.0**-8, 2.0**-8, 0.0]
    one = oracle.combine(y, routed, weighted=False)
    two = oracle.combine(y, routed, weighted=False, axis_sizes=(2, 2))
    assert float(one[0, 0, 0]) == 1.0078125  # 1 + 2**-7
    assert float(two[0, 0, 0]) == 1.0  # 1 + 2**-8 ties to even


@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_quantize_by_hand(scale_format):
    x = np.zeros((1, 130), np.float32)
    x[0, 0], x[0, 1], x[0, 129] = 896.0, -2.0, 3.0
    values, scales = oracle.quantize(x, "float8_e4m3fn", scale_format)
    if scale_format == "float32":
        assert scales.tolist() == [[2.0, np.float32(3.0) / np.float32(448.0)]]
        assert values.astype(np.float32)[0, [0, 1, 129]].tolist() == [448.0, -1.0, 448.0]
    else:
        assert scales.tolist() == [[2.0, 2.0**-7]]  # 3/448 = 0.0067 <= 2**-7 = 0.0078
        assert values.astype(np.float32)[0, [0, 1, 129]].tolist() == [448.0, -1.0, 384.0]
        assert oracle.dequantize(values, scales)[0, 129] == 3.0


def test_quantize_int8_and_non_finite_blocks():
    x = np.array([[127.0, 0.5, 1.5, -127.0]], np.float32)
    values, scales = oracle.quantize(x, "int8")
    assert values.tolist() == [[127, 0, 2, -127]] and scales.tolist() == [[1.0]]  # ties to even
    values, scales = oracle.quantize(np.array([[np.inf, 1.0]], np.float32), "int8")
    assert values.tolist() == [[0, 0]] and np.isnan(scales).all()


def test_ragged_all_to_all_example_of_the_jax_documentation():
    result = oracle.ragged_all_to_all(
        np.array([[1, 2, 2], [3, 4, 0]]),
        np.zeros((2, 4), int),
        np.array([[0, 1], [0, 1]]),
        np.array([[1, 2], [1, 1]]),
        np.array([[0, 0], [1, 2]]),
        np.array([[1, 1], [2, 1]]),
    )
    assert result.tolist() == [[1, 3, 0, 0], [2, 2, 4, 0]]


def test_all_to_all_by_hand():
    x = np.arange(8).reshape(2, 2, 2)
    assert oracle.all_to_all(x, 0, 0).tolist() == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert oracle.all_to_all(x, 0, 1, tiled=True).tolist() == [[[0, 1, 4, 5]], [[2, 3, 6, 7]]]


def test_dispatch_layout_by_hand():
    layout = oracle.dispatch_layout(np.array([[0, 3, 3], [2, -1, 7]]), num_experts=4, num_ranks=2, ranks_per_node=2)
    assert layout.num_tokens_per_rank.tolist() == [1, 2]
    assert layout.num_tokens_per_node.tolist() == [2]
    assert layout.num_tokens_per_expert.tolist() == [1, 0, 1, 2]
    assert layout.is_token_in_rank.tolist() == [[True, True], [False, True]]
