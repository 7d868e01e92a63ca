"""Symmetric memory between nodes, over host memory: which ranks reach each other, joint growth, reset, buffers.

test_memory.py has the same for groups of one node.
"""

import time

import pytest

from tests.support.memory_module import LARGE, SMALL, fail_first_growths, run, staging


@pytest.fixture
def nodes(memory):
    """Four ranks in two nodes."""
    return memory.workspace([0, 1, 2, 3], 4, 0, 2)


def test_ranks_of_another_node_are_reached_by_the_link_alone(memory, nodes):
    memory.serve(nodes, *SMALL, 1.0)
    for member in range(4):
        own = [0, 1] if member < 2 else [2, 3]
        all_ranks = [0, 1, 2, 3]
        assert memory.pointers(nodes, member) == [own, own, all_ranks, all_ranks, all_ranks]
    whole = memory.workspace([0, 1, 2, 3], 4, 0)
    memory.serve(whole, *SMALL, 1.0)
    assert memory.pointers(whole, 0) == [all_ranks, all_ranks, [], [], []]
    assert sorted(w["ranks_per_node"] for w in memory.workspaces()) == [2, 4], "what is cut in two ways shares nothing"
    assert run(memory, nodes, times=3) and run(memory, whole, times=3)


def test_flights_between_nodes_have_memory_and_counters_of_their_own(memory, nodes):
    flights = memory.flights([0, 1, 2, 3], 4, 0, 2)
    memory.serve(flights, *SMALL, 1.0)
    assert run(memory, flights, times=3) and not memory.serves(nodes, *SMALL)
    memory.serve(nodes, *LARGE, 1.0)
    assert run(memory, nodes, LARGE) and run(memory, flights)
    memory.stray_chunk(flights, 0, 2)
    memory.fail(flights, 0, {"cause": 1, "rank": 1, "other": 0})
    assert "rank 1" in memory.admit(nodes, 5)
    memory.reset(5.0)
    assert run(memory, nodes, LARGE, times=3) and run(memory, flights, times=3)


def test_memory_between_nodes_changes_at_once_for_all(memory, nodes):
    """No operation of one node may use another generation than that of another: old memory goes with the change."""
    memory.serve(nodes, *SMALL, 1.0)
    assert run(memory, nodes, times=2)
    before = memory.held()
    for factor in range(2, 8):  # more often than there are memory tables, with and without an operation between
        needs = (SMALL[0] * factor, *SMALL[1:])
        memory.serve(nodes, *needs, 1.0)
        assert factor % 2 or run(memory, nodes, needs, times=3)
        (listed,) = memory.workspaces()
        assert listed["generations_held"] == 1 and listed["generation"] == factor
    assert memory.held() == before + staging(needs, 4) - staging(SMALL, 4)
    assert run(memory, nodes, times=3), "an older program finds it"


def test_memory_between_nodes_does_not_change_under_a_running_operation(memory, nodes):
    memory.serve(nodes, *SMALL, 1.0)
    assert run(memory, nodes)
    before = memory.held()
    memory.set_busy(True)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="not idle while the symmetric memory was to be replaced"):
        memory.serve(nodes, *LARGE, 1.0)
    assert time.monotonic() - began < 10 and memory.held() == before
    assert run(memory, nodes, times=3) and not memory.serves(nodes, *LARGE)
    memory.set_busy(False)
    memory.serve(nodes, *LARGE, 1.0)
    assert run(memory, nodes, LARGE, times=3)


def test_a_growth_between_nodes_may_fail(memory):
    """The first at any call; a later one before it is published, and then everything is as it was."""
    failures, workspace = fail_first_growths(memory, [0, 1, 2, 3], 4, 0, 2)
    assert failures > 30 and run(memory, workspace)
    before = memory.held()
    for calls in range(16):  # four ranks: scratch, staging, and the flags of two halves
        memory.fail_after(calls)
        with pytest.raises(RuntimeError, match="told to fail"):
            memory.serve(workspace, *LARGE, 1.0)
        memory.fail_after(-1)
        assert memory.held() == before and run(memory, workspace, times=2)


def test_a_reset_forgets_what_has_come_from_other_nodes(memory, nodes):
    memory.serve(nodes, *SMALL, 1.0)
    assert run(memory, nodes, times=5)
    memory.stray_chunk(nodes, 0, 2)  # an operation ended without what had come
    assert memory.run(nodes, *SMALL, 7) == [True, True, False, True]
    memory.reset(1.0)
    assert run(memory, nodes, times=5)
    memory.renumber(0xFFFFFFF0)
    assert run(memory, nodes, times=40), "and as numbers come round"


def test_a_buffer_between_nodes_serves_after_its_closing_too(memory, nodes):
    nodes.reserve(1 << 20, 1.0)
    memory.serve(nodes, *SMALL, 1.0)
    assert run(memory, nodes, times=3)
    nodes.release(1.0)
    assert not memory.serves(nodes, *SMALL)
    memory.serve(nodes, *SMALL, 1.0)
    assert run(memory, nodes, times=3)


def test_many_ranks_in_nodes_have_counters_of_their_own(memory):
    """More than a word has bits, and than a group of few ranks has counters for; as many nodes as there may be."""
    for ranks, per_node in ((36, 12), (64, 2)):
        memory.configure(0, 1, [*range(ranks)])
        many = memory.workspace([*range(ranks)], ranks, 0, per_node)
        memory.serve(many, *SMALL, 1.0)
        assert run(memory, many, times=3)
        for member in (0, ranks - 1):
            first = member // per_node * per_node
            own, all_ranks = [*range(first, first + per_node)], [*range(ranks)]
            assert memory.pointers(many, member) == [own, own, all_ranks, all_ranks, all_ranks]
        memory.stray_chunk(many, 0, ranks - per_node)  # from the first to the last of its rail
        good = memory.run(many, *SMALL, 7)
        assert [rank for rank in range(ranks) if not good[rank]] == [ranks - per_node]
        memory.reset(1.0)
        memory.serve(many, *LARGE, 1.0)
        assert run(memory, many, LARGE, times=3)
    memory.configure(0, 1, [*range(66)])
    with pytest.raises(RuntimeError, match=r"ranks_per_node=2 on an axis of 66 ranks makes 33 nodes.* at most 32; put"):
        memory.workspace([*range(66)], 66, 0, 2)


def test_nodes_of_unequal_size_and_of_processes_without_puts_are_refused(memory):
    with pytest.raises(RuntimeError, match=r"KernelConfig.ranks_per_node=3: must divide the 4 ranks of the axis"):
        memory.workspace([0, 1, 2, 3], 4, 0, 3)
    memory.configure(0, 2, [0, memory.devices_per_process])
    memory.set_provider(memory.fake_provider())
    memory.set_agreement(lambda *_: None)
    with pytest.raises(
        RuntimeError, match="nodes of 1 of the 2 ranks, and a fake between processes.*XEN_MOE_MEMORY=nccl"
    ):
        memory.workspace([0, memory.devices_per_process], 2, 0, 1)
