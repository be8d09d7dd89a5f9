"""Messages between two processes of a machine: their arrays, their memory, their order."""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from winnow.workers.local import PACKET_BYTES, pack, receive_message, send_message, unpack

ARRAYS = hnp.arrays(
    st.sampled_from([np.float32, np.int64, np.bool_, np.dtype("<U3")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
)


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for each in (ours, theirs):
        each.setblocking(False)
    with ours, theirs:
        yield ours, theirs


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@given(st.lists(ARRAYS, max_size=4), st.integers(0, 3 * PACKET_BYTES))
def test_values_come_back_as_they_were(arrays: list[np.ndarray], length: int) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        packed = pack({"arrays": arrays, "text": "x" * length})
        send_message(ours, 7, packed)
        del packed
        message = receive_message(theirs)
    assert message is not None
    number, found = message[0], unpack(message[1])
    assert number == 7
    assert found["text"] == "x" * length
    for array, back in zip(arrays, found["arrays"], strict=True):
        assert back.dtype == array.dtype
        np.testing.assert_array_equal(back, array)


def test_large_arrays_share_their_memory_between_receivers_and_are_aligned(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    array = np.arange(300_000)
    before = open_descriptors()
    packed = pack(("odd length", array, array[:1000].copy()))
    assert array.nbytes < os.fstat(packed.descriptor).st_size < array.nbytes + 20_000
    for number in range(3):
        send_message(ours, number, packed)
    del packed
    values = [unpack(message[1]) for _ in range(3) if (message := receive_message(theirs))]
    for _, back, second in values:
        np.testing.assert_array_equal(back, array)
        assert back.ctypes.data % 64 == second.ctypes.data % 64 == 0
        assert not back.flags.writeable
    del values, back, second, message
    gc.collect()
    assert open_descriptors() == before


def test_small_messages_go_without_memory_of_their_own() -> None:
    packed = pack(("step", (3,), {"lr": 1e-6}))
    assert packed.descriptor == -1


def test_a_full_socket_takes_nothing_in_part(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    packed = pack("x" * (PACKET_BYTES - 200))
    sent = 0

    def fill() -> None:
        nonlocal sent
        while True:
            send_message(ours, sent, packed)
            sent += 1

    with pytest.raises(BlockingIOError):
        fill()
    assert [message[0] for _ in range(sent) if (message := receive_message(theirs))] == list(
        range(sent)
    )
    with pytest.raises(BlockingIOError):
        receive_message(theirs)


def test_the_end_of_the_sender_is_told(pair: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = pair
    send_message(ours, 1, pack("last"))
    ours.close()
    message = receive_message(theirs)
    assert message is not None
    assert unpack(message[1]) == "last"
    assert receive_message(theirs) is None


def test_what_cannot_be_pickled_leaves_no_descriptor() -> None:
    before = open_descriptors()
    with pytest.raises(AttributeError):
        pack([np.zeros(100_000), lambda: None])
    assert open_descriptors() == before
