"""The placement of a group's experts: which experts a process is to load, and how members ask for another placement."""

import concurrent.futures
import dataclasses

import jax
import numpy as np
import pytest

from tests.elastic.test_findings import NAMES
from tests.elastic.test_findings import open_group as open_group  # a fixture
from tests.elastic.test_members import until
from xen_moe_jax import balance, elastic
from xen_moe_jax.elastic import _board


def test_experts_whose_loading_failed_are_named_again(open_group):
    base = balance.from_experts(np.array([[0, 1, -1, -1], [2, 3, -1, -1]], np.int32), 4)
    group = open_group(2, placement=base)
    change = group.join()
    assert change.fetch == ((2, 2), (3, 3)) and group.experts.tolist() == [0, 1, 2, 3]
    change = group.recover(change.step)  # the loading of an expert has raised
    assert change.fetch == ((2, 2), (3, 3))
    assert group.boundary(change.step) is None  # they are loaded
    assert group.recover(change.step).fetch == ()


def test_a_slot_is_named_again_until_a_boundary(open_group):
    def placed(*experts):
        return balance.from_experts(np.asarray([experts], np.int32), 2)

    def failed(placement):  # the loading has raised, and the view that follows has this placement
        group._membership.propose(urgent=True)
        return group._settle(1, placement).fetch

    group = open_group(1, placement=placed(0, 1, -1))
    group.join()
    assert group.boundary(0) is None  # loaded: 0, 1 and none
    assert failed(placed(1, -1, 0)) == ((0, 1), (2, 0))
    assert failed(placed(0, 1, -1)) == ((0, 0),), "it may hold 1"
    assert failed(placed(0, 1, -1)) == ((0, 0),), "it may still hold 1"
    assert failed(placed(-1, 1, 0)) == ((2, 0),)
    assert group.boundary(1) is None  # slot 2 is loaded, and slot 0 may hold 1
    assert failed(placed(0, 1, -1)) == ((0, 0),)
    assert group.boundary(1) is None
    assert failed(placed(0, 1, -1)) == ()


def test_a_new_placement_while_the_members_serve(open_group):
    base = balance.from_experts(np.array([[0, 1, -1, -1], [2, 3, -1, -1]], np.int32), 4)
    wanted = balance.from_experts(np.array([[3, 2, 1, 0], [0, 1, 2, 3]], np.int32), 4)
    group = open_group(2, placement=base)
    group.join()
    assert group.boundary(0) is None  # slots 2 and 3 are loaded
    group.rebalance(wanted)
    assert group.recover(0).fetch == ()  # it puts members first
    assert group.boundary(0) is None  # the change is at the next step, as for a newcomer
    change = group.boundary(1)
    assert (change.view, change.step, change.joined, change.lost) == (3, 1, (), ())
    assert change.fetch == ((0, 3), (1, 2), (2, 1), (3, 0))
    np.testing.assert_array_equal(group.placement.experts, [[3, 2, 1, 0], [-1] * 4])
    assert jax.tree.map(np.shape, group.placement) == jax.tree.map(np.shape, base), "the same program takes it"
    assert [group.boundary(step) for step in (1, 2, 3)] == [None] * 3
    for other, text in (
        (balance.home(4, 2), "slots_per_rank=2: must be that of the group, 4"),
        (balance.home(6, 2), "6 experts"),
        (balance.home(4, 3), "3 ranks"),
        (
            jax.tree.map(lambda a: np.stack([a, a]), base),
            r"experts \[2, 2, 4\], .*: must be \[R, S\], \[E, R\] and \[E\]",
        ),
        (dataclasses.replace(base, experts=base.experts + 1), r"entries outside \[-1, 4\)"),
        (dataclasses.replace(base, experts=np.abs(base.experts)), "rank 0 holds an expert twice"),
    ):
        with pytest.raises(ValueError, match=text):
            group.rebalance(other)
    assert [group.boundary(step) for step in (4, 5)] == [None] * 2, "none of them is asked for"
    with pytest.raises(TypeError, match="must be a Placement"):
        elastic.Group(group._board.folder / "other", 2, axis_name=next(NAMES), placement=[[0]])
    with pytest.raises(ValueError, match="the group has no placement: open it with one"):
        with elastic.Group(group._board.folder / "other", 2, axis_name=next(NAMES)) as other:
            other.rebalance(base)


def test_a_placement_that_only_its_caller_has_adopted_is_asked_for_again(open_group):
    """The other member has seen no arrival at the view with that placement when the caller's step fails."""
    base = balance.from_experts(np.array([[0, 1], [1, 0]], np.int32), 2)
    wanted = balance.from_experts(np.array([[1, 0], [0, 1]], np.int32), 2)
    other, caller = (open_group(2, slot=slot, placement=base, timeout_s=60.0) for slot in (0, 1))
    wait = other._membership._await

    def wait_for_too_long(stage, number, slots):
        until(lambda: number != 2 or other._board.words[_board.PROPOSAL] != 2)
        return wait(stage, number, slots)

    other._membership._await = wait_for_too_long

    def experts(placement, *steps):  # the caller is first, so that the other member finds its request
        return [
            (group.boundary(step), group.placement.experts.tolist() == placement.experts.tolist())
            for step in steps
            for group in (caller, other)
        ]

    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda group: group.join(start_with=2), (caller, other)))
        caller.rebalance(wanted)
        assert experts(base, 0) == [(None, True)] * 2
        late = threads.submit(other.boundary, 1)
        assert caller.boundary(1).view == 2 and caller.placement.experts.tolist() == wanted.experts.tolist()
        assert (caller.recover(1).view, late.result(30).view) == (3, 3)
        assert experts(base, 1) == [(None, True)] * 2, "the lowest slot's placement counts"
        late = threads.submit(other.boundary, 2)
        assert (caller.boundary(2).view, late.result(30).view) == (4, 4)
        assert experts(wanted, 2, 3, 4) == [(None, True)] * 6, "it is asked for no more"
    assert caller._wanted is None


def test_placements_that_add_rows_elsewhere_are_not_alike(open_group):
    placement = balance.home(6, 3)
    open_group(3, placement=placement)
    with pytest.raises(ValueError, match="have another one"):
        open_group(3, placement=dataclasses.replace(placement, sums="rank"))
