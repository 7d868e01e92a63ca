"""Symmetric memory over host memory: growth that fails anywhere, generations, buffers, reset, error texts.

`make memory-test` builds the module; it needs a C++ compiler, and neither CUDA nor a GPU.
"""

import multiprocessing
import threading
import time

import pytest

from tests.support import memory_module
from tests.support.memory_module import HOME, LARGE, RANKS, SMALL, fail_first_growths, run, staging, wait_until
from xen_moe_jax.backends.cuda import members

# -- groups whose processes come and go (elastic.Group) ----------------------------------------------------------------


def _in_a_process_of_its_own(body) -> None:
    """Runs `body` in a child: memory that other processes may have mapped is held until a process ends."""
    child = multiprocessing.get_context("spawn").Process(target=body)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0, "standard error has the child's traceback"


def _rank_of(num_ranks: int, rank: int, alone: members.Alone | None = None):
    """The module and a workspace of ranks in one process each, of which this process is one."""
    memory = memory_module.load()
    keys = [process * memory.devices_per_process for process in range(num_ranks)]
    memory.configure(rank, num_ranks, keys)
    memory.set_provider(memory.fake_provider())  # an absent rank's memory is stood in for by this rank's own
    memory.set_agreement(alone or members.Alone())
    workspace = memory.workspace(keys, num_ranks, 0)
    memory.serve(workspace, *SMALL, 1.0)
    return memory, workspace


def _start_again_with_other_members():
    memory, workspace = _rank_of(3, 1)
    memory.serve(workspace, *LARGE, 1.0)  # two generations: the group knows of one
    assert memory.pointers_across(workspace) == [[0, 1, 2], [0, 1, 2]]
    for view, gone in ((3, [0, 2]), (4, []), (9, [2])):
        epoch = 65536 * view + 2
        memory.fail(workspace, 0, {"cause": 3, "rank": 2, "other": 1, "epoch": epoch - 1})
        memory.put(workspace, 1, 0, 7)  # a flag of the view before
        assert memory.failure() and memory.flags_up(workspace, LARGE[0])
        assert memory.adopt(workspace, gone, epoch, view) == 1
        assert memory.failure() == "" and memory.flags_up(workspace, LARGE[0]) == 0
        assert memory.dead(workspace) == gone == memory.gone()
        assert memory.epoch(workspace, 0) == epoch and memory.serves(workspace, *LARGE)
        assert memory.pointers_across(workspace) == [[0, 1, 2], [0, 1, 2]]
        (listed,) = memory.workspaces()
        assert (listed["generation"], listed["generations_held"]) == (view, 1)


def _grow_as_a_member():
    alone = members.Alone()
    memory, workspace = _rank_of(2, 0, alone)
    alone.member = True
    for change in (lambda: memory.serve(workspace, *LARGE, 1.0), lambda: memory.reset(1.0)):
        with pytest.raises(RuntimeError, match=r"of every shape, before join\(\).* call group.recover\(step\)"):
            change()
    assert memory.serves(workspace, *SMALL) and not memory.serves(workspace, *LARGE)
    (listed,) = memory.workspaces()
    assert listed["generations_held"] == 1


def _grow_alone_without_room():
    """The error names no process: this one is alone, and number 0 is another one."""
    memory, workspace = _rank_of(3, 2)
    memory.fail_after(0)
    with pytest.raises(RuntimeError, match="^xen_moe_jax: memory of 1 MiB on channel 0 failed: .*told to fail"):
        memory.serve(workspace, *LARGE, 1.0)
    memory.fail_after(-1)
    memory.serve(workspace, *LARGE, 1.0)


def _change_members_beside_a_busy_gpu():
    memory, workspace = _rank_of(2, 0)
    memory.set_busy(True)
    with pytest.raises(RuntimeError, match="still busy after 1 s"):
        memory.adopt(workspace, [1], 65538, 1)
    memory.set_busy(False)
    assert memory.adopt(workspace, [1], 65538, 1) == 1 and memory.failure() == ""


@pytest.mark.usefixtures("memory")  # skips where the module is not built
@pytest.mark.parametrize(
    "body",
    [
        _start_again_with_other_members,
        _grow_as_a_member,
        _grow_alone_without_room,
        _change_members_beside_a_busy_gpu,
    ],
)
def test_members_change(body):
    _in_a_process_of_its_own(body)


