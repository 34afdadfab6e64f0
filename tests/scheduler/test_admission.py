"""Requests that are refused, at once and with the numbers; and model features that switch others off."""

from __future__ import annotations

import logging

import pytest

from kv.config import CacheConfig
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from scheduler.config import SchedulerConfig
from scheduler.errors import QueueFullError, RequestRefusedError
from scheduler.output import FinishReason, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from scheduler.scheduler import Scheduler
from tests.scheduler.harness import Harness, kv_config


@pytest.mark.parametrize(("length", "allowed"), [(30, True), (31, True), (32, False), (33, False)])
def test_a_prompt_must_leave_room_for_output(length: int, allowed: bool) -> None:
    harness = Harness(max_model_len=32)
    if allowed:
        harness.add(range(length))
        harness.run()
        assert len(harness.sent["0"].tokens) == 32 - length
    else:
        with pytest.raises(RequestRefusedError, match=rf"request 0: a prompt of {length} tokens .* max_model_len = 32"):
            harness.add(range(length))
        harness.check_nothing_left()


@pytest.mark.parametrize(("length", "allowed"), [(19, True), (20, True), (21, False)])
def test_a_prompt_larger_than_the_pool_is_refused(length: int, allowed: bool) -> None:
    harness = Harness(num_blocks=1 + 5, block_size=4)
    if allowed:
        harness.add(range(length), max_tokens=1)
        harness.run()
    else:
        with pytest.raises(RequestRefusedError, match="a prompt of 21 tokens is more than the 20 tokens"):
            harness.add(range(length))


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(RequestRefusedError, match="request 0: the prompt has no tokens"):
        Harness().add([])


def test_a_torn_prompt_column_is_refused() -> None:
    scheduler = Harness().scheduler
    with pytest.raises(RequestRefusedError, match="int32 packed in bytes, got 6 bytes"):
        scheduler.add_request(EngineCoreRequest("x", b"123456", SamplingParams()))


def test_an_id_in_use_is_refused_and_free_again_afterwards() -> None:
    harness = Harness()
    harness.add(range(5), "same")
    with pytest.raises(RequestRefusedError, match="request_id 'same' is in use"):
        harness.scheduler.add_request(EngineCoreRequest("same", pack_int32([1]), SamplingParams()))
    harness.run()
    harness.add(range(5), "same")
    harness.run()


def test_a_full_queue_refuses_what_could_not_start_at_once() -> None:
    harness = Harness(max_num_seqs=2, max_num_queued_requests=1)
    for _ in range(3):
        harness.add(range(5), max_tokens=20)
    with pytest.raises(QueueFullError, match=r"3 requests are waiting, 2 of them .* max_num_queued_requests is 1"):
        harness.add(range(5))
    harness.step()  # two run, one waits
    with pytest.raises(QueueFullError):
        harness.add(range(5))
    harness.run()
    harness.add(range(5))
    harness.run()


def test_queue_length_zero_admits_what_can_start_at_once() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_requests=0)
    harness.add(range(5))
    with pytest.raises(QueueFullError):
        harness.add(range(5))
    harness.run()


def test_aborting_makes_room_in_the_queue() -> None:
    harness = Harness(max_num_seqs=1, max_num_queued_requests=0)
    waiting = harness.add(range(5))
    harness.abort(waiting)
    harness.add(range(5))
    harness.run()


def test_abort_of_unknown_and_ended_requests_is_ignored() -> None:
    harness = Harness()
    request = harness.add(range(5), max_tokens=2)
    harness.abort("nobody")
    harness.run()
    harness.abort(request)
    assert harness.sent[request].finished is not None
    assert harness.sent[request].finished.reason is FinishReason.LENGTH


def test_abort_all_ends_waiting_and_running_requests_of_all_clients() -> None:
    harness = Harness(max_num_seqs=2)
    for client in (0, 1, 0):
        harness.add(range(5), client_index=client)
    harness.step()
    harness.scheduler.abort_all()
    outputs = harness.scheduler.take_outputs()
    ends = {client: [finished.request_id for finished in output.finished] for client, output in outputs.items()}
    assert ends == {0: ["0", "2"], 1: ["1"]}
    assert all(end.reason is FinishReason.ABORT for output in outputs.values() for end in output.finished)
    assert harness.scheduler.take_outputs() == {}
    assert not harness.scheduler.has_requests()
    harness.check_nothing_left()


def test_non_causal_layers_switch_chunking_and_caching_off(caplog: pytest.LogCaptureFixture) -> None:
    spec = FullAttentionSpec(4, 1, 1, 1, non_causal=True)
    config = KVCacheConfig(50, (KVCacheGroup(("a",), spec),))
    with caplog.at_level(logging.INFO, "scheduler.scheduler"):
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16), CacheConfig(4), config)
    assert "non-causal" in caplog.text
    assert (scheduler.chunked_prefill_enabled, scheduler.prefix_caching_enabled) == (False, False)
    params = SamplingParams(max_tokens=2, seed=0)
    with pytest.raises(RequestRefusedError, match=r"a prompt of 17 tokens does not fit in one step .* = 16"):
        scheduler.add_request(EngineCoreRequest("long", pack_int32(range(17)), params))
    for name in "ab":
        scheduler.add_request(EngineCoreRequest(name, pack_int32(range(16)), params))
    first = scheduler.schedule()
    assert first is not None
    assert [new.request_id for new in first.new_requests] == ["a"]  # b does not fit beside it, and is not cut
    assert scheduler.schedule() is not None


def test_async_scheduling_cannot_be_combined_with_known_tokens() -> None:
    config = SchedulerConfig(async_scheduling=True)
    with pytest.raises(ValueError, match="async_scheduling cannot be used"):
        Scheduler(config, CacheConfig(4), kv_config(9), max_concurrent_batches=2, send_known_tokens=True)
    with pytest.raises(ValueError, match="max_concurrent_batches must be at least 1, got 0"):
        Scheduler(config, CacheConfig(4), kv_config(9), max_concurrent_batches=0)


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_num_seqs", 0), ("max_num_batched_tokens", -1), ("max_model_len", 0), ("max_model_len", True),
     ("max_long_partial_prefills", 0), ("long_prefill_token_threshold", -1), ("max_num_queued_requests", -1),
     ("policy", "lifo"), ("async_scheduling", "yes")],
)  # fmt: skip
def test_wrong_settings_are_refused_with_field_and_value(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be .*got {value!r}"):
        SchedulerConfig(**{field: value})  # type: ignore[arg-type]


def test_impossible_budgets_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"):
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=7)
    with pytest.raises(ValueError, match=r"without chunked prefill max_num_batched_tokens \(2048\)"):
        SchedulerConfig(enable_chunked_prefill=False, max_model_len=4096)
