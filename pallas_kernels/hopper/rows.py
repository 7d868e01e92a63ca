"""Rows times the weights of their groups: the forward pass of a grouped matmul, and the gradient of its rows.

One kernel has three forms: a product; the sum of two products, in one accumulator; and two projections of the same rows
side by side, with the expert's activation before they are stored. Biases are added where the sums are stored.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from xen_moe_jax.pallas_kernels.hopper import claims, gather, ring
from xen_moe_jax.pallas_kernels.hopper.activations import Activation
from xen_moe_jax.pallas_kernels.hopper.tiles import COMPUTE_WARPGROUPS, HEIGHTS, ROW_ALIGNMENT, Tiles, row_tiles

Store = Callable[[Any, int, int], Callable[[Any], None]]
"""`(output, m, n)`: how a buffer with the piece at row `m`, column `n` of a warpgroup's part gets into that output."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Into:
    """Arrays in which a kernel overwrites the rows of its groups and leaves all other rows as they are. XLA copies an
    array first if another operation still reads it.

    Attributes:
      arrays: one for each result, with its shape and dtype.
      first_row: int32 `[]`, the first row of the first group.
    """

    arrays: Sequence[jax.Array]
    first_row: jax.Array


@dataclasses.dataclass(frozen=True)
class Part:
    """A warpgroup's part of a tile, once its sums are complete.

    Attributes:
      accumulators: float32, one for each of the weights that are multiplied side by side.
      group: number of the group of the rows; None for a kernel without biases.
      row, column: first row and first column of the part in the outputs.
      extra: references to the further operands of the kernel.
      outputs: references to its results.
      store: stores a piece to one of the results.
      tiles: of the kernel.
      height: rows of this tile if it is fitted, and None otherwise. Pieces of a fitted tile are turned:
        `[columns, rows]`.
    """

    accumulators: tuple[Any, ...]
    group: Any
    row: Any
    column: Any
    extra: tuple[Any, ...]
    outputs: tuple[Any, ...]
    store: Store
    tiles: Tiles
    height: int | None

    def pieces(self, columns: int) -> Iterator[tuple[int, int, list[Any]]]:
        """Yields row, column and accumulators of each piece; `columns` is the number of columns of the part."""
        for m, n in ring.places(self.tiles, columns, self.height):
            yield m, n, [ring.piece(acc, m, n, self.tiles.fitted) for acc in self.accumulators]

    def of_columns(self, extra: Any, columns: int) -> list[Any]:
        """Returns this group's row of `extra [L, B]` in float32, in pieces of 64 columns. All loads begin together, as
        they then take as long as one. A piece past the last column, which is not stored, may have any values."""
        last = extra.shape[1] - ring.STORE_TILE
        return [
            plgpu.load(
                extra.at[self.group, pl.ds(jnp.minimum(self.column + n, last), ring.STORE_TILE)],
                layout=plgpu.Layout.WGMMA.reduce(1 if self.tiles.fitted else 0),
                optimized=False,
            ).astype(jnp.float32)
            for n in range(0, columns, ring.STORE_TILE)
        ]

    def below(self, of_columns: Any, like: Any) -> Any:
        """Repeats a value of each column along the rows of a piece, in the shape of `like`."""
        return lax.broadcast_in_dim(of_columns, like.shape, (0 if self.tiles.fitted else 1,))

    def beside(self, extra: Any, m: int, like: Any) -> Any:
        """Loads the values of `extra [C]` for the rows of the piece at row `m`, and repeats each along the columns."""
        axis = 1 if self.tiles.fitted else 0
        at = extra.at[pl.ds(self.row + m, like.shape[axis])]
        values = plgpu.load(at, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
        return lax.broadcast_in_dim(values, like.shape, (axis,))


Epilogue = Callable[[Part], Iterator[tuple[Any, Callable[[Any], None]]]]
"""Yields the pieces of a part, each with the function that stores it."""


def _bias_of_tiles(bias: jax.Array) -> jax.Array:
    """Pads with zeros up to whole pieces, of which most biases have a whole number: unlike a store, a load does not end
    at the last column."""
    extra = -bias.shape[1] % ring.STORE_TILE
    return jnp.pad(bias, ((0, 0), (0, extra))) if extra else bias


def _factors_of_tiles(row_weights: jax.Array, tiles: Tiles) -> jax.Array:
    """Converts to float32 and pads with zeros for the rows of a last tile, as `_bias_of_tiles` does for columns."""
    return jnp.pad(row_weights.astype(jnp.float32), (0, tiles.m))


@functools.partial(jax.jit, static_argnames=("transposed", "tiles", "num_sms"))  # calls alike are lowered once
def rows_by_weights(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    also: tuple[jax.Array, jax.Array] | None = None,
    bias: jax.Array | None = None,
    row_weights: jax.Array | None = None,
    index: jax.Array | None = None,
    into: Into | None = None,
    *,
    transposed: bool,
    tiles: Tiles,
    num_sms: int | None = None,
) -> jax.Array:
    """`rows [C, A]` times the weights of their groups `[L, A, B]` -> `[C, B]`; `[L, B, A]` where `transposed`.

    `also`, rows and weights of the same shapes, is multiplied and added up in the same accumulators. `bias [L, B]` of
    the group is added, times float32 `row_weights [C]` if given. Rows past the last group come out unspecified.

    With `index`, int32 `[C]`, row `c` is `rows[index[c]]`, and zeros where that is outside the rows. With `into`, the
    first group begins at row `into.first_row`, and the result is the array of `into` with the groups' rows in it.
    """
    columns = weights.shape[1 if transposed else 2]
    extra = [] if bias is None else [_bias_of_tiles(bias)]
    extra += [] if bias is None or row_weights is None else [_factors_of_tiles(row_weights, tiles)]

    def epilogue(part: Part) -> Iterator[Any]:
        biases = part.of_columns(part.extra[0], tiles.warpgroup_n) if part.extra else []
        for m, n, (value,) in part.pieces(tiles.warpgroup_n):
            if biases:
                added = part.below(biases[n // ring.STORE_TILE], value)
                if len(part.extra) > 1:
                    added = added * part.beside(part.extra[1], m, value)
                value = value + added
            yield value.astype(rows.dtype), part.store(part.outputs[0], m, n)

    pairs = [(rows, (weights,))] + ([] if also is None else [(also[0], (also[1],))])
    name = "xen_moe_grouped_rows"
    return _product(
        pairs, group_sizes, tuple(extra), epilogue, (columns,), transposed, tiles, num_sms, name, index, into
    )[0]


@functools.partial(jax.jit, static_argnames=("activation", "projections", "tiles", "num_sms"))
def activated_rows(
    rows: jax.Array,
    weights: tuple[jax.Array, ...],
    group_sizes: jax.Array,
    biases: tuple[jax.Array, ...] | None = None,
    row_weights: jax.Array | None = None,
    index: jax.Array | None = None,
    into: Into | None = None,
    *,
    activation: Activation,
    projections: bool,
    tiles: Tiles,
    num_sms: int | None = None,
) -> tuple[jax.Array, ...]:
    """The activation of the rows' projections by the weights of their groups, in float32 and rounded once -> `[C, F]`.

    Args:
      rows: `[C, A]`.
      weights: `[L, A, F]`, `gate` and `up`, or `up` alone where the activation is not gated.
      group_sizes: int32 `[L]`.
      biases: `[L, F]` of each of the weights, added to the projections.
      row_weights: float32 `[C]`, factors of the result's rows.
      index: int32 `[C]`, as in `rows_by_weights`; `rows` are any number then.
      into: arrays for the results, as in `rows_by_weights`.
      projections: True if the projections are results too, with their biases and without `row_weights`.

    Returns:
      The activation, and with `projections` one array `[C, F]` for each of the weights; rows past the last group are
      unspecified.
    """
    beside = len(weights)
    own_width = tiles.warpgroup_n // beside
    extra = () if row_weights is None else (_factors_of_tiles(row_weights, tiles),)
    of_biases = () if biases is None else tuple(_bias_of_tiles(bias) for bias in biases)

    def epilogue(part: Part) -> Iterator[Any]:
        factors, biases = part.extra[: len(extra)], part.extra[len(extra) :]
        added = [part.of_columns(bias, own_width) for bias in biases]
        for m, n, values in part.pieces(own_width):
            if added:
                values = [v + part.below(b[n // ring.STORE_TILE], v) for v, b in zip(values, added, strict=True)]
            out = activation(*values)
            if factors:
                out = out * part.beside(factors[0], m, out)
            *of_values, of_out = part.outputs
            for value, output in zip((out, *values), (of_out, *of_values), strict=False):
                yield value.astype(rows.dtype), part.store(output, m, n)

    columns = (weights[0].shape[2],) * (1 + beside if projections else 1)
    name = f"xen_moe_grouped_{activation.name}"
    given = (*extra, *of_biases)
    # The activation is the kernel's last result, because XLA assigns memory to results in their order: the projections
    # then come to lie where results of the whole program will, and the backward pass can overwrite them there.
    if into is not None:
        into = dataclasses.replace(into, arrays=(*into.arrays[1:], into.arrays[0]))
    *kept, out = _product(
        [(rows, weights)], group_sizes, given, epilogue, columns, False, tiles, num_sms, name, index, into
    )
    return out, *kept


def _product(
    pairs: Sequence[tuple[jax.Array, tuple[jax.Array, ...]]],
    group_sizes: jax.Array,
    extra: tuple[jax.Array, ...],
    epilogue: Epilogue,
    columns: tuple[int, ...],
    transposed: bool,
    tiles: Tiles,
    num_sms: int | None,
    name: str,
    index_of_rows: jax.Array | None = None,
    into: Into | None = None,
) -> tuple[jax.Array, ...]:
    """The kernel: multiplies the rows of each of `pairs` by its weights, whose columns stand side by side in a tile,
    and adds all products up. With `index_of_rows` there is one pair, whose rows are gathered.

    `columns` are those of the outputs: new arrays, or those of `into`. Where the columns or the contracted dimension
    end within a tile, TMA loads zeros past the end and stores nothing there.
    """
    (capacity, depth), dtype = pairs[0][0].shape, pairs[0][0].dtype
    if index_of_rows is not None:
        (source, _), *others = pairs
        gather.check(tiles, source)
        if others:
            raise ValueError("an index is for the rows of one product")
        capacity = index_of_rows.shape[0]
    beside = len(pairs[0][1])
    width, own_width = tiles.n // beside, tiles.warpgroup_n // beside
    unit = tiles.swizzle // dtype.itemsize
    if columns[0] % unit or depth % unit or own_width % ring.STORE_TILE or capacity % ROW_ALIGNMENT:
        raise ValueError(
            f"rows {[capacity, depth]}, weights {[list(w.shape) for w in pairs[0][1]]}, {tiles}: columns and the "
            f"contracted dimension must be multiples of {unit}, the rows of {ROW_ALIGNMENT}, and a warpgroup's "
            f"{own_width} columns of {ring.STORE_TILE}"
        )
    for rows, weights in pairs:
        shapes = rows.shape, {w.shape for w in weights}
        if shapes != (pairs[0][0].shape, {pairs[0][1][0].shape}):
            raise ValueError(f"rows and weights of two products: {shapes} must be {pairs[0][0].shape} and the same")
    n_tiles, k_steps = pl.cdiv(columns[0], width), pl.cdiv(depth, tiles.k)
    if tiles.fitted and (tiles.m, tiles.split) != (HEIGHTS[-1], "n"):
        raise ValueError(f"{tiles}: fitted tiles have m={HEIGHTS[-1]} and split='n'")
    is_gathered = index_of_rows is not None
    pair = tiles.pair and n_tiles % 2 == 0 and not tiles.claimed
    tiles = dataclasses.replace(tiles, pair=pair)
    first_row = None if into is None else into.first_row
    # a thread loads two factors of a fitted tile's rows at a time (`Part.beside`)
    alignment = (2 if tiles.fitted else 1) if tiles.k == unit else ROW_ALIGNMENT
    anywhere = alignment < ROW_ALIGNMENT and not is_gathered
    tables = row_tiles(group_sizes, capacity, tiles.m, tiles.fitted, first_row, alignment, tiles.band)
    operands = [a for rows, weights in pairs for a in (rows, *weights)]
    operands += [] if index_of_rows is None else [gather.padded(index_of_rows)]
    biased = any(array.ndim == 2 for array in extra)

    def body(*refs: Any, **s: Any) -> None:
        given, (facts, up_to), others = (
            refs[: len(operands)],
            refs[len(operands) : len(operands) + 2],
            refs[len(operands) + 2 :],
        )
        if is_gathered:
            gather.begin(s["gathered"])
        by_rows, s["left"] = ring.views(s["left"]) if anywhere else (s["left"], s["left"])
        wg = lax.axis_index("wg")
        m_tiles = up_to[group_sizes.shape[0] - 1]
        grid = (m_tiles * n_tiles // 2 if tiles.pair else m_tiles * n_tiles,)

        def in_band(number: Any) -> tuple[Any, Any, Any]:
            """The first tile of rows of the band of tile `number`, how many it has, and the tile's number in the band:
            all bands in front of it have `n_tiles` tiles for each tile of rows."""
            at = lax.div(number, jnp.int32(n_tiles))
            first, height = (at, jnp.int32(1)) if tiles.band == 1 else (facts[4, at], facts[5, at])
            return first, height, number - first * n_tiles

        def place(index: Any) -> tuple[Any, Any, Any]:
            number = 2 * index[0] + lax.axis_index(ring.PAIR) if tiles.pair else index[0]
            first, height, number = in_band(number)
            n = lax.div(number, height)
            m = number - n * height
            if tiles.pair:  # down one column and up the next one, so that both tiles of a pair lie side by side
                m = lax.select(n % 2 == 1, height - 1 - m, m)
            row = facts[1, first + m]
            return first + m, row if alignment == 1 else pl.multiple_of(row, alignment), n * width

        def same_column(index: Any) -> Any:
            """True if the tiles of a pair have the same weights; in bands of an odd height some have the same rows."""
            if not tiles.pair:
                return None
            _, height, number = in_band(2 * index[0])
            return lax.rem(number + 1, height) != 0

        def for_height(m: Any, of_height: Callable[[int, Any], Any], carry: Any) -> Any:
            """Runs `of_height` for the height of the tiles in row `m` of tiles, as a branch for each height. A switch
            would be a single branch, but ptxas lets every wgmma in a switch of three cases or more end before the next
            one begins (CUDA 13.0)."""
            if not tiles.fitted:
                return of_height(tiles.m, carry)
            chosen = facts[6, m]
            for number, height in enumerate(HEIGHTS):
                carry = lax.cond(chosen == number, functools.partial(of_height, height), lambda carry: carry, carry)
            return carry

        def load_all() -> None:
            plgpu.set_max_registers(ring.LOAD_REGISTERS, action="decrease")

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                group, shared = facts[0, m], same_column(index)

                def of_height(height: int, carry: Any) -> Any:
                    gathered = None
                    if is_gathered:
                        numbers = gather.numbers(given[-1], row, height)
                        places = gather.places(numbers, given[0], facts[2, m], facts[3, m])
                        gathered = gather.Gathered(
                            lambda k, _, left, right: gather.copy(given[0], places, k * tiles.k, part_of(left))
                        )

                    def part_of(left: Any) -> Any:
                        return left if height == tiles.m else left.at[pl.ds(0, height)]

                    def load_of(rows: Any, *weights: Any) -> Callable[..., None]:
                        matrices = [w.at[group] for w in weights]

                        def load_weights(k: Any, right: Any, barrier: Any, axis: str | None = None) -> None:
                            depth_at, at = pl.ds(k * tiles.k, tiles.k), pl.ds(column, width)
                            for number, matrix in enumerate(matrices):
                                plgpu.copy_gmem_to_smem(
                                    matrix.at[at, depth_at] if transposed else matrix.at[depth_at, at],
                                    right if beside == 1 else right.at[number],
                                    barrier,
                                    collective_axes=axis,
                                )

                        def load(k: Any, left: Any, right: Any, barrier: Any) -> None:
                            if not is_gathered:
                                at = (pl.ds(row, height), pl.ds(k * tiles.k, tiles.k))
                                plgpu.copy_gmem_to_smem(rows.at[at], part_of(left), barrier)
                            if shared is None:
                                load_weights(k, right, barrier)
                            else:
                                of_pair = functools.partial(load_weights, k, right, barrier)
                                lax.cond(shared, lambda: of_pair(ring.PAIR), of_pair)

                        return load

                    for number in range(len(pairs)):
                        product = given[number * (1 + beside) : (number + 1) * (1 + beside)]
                        carry = ring.load_steps(
                            tiles, s | {"left": by_rows}, k_steps, carry, load_of(*product), gathered
                        )
                    return carry

                return for_height(m, of_height, carry)

            done = claims.loads(tiles, s, up_to, grid, tile)
            ring.drain(tiles, s, done)

        def multiply_all() -> None:
            plgpu.set_max_registers(ring.COMPUTE_REGISTERS, action="increase")
            m_at = pl.ds(wg * tiles.warpgroup_m, tiles.warpgroup_m) if tiles.split == "m" else slice(None)
            n_at = pl.ds(wg * own_width, own_width) if tiles.split == "n" else slice(None)

            def multiply(accumulators: tuple[Any, ...], slot: Any, height: int) -> None:
                for number, acc in enumerate(accumulators):
                    right = s["right"].at[slot] if beside == 1 else s["right"].at[slot, number]
                    right = right.at[n_at] if transposed else right.at[:, n_at]
                    if tiles.fitted:
                        left = s["left"].at[slot, pl.ds(0, height)]
                        plgpu.wgmma(acc, right if transposed else right.transpose((1, 0)), left.transpose((1, 0)))
                    else:
                        plgpu.wgmma(acc, s["left"].at[slot, m_at], right.transpose((1, 0)) if transposed else right)

            def tile(index: Any, carry: Any) -> Any:
                m, row, column = place(index)
                # read now: a load from memory takes as long as half a piece of the store that needs it
                group = facts[0, m] if biased else None
                low, high, offset = facts[2, m], facts[3, m], jnp.int32(0)
                steps = len(pairs) * k_steps
                if tiles.split == "m":
                    offset = wg * tiles.warpgroup_m
                    row = row + offset
                else:
                    column = column + wg * own_width

                # Both warpgroups multiply every tile, though a group's last tile may have rows for one of them alone.
                # All tiles last equally long then, and thread blocks at the same weights read them from the L2 cache.
                def of_height(height: int, carry: Any) -> Any:
                    fit = height if tiles.fitted else None
                    accumulators, done = ring.multiply_steps(
                        tiles, s, steps, carry, functools.partial(multiply, height=height), beside=beside, height=fit
                    )

                    def store(out: Any, m: int, n: int) -> Callable[[Any], None]:
                        def copy(buffer: Any) -> None:
                            piece_low = jnp.clip(low - (offset + m), 0, buffer.shape[0])
                            piece_high = jnp.clip(high - (offset + m), 0, buffer.shape[0])
                            ring.store_rows(buffer, out, row + m, column + n, piece_low, piece_high)

                        return copy

                    extras, outputs = others[: len(extra)], others[len(extra) :]
                    part = Part(accumulators, group, row, column, extras, outputs, store, tiles, fit)
                    ring.store(epilogue(part), s["pieces"], wg, tiles.fitted)
                    return done

                return for_height(m, of_height, carry)

            claims.multiplies(tiles, s, grid, tile)
            plgpu.wait_smem_to_gmem(0)

        lax.cond(wg == COMPUTE_WARPGROUPS, load_all, multiply_all)

    right: tuple[int, ...] = (width, tiles.k) if transposed else (tiles.k, width)
    right = right if beside == 1 else (beside, *right)
    out_type = [jax.ShapeDtypeStruct((capacity, count), dtype) for count in columns]
    scratch = ring.scratch(
        tiles, (tiles.m, tiles.k), right, dtype, loads=1 + beside, gathered=is_gathered, anywhere=anywhere
    )
    if into is None:
        return tuple(ring.kernel(body, tiles, num_sms, out_type, scratch, name)(*operands, *tables, *extra))
    outputs = [jax.new_ref(array) for array in into.arrays]
    ring.kernel(body, tiles, num_sms, (), scratch, name)(*operands, *tables, *extra, *outputs)
    return tuple(jax.freeze(output) for output in outputs)