# -- growth ------------------------------------------------------------------------------------------------------------


def test_an_operation_finds_memory(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace, times=5)
    (listed,) = memory.workspaces()
    assert listed["staging_bytes"] == 2 * (SMALL[0] + SMALL[1]) and listed["scratch_bytes"] == SMALL[2]
    assert staging(SMALL) < memory.held() < staging(SMALL) + HOME


def test_a_process_that_lowered_nothing_learns_about_its_job_once(memory):
    """A loaded program does this: it names devices by their place in the job, which Python describes at the first
    need."""
    memory.clear()
    calls = []

    def describe():
        calls.append("describe")
        memory.configure(0, 1, [3, 2, 1, 0])
        return True

    memory.set_up_job(describe, lambda: calls.append("start memory"))
    assert memory.workspace([-1, -2], 2, 0) is memory.workspace([3, 2], 2, 0)
    memory.serve(memory.workspace([-3, -4], 2, 0), *SMALL, 1.0)
    assert calls == ["describe"]
    with pytest.raises(RuntimeError, match="more than the 4 devices of this job"):
        memory.workspace([-1, -5], 2, 0)


def test_a_process_that_cannot_learn_about_its_job_says_so(memory):
    memory.clear()
    memory.set_up_job(lambda: False, lambda: None)
    with pytest.raises(RuntimeError, match="no GPUs"):
        memory.workspace([-1, -2], 2, 0)
    memory.set_up_job(lambda: 1 // 0, lambda: None)
    with pytest.raises(RuntimeError, match="modulo by zero"):
        memory.workspace([-1, -2], 2, 0)


def test_a_first_growth_may_fail_at_any_call(memory):
    failures, _ = fail_first_growths(memory, [0, 1], 2, 0)
    assert failures > 10


def test_a_later_growth_may_fail_at_any_call_and_leaves_everything_as_it_was(memory):
    failures = 0
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace)
    before = memory.held()
    while True:
        memory.fail_after(failures)
        try:
            memory.serve(workspace, *LARGE, 1.0)
            break
        except RuntimeError as error:
            assert "told to fail" in str(error)
            if "Allocate" in str(error):
                assert memory.held() == before
        failures += 1
        memory.fail_after(-1)
        assert memory.serves(workspace, *SMALL) and not memory.serves(workspace, *LARGE)
        assert run(memory, workspace, times=3)
        assert memory.failure() == ""
    memory.fail_after(-1)
    assert failures > 5
    assert run(memory, workspace, LARGE, times=3)
    memory.reclaim(workspace)
    assert memory.held() == before - staging(SMALL) + staging(LARGE)


def test_old_memory_serves_until_every_rank_has_used_the_new(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace)
    before = memory.held()
    memory.serve(workspace, *LARGE, 1.0)
    assert memory.held() == before + staging(LARGE)
    memory.reclaim(workspace)
    assert memory.held() == before + staging(LARGE)  # an operation may still be in the old one
    assert run(memory, workspace)  # in the old memory: the announcements that all ranks made before
    memory.reclaim(workspace)
    assert memory.held() == before + staging(LARGE)
    assert run(memory, workspace)
    memory.reclaim(workspace)
    assert memory.held() == before + staging(LARGE) - staging(SMALL)


def test_a_large_operation_right_after_growth_uses_the_new_memory(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace)
    memory.serve(workspace, *LARGE, 1.0)
    assert run(memory, workspace, LARGE)


def test_growing_on_and_on_without_a_run_keeps_a_bounded_number_of_generations(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace)
    for factor in range(2, 20):
        memory.serve(workspace, SMALL[0] * factor, SMALL[1], SMALL[2], 1.0)
        (listed,) = memory.workspaces()
        assert listed["generations_held"] <= 4
        assert run(memory, workspace, (SMALL[0] * factor, *SMALL[1:])) if factor == 12 else True
    assert run(memory, workspace, (SMALL[0] * 19, *SMALL[1:]), times=3)


