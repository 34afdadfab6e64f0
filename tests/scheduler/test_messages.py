"""What goes over the wire: small, self-describing, and by client."""

from __future__ import annotations

import msgspec

from scheduler.output import EngineCoreOutputs, SchedulerOutput, unpack_int32
from tests.scheduler.harness import Harness


def test_a_steady_decode_step_costs_four_bytes_a_request_each_way() -> None:
    harness = Harness(max_num_seqs=64, max_num_batched_tokens=512, block_size=16, num_blocks=500)
    for index in range(64):
        harness.add(range(index, index + 5), max_tokens=40)
    harness.step()
    message = harness.schedule()
    assert message is not None
    encoded = msgspec.msgpack.encode(message)
    assert len(encoded) <= 4 * 64 + 16
    _, result, _, _ = harness.in_flight[0]
    assert len(msgspec.msgpack.encode(result)) <= 4 * 64 + 16
    harness.update()
    harness.run()


def test_only_appended_blocks_are_sent() -> None:
    harness = Harness(block_size=4, group_windows=(None, 6))
    harness.add(range(6), max_tokens=8)
    harness.step()
    appended = []
    while harness.scheduler.has_requests():
        message = harness.step()
        if message is not None:
            appended.append([(list(unpack_int32(new.rows)), len(unpack_int32(new.block_ids)))
                             for new in message.new_blocks])  # fmt: skip
    # Positions 8 and 12 begin a block in each of the two groups.
    assert [len(new) for new in appended] == [0, 0, 2, 0, 0, 0, 2]
    assert all(rows == [0] and count == 1 for new in appended for rows, count in new)


def test_messages_survive_the_wire() -> None:
    harness = Harness(group_windows=(None, 6), depth=2)
    for _ in range(3):
        harness.add(range(9), eos=(1, 2), min_tokens=2, stop_token_ids=[7])
    harness.run()
    decoder = msgspec.msgpack.Decoder(SchedulerOutput)
    for message in harness.messages:
        assert decoder.decode(msgspec.msgpack.encode(message)) == message


def test_a_new_request_brings_everything_a_worker_needs() -> None:
    harness = Harness(block_size=4)
    harness.add(range(4), max_tokens=1)
    harness.run()
    request = harness.add(range(10), "again", seed=77)
    message = harness.schedule()
    assert message is not None
    (new,) = message.new_requests
    assert (new.request_id, new.row, new.num_prompt_tokens, new.num_computed_tokens) == (request, 0, 10, 4)
    assert list(unpack_int32(new.token_ids)) == list(range(10))
    assert [len(unpack_int32(table)) for table in new.block_ids] == [3]
    assert new.sampling_params.seed == 77
    harness.update()
    harness.run()


def test_each_client_gets_its_own_requests() -> None:
    harness = Harness()
    for index in range(6):
        harness.add(range(index, index + 4), client_index=index % 3, max_tokens=1 + index)
    harness.schedule()
    outputs = harness.update()
    assert {client: output.request_ids for client, output in outputs.items()} == {
        0: ["0", "3"], 1: ["1", "4"], 2: ["2", "5"]
    }  # fmt: skip
    assert [finished.request_id for finished in outputs[0].finished] == ["0"]
    assert [[events.request_id for events in outputs[client].started] for client in range(3)] == [
        ["0", "3"], ["1", "4"], ["2", "5"]
    ]  # fmt: skip
    assert sum(output.stats is not None for output in outputs.values()) == 1
    harness.run()


def test_a_step_that_samples_nothing_tells_clients_nothing() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(range(20))
    harness.schedule()
    assert harness.update() == {}
    harness.run()


def test_events_are_sent_once_with_the_times_of_the_request() -> None:
    harness = Harness(max_num_seqs=1, max_num_batched_tokens=8)
    harness.now_s = 10.0
    harness.add(range(3), max_tokens=1)
    harness.now_s = 11.0
    harness.add(range(3), max_tokens=3)
    harness.now_s = 12.0
    harness.step()
    harness.now_s = 13.0
    harness.schedule()
    harness.now_s = 14.0
    outputs = harness.update()
    (output,) = outputs.values()
    assert output.timestamp_s == 14.0
    (events,) = output.started
    assert (events.request_id, events.queued_s, events.scheduled_s) == ("1", 11.0, 13.0)
    harness.schedule()
    (output,) = harness.update().values()
    assert output.started == []
    harness.run()


def test_the_first_token_is_an_event_even_when_the_last_piece_of_the_prompt_is_one_token() -> None:
    harness = Harness(max_num_batched_tokens=8)
    harness.add(range(17), max_tokens=2)
    harness.run()
    assert harness.sent["0"].events is not None


def test_stats_are_gauges_and_counters_since_the_last_report() -> None:
    harness = Harness(block_size=4, num_blocks=1 + 20, max_num_seqs=2, caching=True)
    for _ in range(3):
        harness.add(range(8), max_tokens=4)
    harness.schedule()
    ((output),) = harness.update().values()
    stats = output.stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.num_scheduled_tokens) == (2, 1, 8 + 4)
    assert stats.kv_cache_usage == 3 / 20  # two blocks, one of them shared
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits, stats.num_preemptions) == (16, 4, 0)
    harness.schedule()
    ((output),) = harness.update().values()
    stats = output.stats
    assert stats is not None
    assert (stats.num_scheduled_tokens, stats.prefix_cache_queries) == (2, 0)
    harness.run()


def test_outputs_are_columns_of_the_wire_type() -> None:
    harness = Harness()
    harness.add(range(4), max_tokens=2)
    harness.schedule()
    (output,) = harness.update().values()
    assert output.num_tokens == []
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(output), type=EngineCoreOutputs)
    assert decoded == output
    harness.run()
