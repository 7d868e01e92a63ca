"""One rank of a group: it runs fixed programs over the group's axis and saves its results.

Started by `test_programs.py`, which runs the same programs inside `jax.shard_map` and compares bytes:
`python -m tests.elastic.rank_program FOLDER SLOTS SLOT MEMBERS OUTPUT.npz`.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np

import xen_moe_jax as xm

T, H, K, E = 6, 160, 3, 10
PROGRAMS = (  # layout, wire, drop, capacity, with a placement
    ("grouped", "int8", "source", 12, False),
    ("grouped", None, "weight", 24, True),
    ("ranked", None, "position", None, False),
    ("padded", None, "position", None, False),
)


def operands(ranks):
    """Returns x `[R, T, H]`, topk_idx and topk_weights `[R, T, K]` of all ranks, the same in every process."""
    rng = np.random.default_rng(35)
    x = rng.standard_normal((ranks, T, H)).astype(np.float32)
    idx = rng.integers(-1, E + 1, (ranks, T, K)).astype(np.int32)
    return x, idx, rng.random((ranks, T, K)).astype(np.float32)


def placement_of(ranks):
    return xm.balance.plan(np.arange(1, E + 1), num_ranks=ranks, slots_per_rank=E - 2)


def program(number, axis_name, x, idx, weights, active, placement):
    """Returns rows, counts, combined rows and gradients of one layer whose experts scale their rows."""
    layout, wire, drop, capacity, placed = PROGRAMS[number]

    def layer(x, weights):
        routed = xm.dispatch(
            x, idx, weights, num_experts=E, axis_name=axis_name, layout=layout, wire=wire, drop=drop,
            capacity=capacity, active=active, placement=placement if placed else None,
        )  # fmt: skip
        out = xm.combine(routed.x * 3, routed.handle)
        return jnp.sum(jnp.sin(out)), (out, routed)

    grads, (out, routed) = jax.grad(layer, (0, 1), has_aux=True)(x, weights)
    used = jnp.any(routed.handle.positions >= 0)
    return {
        "out": out,
        "dx": grads[0],
        "dweights": grads[1],
        "positions": routed.handle.positions,
        "num_dropped": routed.num_dropped,
        "counts": routed.handle.recv_counts,
        "rows": jnp.where(used, jnp.sum(xm.redispatch(out, routed.handle), axis=-1), 0),
    }


def main(folder, slots, slot, members, output):
    slots, slot, members = int(slots), int(slot), int(members)
    with xm.elastic.Group(folder, slots, slot=slot, timeout_s=120.0) as group:
        group.join(start_with=members, timeout_s=120)
        active = group.active()
        placement = placement_of(slots).without(active)
        found = {}
        for number in range(len(PROGRAMS)):
            run = jax.jit(lambda *args, number=number: program(number, "ep", *args))
            results = run(*(a[slot] for a in operands(slots)), active, placement)
            found.update({f"{name} {number}": np.asarray(value) for name, value in results.items()})
            xm.check()
        np.savez(output, **found)
        group.boundary(0)
        group.exchange("gather", 0, np.zeros(1))  # all have ended before one leaves


if __name__ == "__main__":
    main(*sys.argv[1:])