def test_growth_does_not_replace_what_a_busy_gpu_may_use(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace)
    memory.set_busy(True)
    for factor in range(2, 5):
        memory.serve(workspace, SMALL[0] * factor, *SMALL[1:], 1.0)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"grown 3 times without an operation that used it.*busy"):
        memory.serve(workspace, SMALL[0] * 5, *SMALL[1:], 1.0)
    assert time.monotonic() - began < 10
    assert run(memory, workspace, times=3)  # operations went on, and made room
    memory.serve(workspace, SMALL[0] * 5, *SMALL[1:], 1.0)
    memory.set_busy(False)
    assert run(memory, workspace, (SMALL[0] * 5, *SMALL[1:]), times=3)


def test_growth_waits_for_no_kernel_that_uses_no_staging_memory(memory):
    """The kernels of a rank alone report no generation, and may keep a GPU busy for hours."""
    workspace = memory.workspace([0], 1, 0)
    memory.serve(workspace, 0, 256, 0, 1.0)
    memory.set_busy(True)
    for factor in range(1, 9):
        memory.serve(workspace, SMALL[0] * factor, *SMALL[1:], 1.0)
        (listed,) = memory.workspaces()
        assert listed["generations_held"] <= 4
    assert run(memory, workspace, (SMALL[0] * 8, *SMALL[1:]), times=3)
    memory.set_busy(False)


