"""Which cluster an engine's process joins when it is told none."""

from __future__ import annotations

import socket

import pytest

from engine_actors.ray_places import cluster_to_join


@pytest.fixture
def last_started(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Holds the address that the last `ray start` on this machine left behind."""
    address: list[str | None] = [None]
    monkeypatch.setattr("ray._private.utils.read_ray_address", lambda: address[0])
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return address


def test_ray_decides_where_no_cluster_was_started(last_started: list[str | None]) -> None:
    assert cluster_to_join() is None


def test_a_cluster_that_answers_is_joined_and_one_that_was_killed_is_not(last_started: list[str | None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as cluster:
        last_started[0] = f"127.0.0.1:{cluster.getsockname()[1]}"
        assert cluster_to_join() is None  # by which Ray joins it
    assert cluster_to_join() == "local"


def test_an_address_that_is_no_address_is_not_waited_for(last_started: list[str | None]) -> None:
    last_started[0] = "nonsense"
    assert cluster_to_join() == "local"


def test_ray_address_comes_first(last_started: list[str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    last_started[0] = "127.0.0.1:1"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.7:6379")
    assert cluster_to_join() == "10.0.0.7:6379"
