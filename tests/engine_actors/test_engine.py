"""The Engine actor as users call it: `ray.get(engine.generate.remote(...))`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray._private.state
from ray.exceptions import ActorDiedError, RayError, TaskCancelledError

from engine_actors import Engine, EngineDeadError, InvalidRequestError, SamplingParams
from tests.fakes import FakeExecutor, expected_tokens

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
Make = Callable[..., Any]


@pytest.fixture
def make_engine(fake_model_dir: Path) -> Iterator[Make]:
    engines: list[Any] = []

    def make(executor: dict[str, Any] | None = None, **options: Any) -> Any:
        executor_class = partial(FakeExecutor, **executor) if executor else FakeExecutor
        engines.append(Engine.remote(model=str(fake_model_dir), executor_class=executor_class, **options))
        return engines[-1]

    yield make
    for engine in engines:
        ray.kill(engine)


@pytest.fixture(scope="module")
def engine(ray_cluster: None, fake_model_dir: Path) -> Iterator[Any]:
    """One engine, slow enough to watch, for the tests that leave it well."""
    actor = Engine.remote(model=str(fake_model_dir), executor_class=partial(FakeExecutor, step_s=0.005))
    yield actor
    ray.kill(actor)


def live_actors() -> set[str]:
    return {a["ActorID"] for a in ray._private.state.actors().values() if a["State"] != "DEAD"}


def wait_until_dead(actor_ids: set[str], within_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + within_s
    while actor_ids & live_actors():
        assert time.monotonic() < deadline_s, "actors are left behind"
        time.sleep(0.02)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def pid_of(engine: Any, part: str) -> int:
    return int(ray.get(engine.where.remote())[part].split("pid ")[1].split(",")[0])


def test_generate_returns_outputs_in_the_order_of_the_prompts(engine: Any) -> None:
    outputs = ray.get(engine.generate.remote([[5], "The fox", {"prompt_token_ids": [6, 7]}], GREEDY))
    assert [output.prompt for output in outputs] == [None, "The fox", None]
    assert all(output.finished for output in outputs)
    assert tokens_of(outputs)[::2] == [expected_tokens([5], 20), expected_tokens([6, 7], 20)]
    assert tokens_of(ray.get(engine.generate.remote([5], GREEDY))) == [expected_tokens([5], 20)]


def test_chat_goes_through_the_template(engine: Any) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (output,) = ray.get(engine.chat.remote(conversation, GREEDY))
    assert output.prompt == "<user>Hi\n<assistant>"
    assert [o.prompt for o in ray.get(engine.chat.remote([conversation, conversation], GREEDY))] == [output.prompt] * 2
    streamed = [ray.get(ref) for ref in engine.stream_chat.remote(conversation, GREEDY)]
    assert "".join(o.outputs[0].text for o in streamed) == output.outputs[0].text


def test_stream_gives_what_is_new_until_the_end(engine: Any) -> None:
    outputs = [ray.get(ref) for ref in engine.stream.remote([5], GREEDY)]
    assert [token for output in outputs for token in output.outputs[0].token_ids] == expected_tokens([5], 20)
    assert len(outputs) > 1
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_wrong_request_in_a_list_queues_nothing_and_the_engine_goes_on(engine: Any) -> None:
    with pytest.raises(InvalidRequestError, match="token id 9999; the model's vocabulary is 0 to 511"):
        ray.get(engine.generate.remote([[5], [9999]], GREEDY))
    with pytest.raises(InvalidRequestError, match="prompt is empty"):
        list(map(ray.get, engine.stream.remote("", GREEDY)))
    assert tokens_of(ray.get(engine.generate.remote([[5]], GREEDY))) == [expected_tokens([5], 20)]
    assert ray.get(engine.health.remote()) is True


def test_where_names_every_part(engine: Any) -> None:
    where = ray.get(engine.where.remote())
    assert list(where) == ["Engine", "EngineCore", "Worker 0"]
    assert len({place.split(",")[1] for place in where.values()}) == 2  # the fake worker lives in EngineCore


def test_abort_ends_a_stream(engine: Any) -> None:
    stream = engine.stream.remote([5], GREEDY.clone(max_tokens=200), "mine")
    ray.get(next(stream))
    ray.get(engine.abort.remote("mine"))
    assert [ray.get(ref) for ref in stream][-1].outputs[0].finish_reason == "abort"


def test_cancelled_call_aborts_its_requests(engine: Any) -> None:
    ref = engine.generate.remote([[5]], GREEDY.clone(max_tokens=200))
    while ray.get(engine.reset_prefix_cache.remote()):
        pass
    ray.cancel(ref)
    with pytest.raises(TaskCancelledError):
        ray.get(ref)
    deadline_s = time.monotonic() + 0.5  # 200 steps take a second
    while not ray.get(engine.reset_prefix_cache.remote()):
        assert time.monotonic() < deadline_s


def test_core_killed_in_mid_generation_ends_every_call_with_the_cause(make_engine: Make) -> None:
    engine = make_engine({"step_s": 0.05})
    core = pid_of(engine, "EngineCore")
    call = engine.generate.remote([[5]], GREEDY.clone(max_tokens=200))
    stream = engine.stream.remote([6], GREEDY.clone(max_tokens=200))
    ray.get(next(stream))
    os.kill(core, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        ray.get(call)
    with pytest.raises(EngineDeadError, match="EngineCore's process died"):
        list(map(ray.get, stream))
    assert time.monotonic() - started < 2
    for later in (engine.generate.remote([[5]], GREEDY), engine.health.remote(), engine.reset_prefix_cache.remote()):
        with pytest.raises(EngineDeadError, match="EngineCore's process died"):
            ray.get(later)


def test_killed_engine_takes_its_core_with_it(make_engine: Make) -> None:
    before = live_actors()
    engine = make_engine()
    pid = pid_of(engine, "Engine")
    actors = live_actors() - before
    assert len(actors) == 2
    os.kill(pid, signal.SIGKILL)
    wait_until_dead(actors)
    with pytest.raises(RayError):
        ray.get(engine.health.remote())


def test_shutdown_leaves_only_the_engine_actor_which_says_so(make_engine: Make) -> None:
    before = live_actors()
    engine = make_engine()
    ray.get(engine.generate.remote([[5]], GREEDY))
    cores = live_actors() - before - {engine._actor_id.hex()}
    ray.get(engine.shutdown.remote())
    ray.get(engine.shutdown.remote())
    wait_until_dead(cores)
    with pytest.raises(EngineDeadError, match="the engine was shut down"):
        ray.get(engine.generate.remote([[5]], GREEDY))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"executor": {"startup_error": ValueError("weights are truncated")}}, "weights are truncated"),
        ({"tensor_parallel_size": 3, "executor": {}}, "tensor_parallel_size"),
        ({"tensor_paralel_size": 2}, "did you mean 'tensor_parallel_size'"),
    ],
)
def test_engine_that_cannot_start_tells_why_at_the_first_call(
    make_engine: Make, options: dict[str, Any], text: str
) -> None:
    before = live_actors()
    engine = make_engine(**options)
    with pytest.raises(ActorDiedError, match=text):
        ray.get(engine.generate.remote([[5]], GREEDY))
    wait_until_dead(live_actors() - before)


def generate_until_it_fails(engine: Any) -> None:
    while True:
        ray.get(engine.generate.remote([[5]], GREEDY))


@pytest.mark.parametrize("part", ["Engine", "EngineCore"])
@pytest.mark.parametrize("timeout_s", [0.0, 60.0])
def test_sigterm_aborts_or_drains_and_delivers_what_was_under_way(
    make_engine: Make, part: str, timeout_s: float
) -> None:
    before = live_actors()
    engine = make_engine({"step_s": 0.02}, shutdown_timeout_s=timeout_s)
    pid = pid_of(engine, part)
    actors = live_actors() - before
    call = engine.generate.remote([[5]], GREEDY.clone(max_tokens=100))
    stream = engine.stream.remote([6], GREEDY.clone(max_tokens=100))
    first = ray.get(next(stream))
    os.kill(pid, signal.SIGTERM)
    (output,) = ray.get(call)
    pieces = [first] + [ray.get(ref) for ref in stream]
    tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
    reasons = {output.outputs[0].finish_reason, pieces[-1].outputs[0].finish_reason}
    assert reasons == ({"length"} if timeout_s else {"abort"})
    assert len(tokens) == 100 if timeout_s else len(tokens) < 100
    assert tokens == expected_tokens([6], 100)[: len(tokens)]
    assert output.outputs[0].token_ids == expected_tokens([5], 100)[: len(output.outputs[0].token_ids)]
    if part == "EngineCore":
        with pytest.raises(EngineDeadError, match="shut down"):
            generate_until_it_fails(engine)
        actors.discard(engine._actor_id.hex())
    wait_until_dead(actors, within_s=60)