def test_groups_of_a_mesh_grow_together(memory):
    workspace = memory.workspace([0, 1, 2, 3], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert len(memory.run(workspace, *SMALL, 7)) == 4


def test_threads_grow_one_workspace_at_once(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    sizes = [(256 * n, 8192 * n, 256 * n) for n in range(1, 9)]
    errors = []

    def serve(needs):
        try:
            memory.serve(workspace, *needs, 30.0)
        except RuntimeError as error:
            errors.append(error)

    threads = [threading.Thread(target=serve, args=(needs,)) for needs in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert run(memory, workspace, sizes[-1], times=3)


def test_memory_goes_when_the_last_user_goes(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    another = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    del workspace
    assert memory.held() > 0 and len(memory.workspaces()) == 1
    memory.set_busy(True)  # its last operation may still run
    del another
    time.sleep(0.05)
    assert memory.held() > 0
    memory.set_busy(False)
    wait_until(lambda: memory.held() == 0)
    assert memory.workspaces() == []


@pytest.mark.parametrize(
    ("devices", "ranks", "message"),
    [
        ([0, 0], 2, "a device appears twice"),
        ([0, 1, 2], 2, "2 ranks over 3 devices"),
        (list(range(257)), 257, "1 to 256 ranks"),
        ([-1, -9], 2, "more than the 4 devices of this job"),
        ([0, 4096, 4097], 3, "run one process with all GPUs of the group, or one process per GPU"),
        ([0, 4096], 2, "spans several processes and neither NVSHMEM nor NCCL has been started"),
    ],
)
def test_impossible_groups_are_refused(memory, devices, ranks, message):
    with pytest.raises(RuntimeError, match=message):
        memory.workspace(devices, ranks, 0)


# -- xm.Buffer ---------------------------------------------------------------------------------------------------------


def half(needs):
    return needs[0] + needs[1]


def test_a_buffer_serves_what_fits_and_refuses_more_with_both_numbers(memory):
    workspace = memory.workspace([0, 1], 2, 3)
    workspace.reserve(2 * half(LARGE), 1.0)
    before = memory.held()
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace, times=3)
    memory.reclaim(workspace)
    assert memory.held() == before + RANKS * SMALL[2]  # divided where it is
    memory.serve(workspace, *LARGE, 1.0)
    assert run(memory, workspace, LARGE, times=3)
    with pytest.raises(RuntimeError, match=rf"Buffer on channel 3 has {2 * half(LARGE)} bytes .* needs 14\d+"):
        memory.serve(workspace, LARGE[0], LARGE[1] + 1024, LARGE[2], 1.0)
    assert run(memory, workspace, LARGE, times=3)
    with pytest.raises(RuntimeError, match="already open on channel 3"):
        workspace.reserve(1 << 20, 1.0)


@pytest.mark.parametrize("before", [False, True])
def test_an_operation_without_flags_leaves_a_buffer_whole(memory, before):
    """A buffer stays whole where the operations before it ask for no flags, as those of a rank alone do
    (cuda_kernels/core/alone.h), whether they come before the buffer is opened or after that."""
    alone, small = (0, 256, 0), (256, LARGE[1], 0)
    workspace = memory.workspace([0], 1, 0)
    if before:
        memory.serve(workspace, *alone, 1.0)
    workspace.reserve(2 * half(small), 1.0)
    memory.serve(workspace, *alone, 1.0)
    memory.serve(workspace, *small, 1.0)
    (listed,) = memory.workspaces()
    assert listed["staging_bytes"] == 2 * half(small) and listed["generations_held"] == 1 + before
    assert run(memory, workspace, small, times=3)
    memory.reclaim(workspace)
    (listed,) = memory.workspaces()
    assert listed["generations_held"] == 1


def test_closing_frees_and_memory_is_made_again(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    workspace.reserve(2 * half(LARGE), 1.0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace, times=2)
    workspace.release(1.0)
    workspace.release(1.0)
    assert memory.held() < HOME and not memory.serves(workspace, *SMALL)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace, times=3)


def test_a_captured_operation_fails_while_the_buffer_is_closed_and_runs_when_it_is_open_again(memory):
    """A replay passes no host code: `run` without `serve`."""
    workspace = memory.workspace([0, 1], 2, 0)
    workspace.reserve(2 * half(LARGE), 1.0)
    memory.serve(workspace, *SMALL, 1.0)
    assert run(memory, workspace, times=2)
    workspace.release(1.0)
    assert memory.run(workspace, *SMALL, 7) == [False, False]
    assert "released its symmetric memory" in memory.failure()
    memory.reset(1.0)
    workspace.reserve(2 * half(LARGE), 1.0)
    assert run(memory, workspace, times=3)


def test_closing_returns_when_the_gpu_is_busy_and_frees_later(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    workspace.reserve(2 * half(LARGE), 1.0)
    memory.set_busy(True)
    began = time.monotonic()
    workspace.release(0.2)
    assert time.monotonic() - began < 5
    assert memory.held() > RANKS * 2 * half(LARGE)
    memory.set_busy(False)
    wait_until(lambda: memory.held() < HOME)


# -- failure and reset -------------------------------------------------------------------------------------------------

TIMEOUT = {"cause": 1, "operation": 0, "step": 2, "rank": 1, "other": 0, "epoch": 17, "waited_ns": 5_000_000_000}


def failed(memory, epoch=17):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    memory.set_epoch(workspace, 0, epoch)
    memory.set_epoch(workspace, 1, epoch - 1)
    for member in range(2):
        memory.fail(workspace, member, TIMEOUT | {"epoch": epoch})
    return workspace


def test_a_failure_is_sticky_until_reset(memory):
    workspace = failed(memory)
    for _ in range(3):
        assert "rank 1 (GPU 1) did not send its rows" in memory.failure()
    assert memory.run(workspace, *SMALL, 7) == [False, False]
    memory.reset(1.0)
    assert memory.failure() == ""
    assert run(memory, workspace, times=4)


def test_a_death_fails_a_group_at_once_unless_its_programs_are_told_who_takes_part(memory):
    """Then the mailboxes alone know, also after a reset: kernels that need the dead rank find it there."""
    told, other = memory.workspace([0, 1], 2, 0), memory.workspace([0, 1], 2, 1)
    for workspace in (told, other):
        memory.serve(workspace, *SMALL, 1.0)
    memory.leave_out_the_dead(told)
    memory.mark_dead(0, False)
    assert [memory.mailbox_failure(w, 0) != 0 for w in (told, other)] == [False, True]
    assert [memory.mailbox_dead(w, 0) for w in (told, other)] == [0b11, 0b11]
    assert memory.admit(told, 1) == "" and "has ended" in memory.admit(other, 1)


def test_a_failure_outlives_the_program_that_failed(memory):
    """A workspace is freed with its last user, perhaps before any caller has asked for it."""
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    memory.set_busy(True)
    memory.fail(workspace, 0, TIMEOUT)
    del workspace
    assert "did not send its rows" in memory.failure()
    memory.set_busy(False)
    time.sleep(0.1)
    assert "did not send its rows" in memory.failure() and memory.held() > 0
    another = memory.workspace([0, 1], 2, 0)
    memory.serve(another, *SMALL, 1.0)
    assert run(memory, another, times=2) and "did not send its rows" in memory.failure()
    memory.reset(1.0)
    assert memory.failure() == ""
    del another
    wait_until(lambda: memory.held() == 0)


@pytest.mark.parametrize("epoch", [1, 2, 17, 0xFFFF0000, 0xFFFF0001, 0xFFFFFFFE])
def test_reset_gives_all_ranks_one_number_ahead_of_every_flag(memory, epoch):
    workspace = failed(memory, 1)
    memory.reset(1.0)
    assert run(memory, workspace, times=2) and memory.flags_up(workspace, SMALL[0]) == 4
    for member in range(2):
        memory.set_epoch(workspace, member, epoch - member)
        memory.fail(workspace, member, TIMEOUT | {"epoch": epoch})
    memory.reset(1.0)
    assert memory.flags_up(workspace, SMALL[0]) == 0
    numbers = [memory.epoch(workspace, member) for member in range(2)]
    assert numbers[0] == numbers[1]
    assert numbers[0] == (epoch + 2 if epoch <= 0xFFFF0000 else 2)
    assert run(memory, workspace, times=3)


def test_reset_returns_when_a_gpu_stays_busy_and_the_failure_stays(memory):
    workspace = failed(memory)
    memory.set_busy(True)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="still busy after"):
        memory.reset(0.2)
    assert time.monotonic() - began < 5
    assert "did not send its rows" in memory.failure()
    memory.set_busy(False)
    memory.reset(1.0)
    assert memory.failure() == "" and run(memory, workspace, times=2)


def test_reset_tells_waiting_kernels_to_leave_before_it_waits(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    memory.set_busy(True)
    with pytest.raises(RuntimeError, match="still busy"):
        memory.reset(0.1)
    assert all(memory.mailbox_failure(workspace, member) >> 56 & 0x7F == 7 for member in range(2))
    memory.set_busy(False)
    memory.reset(1.0)
    assert run(memory, workspace, times=2)


def test_reset_may_fail_at_any_call_and_be_called_again(memory):
    workspace = failed(memory)
    failures = 0
    while True:
        memory.fail_after(failures)
        try:
            memory.reset(1.0)
            break
        except RuntimeError as error:
            assert "told to fail" in str(error)
        assert memory.failure() != ""
        failures += 1
    memory.fail_after(-1)
    assert failures > 10 and run(memory, workspace, times=3)


def test_the_devices_of_a_run_agree_whether_it_goes_on(memory):
    """A run that one device has begun before the failure goes on, poisoned, on all: XLA's collectives are in it too."""
    workspace = memory.workspace([0, 1], 2, 0)
    memory.serve(workspace, *SMALL, 1.0)
    assert memory.admit(workspace, 1001) == ""
    for member in range(2):
        memory.fail(workspace, member, TIMEOUT)
    assert memory.admit(workspace, 1001) == ""
    assert "did not send its rows" in memory.admit(workspace, 1002)
    assert "did not send its rows" in memory.admit(workspace, 1002)
    assert memory.admit(workspace, 1001) == ""
    memory.reset(1.0)
    assert memory.admit(workspace, 1002) == ""


DISPATCH = {
    "operation": 0, "dtype": 0, "wire": 1, "flags": 1, "ranks": 4, "tokens": 4096, "top_k": 8, "experts": 256,
    "hidden": 7168, "capacity": 65536, "alignment": 8,
}  # fmt: skip
COMBINE = {
    "operation": 2, "dtype": 2, "layout": 1, "flags": 4, "ranks": 4, "tokens": 64, "top_k": 2, "experts": 8,
    "hidden": 128, "capacity": 256,
}  # fmt: skip
EXCHANGE = {"operation": 3, "flags": 8, "ranks": 4, "operand_units": 100, "output_units": 200} | {
    "unit_bytes_low": 512, "unit_bytes_high": 1,
}  # fmt: skip
SHAPES = {
    "dispatch": "dispatch of bfloat16[4096, 7168], top-8 of 256 experts over 4 ranks, layout grouped, capacity 65536, "
    "alignment 8, wire float8_e4m3fn:ue8m0",
    "combine": "combine of float32[64, 128], top-2 of 8 experts over 4 ranks, layout ranked, capacity 256, weighted",
    "exchange": f"ragged_all_to_all of 100 rows of {2**32 + 512} bytes into 200 over 4 ranks",
}
BOTH = {"of_rank": COMBINE, "of_other": DISPATCH, "rank": 2, "other": 1, "epoch": 9, "waited_ns": 12_340_000_000}


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (
            BOTH | {"cause": 1, "step": 0},
            ["dispatch number 9 on channel 5", "rank 2 (GPU 2) did not start it", "rank 1 gave up after 12.3 s",
             "KernelConfig.timeout_s", SHAPES["dispatch"], SHAPES["combine"], "xen_moe_jax.cuda.reset()"],
        ),
        (BOTH | {"cause": 1, "step": 1}, ["did not send its routing"]),
        (BOTH | {"cause": 1, "step": 2}, ["did not send its rows"]),
        (
            BOTH | {"cause": 1, "step": 3, "operation": 3, "of_other": EXCHANGE},
            ["did not take the rows", SHAPES["exchange"]],
        ),
        (BOTH | {"cause": 1, "step": 0, "of_rank": {}}, ["the latest of rank 2 is no operation yet"]),
        (
            BOTH | {"cause": 2},
            ["different operations under this number", "rank 2 (GPU 2) runs " + SHAPES["combine"],
             "rank 1 runs " + SHAPES["dispatch"], "KernelConfig.channel"],
        ),
        (
            BOTH | {"cause": 2, "of_other": DISPATCH | {"wire": 3}},
            [SHAPES["dispatch"].replace("float8_e4m3fn:ue8m0", "mxfp4")],
        ),
        (BOTH | {"cause": 3}, ["the process of rank 2 (GPU 2) has ended", "last checkpoint"]),
        (
            BOTH | {"cause": 3, "masked": True},
            ["the process of rank 2 (GPU 2) has ended", "xen_moe_jax.cuda.alive("],
        ),
        (
            BOTH | {"cause": 2, "of_other": DISPATCH | {"flags": 1 | 0b1010 << 16}},
            [SHAPES["dispatch"] + ", without ranks 1, 3", "the same `active`"],
        ),
        (BOTH | {"cause": 4}, ["rank 2 (GPU 2) has released its symmetric memory", "xm.Buffer", SHAPES["dispatch"]]),
        (BOTH | {"cause": 5}, ["given to rank 2", "counts below zero", "as dispatch returned it"]),
        (BOTH | {"cause": 6}, ["another operation held the channel for 12.3 s", "KernelConfig.channel each"]),
    ],
)  # fmt: skip
def test_error_texts_name_root_shapes_time_and_remedy(memory, record, parts):
    text = memory.failure_text(record, 5, 0)
    assert text.startswith("xen_moe_jax: ")
    assert "mxfp4:" not in text
    for part in [*parts, "NaN"]:
        assert part in text, text
    if record["cause"] != 3:
        assert "in every process" in memory.failure_text(record, 5, 1)


@pytest.mark.parametrize("cause", range(1, 8))
def test_error_texts_of_an_elastic_group_name_its_remedy(memory, cause):
    text = memory.failure_text(BOTH | {"cause": cause, "masked": True}, 5, 2)
    assert text.startswith("xen_moe_jax: ") and "NaN" in text and "group.recover(step)" in text
    assert "cuda." not in text and "the job" not in text, text
    assert ("the other members have given up this step" in text) == (cause == 7)


def test_check_raises_what_the_module_says(monkeypatch):
    import xen_moe_jax as xm
    from xen_moe_jax import failure

    xm.check()
    monkeypatch.setattr(failure, "failure", lambda: "xen_moe_jax: dispatch number 3 on channel 0 failed")
    with pytest.raises(xm.OperationFailed, match="number 3"):
        xm.check()
    assert issubclass(xm.OperationFailed, RuntimeError)


# -- flights -----------------------------------------------------------------------------------------------------------


def test_a_flight_is_found_by_its_result_and_once(memory):
    memory.start_flight(0, 0x100, 1)
    memory.start_flight(0, 0x200, 1)
    memory.start_flight(1, 0x100, 1)  # another GPU
    assert memory.open_flights() == memory.marks() == 3
    assert memory.land_flight(0, 0x200) and not memory.land_flight(0, 0x200)
    assert not memory.land_flight(0, 0x300)
    assert memory.land_flight(0, 0x100) and memory.land_flight(1, 0x100)
    assert memory.open_flights() == memory.marks() == 0


def test_a_flight_that_is_alone_comes_before_what_follows_its_start(memory):
    before = memory.held_back()
    memory.start_flight(0, 0x100, 1)
    memory.start_flight(1, 0x100, 1)  # another GPU
    assert memory.held_back() == before + 2
    memory.start_flight(0, 0x200, 1)  # behind the first: nothing may wait for that one's end
    assert memory.held_back() == before + 2
    assert memory.land_flight(0, 0x100) and memory.land_flight(0, 0x200)
    memory.start_flight(0, 0x100, 1)
    assert memory.held_back() == before + 3
    assert memory.land_flight(0, 0x100) and memory.land_flight(1, 0x100)


def test_flights_of_a_run_that_fails_are_waited_for_at_once(memory):
    """Their memory is given to others when the run has ended, and they still write to it."""
    memory.start_flight(0, 0x100, 7)
    memory.start_flight(0, 0x200, 7)
    memory.start_flight(1, 0x100, 7)
    memory.abandon_flights(0, 8)  # another run
    assert memory.open_flights() == memory.marks() == 3
    memory.abandon_flights(0, 7)
    assert memory.open_flights() == memory.marks() == 1 and not memory.land_flight(0, 0x100)
    assert memory.land_flight(1, 0x100)  # that GPU has not failed
    assert memory.open_flights() == memory.marks() == 0


def test_a_result_that_serves_two_flights_of_a_run_is_refused(memory):
    memory.start_flight(0, 0x100, 1)
    calls = memory.calls()
    with pytest.raises(RuntimeError, match="started and never finished.*finish every flight once"):
        memory.start_flight(0, 0x100, 1)
    assert memory.calls() == calls  # it was not even begun
    assert memory.land_flight(0, 0x100)


def test_flights_of_a_run_that_ended_early_are_forgotten_by_the_next(memory):
    memory.start_flight(0, 0x100, 1)
    memory.start_flight(1, 0x100, 1)
    memory.start_flight(0, 0x100, 2)
    assert memory.open_flights() == memory.marks() == 2  # that of the other GPU, which has not begun the next run
    memory.reset(5.0)
    assert memory.open_flights() == memory.marks() == 0
    assert not memory.land_flight(0, 0x100)


def test_a_start_that_fails_leaves_nothing_open(memory):
    for calls in range(2):
        memory.fail_after(calls)
        with pytest.raises(RuntimeError, match="told to fail"):
            memory.start_flight(0, 0x100, 1)
        memory.fail_after(-1)
        assert memory.open_flights() == memory.marks() == 0


def test_flights_have_memory_of_their_own_and_fail_with_the_others(memory):
    workspace = memory.workspace([0, 1], 2, 0)
    flights = memory.flights([0, 1], 2, 0)
    memory.serve(flights, *SMALL, 1.0)
    assert run(memory, flights) and not memory.serves(workspace, *SMALL)
    assert [w["flights"] for w in memory.workspaces() if w["staging_bytes"]] == [True]
    memory.serve(workspace, *LARGE, 1.0)
    assert run(memory, workspace, LARGE) and run(memory, flights)
    memory.fail(flights, 0, {"cause": 1, "rank": 1, "other": 0})
    for which in (workspace, flights):
        assert "rank 1" in memory.admit(which, 5)
    assert "rank 1" in memory.failure()
    memory.reset(5.0)
    assert memory.failure() == "" and memory.admit(workspace, 6) == memory.admit(flights, 6) == ""
    assert run(memory, workspace, LARGE) and run(memory, flights)
