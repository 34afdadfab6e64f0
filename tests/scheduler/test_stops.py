"""What ends a request, and what its end says."""

from __future__ import annotations

import pytest

from scheduler.output import FinishedRequest, FinishReason
from tests.scheduler.fake_worker import reference_tokens
from tests.scheduler.harness import Harness

PROMPT = tuple(range(10))
TOKENS = reference_tokens(PROMPT, 0, (None,), 40)


def end(harness: Harness) -> tuple[int, FinishedRequest]:
    """Tokens and end of the only request."""
    harness.run()
    (sent,) = harness.sent.values()
    assert sent.finished is not None
    assert tuple(sent.tokens) == TOKENS[: len(sent.tokens)]
    return len(sent.tokens), sent.finished


@pytest.fixture(params=["sync", "async", "pipeline"])
def harness(request: pytest.FixtureRequest) -> Harness:
    mode = request.param
    return Harness(depth=1 if mode == "sync" else 2, async_scheduling=mode == "async")


def test_the_reference_tokens_differ() -> None:
    assert len(set(TOKENS[:6])) == 6


@pytest.mark.parametrize("place", [1, 2, 5])
def test_an_eos_token_ends_with_no_stop_reason(harness: Harness, place: int) -> None:
    harness.add(PROMPT, max_tokens=20, eos=(996, TOKENS[place - 1]))
    assert end(harness) == (place, FinishedRequest("0", FinishReason.STOP, None))


def test_a_stop_token_is_the_stop_reason(harness: Harness) -> None:
    harness.add(PROMPT, max_tokens=20, stop_token_ids=[TOKENS[3], 996])
    assert end(harness) == (4, FinishedRequest("0", FinishReason.STOP, TOKENS[3]))


def test_a_token_that_is_both_counts_as_eos(harness: Harness) -> None:
    harness.add(PROMPT, max_tokens=20, eos=(TOKENS[2],), stop_token_ids=[TOKENS[2]])
    assert end(harness) == (3, FinishedRequest("0", FinishReason.STOP, None))


def test_ignored_eos_ends_nothing_but_stop_tokens_still_do(harness: Harness) -> None:
    harness.add(PROMPT, max_tokens=20, eos=(TOKENS[1], TOKENS[3]), stop_token_ids=[TOKENS[3]], ignore_eos=True)
    assert end(harness) == (4, FinishedRequest("0", FinishReason.STOP, TOKENS[3]))


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_is_a_length_end(harness: Harness, max_tokens: int) -> None:
    harness.add(PROMPT, max_tokens=max_tokens)
    assert end(harness) == (max_tokens, FinishedRequest("0", FinishReason.LENGTH))


def test_a_stop_at_the_length_limit_is_a_stop(harness: Harness) -> None:
    harness.add(PROMPT, max_tokens=3, eos=(TOKENS[2],))
    assert end(harness) == (3, FinishedRequest("0", FinishReason.STOP, None))


@pytest.mark.parametrize("room", [1, 2, 5])
@pytest.mark.parametrize("max_tokens", [None, 100])
def test_the_context_length_is_a_length_end(room: int, max_tokens: int | None) -> None:
    for async_scheduling in (False, True):
        harness = Harness(max_model_len=len(PROMPT) + room, async_scheduling=async_scheduling, depth=1)
        harness.add(PROMPT, max_tokens=max_tokens)
        assert end(harness) == (room, FinishedRequest("0", FinishReason.LENGTH))


def test_stop_tokens_are_masked_until_min_tokens() -> None:
    harness = Harness()
    masked = frozenset(TOKENS[:2])
    harness.add(PROMPT, max_tokens=12, min_tokens=3, eos=(TOKENS[0],), stop_token_ids=[TOKENS[1]])
    harness.run()
    (sent,) = harness.sent.values()
    assert not masked & set(sent.tokens[:3])
    assert harness.messages[0].new_requests[0].stop_ids_until_min_tokens == sorted(masked)


def test_a_stop_token_sampled_before_min_tokens_is_no_end() -> None:
    # Workers mask such tokens; a worker that does not is not believed.
    harness = Harness()
    harness.add(PROMPT, max_tokens=6, min_tokens=4, eos=(TOKENS[1],))
    harness.schedule()
    harness.worker.rows[0].masked = frozenset()
    for _ in range(3):
        harness.update()
        harness.schedule()
    assert harness.sent["0"].finished is None
    assert tuple(harness.sent["0"].tokens) == TOKENS[:3]


def test_a_request_that_outgrows_the_pool_ends_with_the_reason() -> None:
    for async_scheduling in (False, True):
        harness = Harness(num_blocks=1 + 5, block_size=4, async_scheduling=async_scheduling)
        harness.add(PROMPT, max_tokens=100)
        num_tokens, finished = end(harness)
        # 20 slots hold the KV of 20 tokens, and the 21st is still sampled.
        assert num_tokens == 21 - len(PROMPT)
        assert finished.reason is FinishReason.ERROR
        assert finished.error is not None
        assert "holds 20 tokens" in finished.error
        assert "after 11 generated tokens; max_tokens is 100" in finished.error


def test_a_request_that_just_fits_the_pool_ends_normally() -> None:
    harness = Harness(num_blocks=1 + 5, block_size=4)
    harness.add(PROMPT, max_tokens=11)
    assert end(harness) == (11, FinishedRequest("0", FinishReason.LENGTH))
