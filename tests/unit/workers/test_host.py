"""Variables that workers get, and ports for them."""

from __future__ import annotations

import socket

import pytest

from winnow.workers.host import DEFAULT_VARIABLES, free_port, worker_environment


def test_the_users_values_come_before_ours_and_ours_before_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in DEFAULT_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert worker_environment({}) == DEFAULT_VARIABLES
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert worker_environment({"OMP_NUM_THREADS": "2", "HF_HOME": "/x"}) == {
        **DEFAULT_VARIABLES,
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "2",
        "HF_HOME": "/x",
    }


def test_a_free_port_can_be_listened_at_and_is_not_one_in_use() -> None:
    taken = set()
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port("127.0.0.1")))
        server.listen()
        taken.add(server.getsockname()[1])
        assert not taken & {free_port("127.0.0.1") for _ in range(200)}
