"""Runs of bytes against NumPy's own indexing; frames that were tampered with."""

import select
import socket
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xen_moe_jax.transfer import _channel
from xen_moe_jax.transfer._errors import TransferRefused
from xen_moe_jax.transfer._layout import Leaf, Shard, copy_runs
from xen_moe_jax.transfer._remote import RemoteArray


@st.composite
def box_pairs(draw):
    rank = draw(st.integers(0, 4))
    shape = [draw(st.integers(1, 6)) for _ in range(rank)]

    def box():
        starts = [draw(st.integers(0, extent - 1)) for extent in shape]
        return tuple((start, draw(st.integers(start + 1, extent))) for start, extent in zip(starts, shape))

    return shape, box(), box()


def carried_out(runs, source, destination, itemsize):
    """Returns the destination after the runs."""
    result = bytearray(destination.tobytes())
    for source_offset, destination_offset, nbytes in runs.tolist():
        assert nbytes > 0 and source_offset + nbytes <= source.nbytes and destination_offset + nbytes <= len(result)
        result[destination_offset : destination_offset + nbytes] = source.tobytes()[
            source_offset : source_offset + nbytes
        ]
    return np.frombuffer(bytes(result), destination.dtype).reshape(destination.shape)


def slices(box, within=None):
    return tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(box, within or [(0, 0)] * len(box)))


@given(box_pairs(), st.sampled_from([np.uint8, np.int32]))
def test_runs_copy_what_two_boxes_have_in_common(boxes, dtype):
    shape, here, there = boxes
    whole = np.arange(1, int(np.prod(shape)) + 1).astype(dtype).reshape(shape)
    source = np.array(whole[slices(here)], order="C")
    expected = np.zeros_like(whole)
    expected[slices(here)] = source if shape else source[()]
    expected = np.array(expected[slices(there)])
    runs = copy_runs(here, there, whole.dtype.itemsize)
    np.testing.assert_array_equal(carried_out(runs, source, np.zeros_like(expected), whole.dtype.itemsize), expected)


@given(st.data())
def test_paged_runs_equal_fancy_indexing(data):
    pages_here, pages_there = data.draw(st.integers(1, 8)), data.draw(st.integers(1, 8))
    shape = tuple(data.draw(st.integers(1, 3)) for _ in range(data.draw(st.integers(0, 2))))
    count = data.draw(st.integers(0, min(pages_here, pages_there)))
    taken = np.array(data.draw(st.lists(st.integers(0, pages_here - 1), min_size=count, max_size=count)), np.int64)
    put = np.array(data.draw(st.permutations(range(pages_there)))[:count], np.int64)
    source = np.arange(1, pages_here * int(np.prod(shape)) + 1, dtype=np.int16).reshape(pages_here, *shape)
    expected = np.zeros((pages_there, *shape), np.int16)
    expected[put] = source[taken]
    boxes = [tuple((0, extent) for extent in array.shape) for array in (source, expected)]
    runs = copy_runs(*boxes, 2, (taken, put))
    np.testing.assert_array_equal(carried_out(runs, source, np.zeros_like(expected), 2), expected)


def test_neighbouring_pages_are_one_run():
    box = ((0, 64), (0, 128))
    assert len(copy_runs(box, box, 4, (np.arange(8), np.arange(8) + 20))) == 1
    assert len(copy_runs(box, box, 4)) == 1
    assert len(copy_runs(box, box, 4, (np.array([0, 2, 3]), np.array([5, 1, 2])))) == 2


def channel_pair(client_key=b"k" * 32, server_key=b"k" * 32, target="s"):
    listener = socket.create_server(("127.0.0.1", 0))
    accepted = []

    def serve():
        connection, _ = listener.accept()
        try:
            accepted.append(
                _channel.accept_channel(
                    connection, server_key, {"name": "s"}, "s", time.monotonic() + 5, lambda hello: None
                )
            )
        except (ValueError, ConnectionError) as error:
            accepted.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        opened = _channel.open_channel(listener.getsockname(), client_key, {"name": "c"}, target, time.monotonic() + 5)
    finally:
        thread.join()
        listener.close()
    return opened, accepted[0]


def received(channel, wanted=1):
    frames = []
    while len(frames) < wanted:
        assert select.select([channel.socket], [], [], 5)[0], f"{len(frames)} of {wanted} frames in 5 s"
        got, ended = channel.receive()
        frames += got
        if ended:
            break
    return frames


def test_frames_arrive_whole_and_in_order():
    (client, server_hello), (server, client_hello) = channel_pair()
    assert (server_hello["name"], client_hello["name"]) == ("s", "c")
    for number in range(50):
        client.send({"t": "x", "n": number}, bytes([number]) * number * 1000)
    flushing = threading.Thread(target=lambda: [client.flush() for _ in iter(lambda: client.has_outgoing, False)])
    flushing.start()
    frames = received(server, 50)
    flushing.join(5)
    assert frames == [({"t": "x", "n": n}, bytes([n]) * n * 1000) for n in range(50)]


@pytest.mark.parametrize("place", [0, 9, 30, -1])
def test_a_changed_frame_is_noticed(place):
    (client, _), (server, _) = channel_pair()
    body = bytearray(_channel.encode({"t": "imm", "k": 1, "n": 0}, b"payload-payload"))
    mark = _channel.tag(client._keys[0], (0).to_bytes(8, "little"), bytes(body))
    frame = bytearray(bytes(body) + mark)
    frame[place] ^= 1
    client.socket.sendall(bytes(frame) + bytes(1000))
    with pytest.raises(ValueError):
        received(server)


def test_a_repeated_frame_is_noticed():
    (client, _), (server, _) = channel_pair()
    client.send({"t": "imm", "k": 1, "n": 0})
    assert len(received(server)) == 1
    body = _channel.encode({"t": "imm", "k": 1, "n": 0})
    client.socket.sendall(body + _channel.tag(client._keys[0], (0).to_bytes(8, "little"), body))
    with pytest.raises(ValueError, match="tag is wrong"):
        received(server)


def test_neither_side_takes_the_other_without_the_key():
    with pytest.raises(TransferRefused, match="token"):
        channel_pair(client_key=b"a" * 32)
    with pytest.raises(TransferRefused, match="another engine"):
        channel_pair(target="someone else")


def test_each_gpu_copies_what_it_has():
    """Two shards for one piece of a peer's memory: one list of runs for each of two GPUs, one for the host."""
    leaf = Leaf("", (4, 8), np.dtype(np.uint8), (Shard(((0, 4), (0, 8)), 0, "cuda", b"key"),))
    array = RemoteArray(None, leaf)  # type: ignore[arg-type]
    for memory, lists in (("cuda", 2), ("host", 1)):
        local = [Shard(((2 * i, 2 * i + 2), (0, 8)), 1000 * (i + 1), memory) for i in range(2)]
        runs = array.runs(local, leaf.shards)
        assert len(runs) == lists and all(r.key == b"key" and r.memory == memory for r in runs)
        assert np.concatenate([r.addresses for r in runs]).tolist() == [[1000, 0, 16], [2000, 16, 16]]
