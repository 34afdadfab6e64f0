"""The compiler process: grammars come back compiled, and what hangs, crashes or explodes costs nobody else anything."""

from __future__ import annotations

import os
import pickle
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_actors.config import EngineConfig
from engine_actors.structured_output.compile_messages import CompileLimits
from engine_actors.structured_output.compiler import CompilerDiedError
from engine_actors.structured_output.xgrammar_backend import XGrammarBackend
from scheduler.structured_output import CompileTimeoutError, StructuredOutputError
from scheduler.structured_params import GrammarSpec, StructuredOutputsParams
from tests.engine_actors.structured_cases import make_tokenizer

WAIT_S = 120.0
"""For the process to load its libraries on a busy machine."""
VOCAB_SIZE = 300
"""Of the model: the tokenizer has 263 tokens."""


@pytest.fixture(scope="module")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vocabulary(tokenizer_dir: Path) -> dict[str, int]:
    from transformers import AutoTokenizer

    return dict(AutoTokenizer.from_pretrained(str(tokenizer_dir)).get_vocab())


@pytest.fixture(scope="module")
def backend(tokenizer_dir: Path, vocabulary: dict[str, int]) -> Iterator[XGrammarBackend]:
    limits = CompileLimits(cpu_s=2.0, timeout_s=5.0, memory_bytes=256 * 1024**2, num_workers=2, mask_cpu_s=0.02)
    backend = XGrammarBackend(str(tokenizer_dir), VOCAB_SIZE, [vocabulary["<eos>"]], limits=limits)
    yield backend
    backend.close()


def compile_(backend: XGrammarBackend, **params: Any) -> Future[Any]:
    return backend.compile(StructuredOutputsParams(**params).spec())


def matcher_of(backend: XGrammarBackend, stops: tuple[int, ...] = (), ignore_eos: bool = False, **params: Any) -> Any:
    return compile_(backend, **params).result(WAIT_S).new_matcher(stops, ignore_eos)


def allowed(matcher: Any) -> list[int]:
    mask = np.full((1, -(-VOCAB_SIZE // 32)), -1, dtype=np.int32)
    matcher.fill_bitmask(mask, 0)
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def workers_of(backend: XGrammarBackend) -> list[int]:
    process = backend._compiler._process
    assert process is not None
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def has_ended(descriptor: int) -> bool:
    """The process of a pidfd ends."""
    try:
        return bool(select.select([descriptor], [], [], WAIT_S)[0])
    finally:
        os.close(descriptor)


def test_a_grammar_allows_exactly_the_tokens_that_fit(backend: XGrammarBackend, vocabulary: dict[str, int]) -> None:
    matcher = matcher_of(backend, regex="abc?")
    assert allowed(matcher) == sorted(vocabulary[token] for token in ("a", "ab", "abc"))
    assert matcher.accept_tokens([vocabulary["a"], vocabulary["b"]]) == 2
    assert allowed(matcher) == sorted([vocabulary["c"], vocabulary["<eos>"]])
    assert not matcher.is_finished
    assert matcher.accept_tokens([vocabulary["c"], vocabulary["c"]]) == 1
    assert allowed(matcher) == [vocabulary["<eos>"]]
    assert matcher.is_finished


def test_a_stop_token_ends_the_text_where_it_may_end(backend: XGrammarBackend, vocabulary: dict[str, int]) -> None:
    eos, tool = vocabulary["<eos>"], vocabulary["<tool>"]
    matcher = matcher_of(backend, stops=(tool,), regex="a+")
    assert matcher.accept_tokens([eos]) == 0
    assert matcher.accept_tokens([vocabulary["a"]]) == 1
    assert allowed(matcher) == sorted([vocabulary["a"], eos, tool])
    assert matcher.accept_tokens([tool]) == 1
    assert matcher.is_finished
    assert matcher.accept_tokens([eos]) == 0
    assert len(allowed(matcher)) == VOCAB_SIZE  # nothing constrains what comes after the end


def test_a_stop_token_with_text_is_part_of_the_text(backend: XGrammarBackend, vocabulary: dict[str, int]) -> None:
    matcher = matcher_of(backend, stops=(vocabulary["b"],), regex="abc")
    assert matcher.accept_tokens([vocabulary["a"]]) == 1
    assert allowed(matcher) == sorted([vocabulary["b"], vocabulary["bc"]])


def test_the_process_loads_neither_torch_nor_ray(backend: XGrammarBackend) -> None:
    compile_(backend, regex="a").result(WAIT_S)
    process = backend._compiler._process
    assert process is not None
    libraries = Path(f"/proc/{process.pid}/maps").read_text()
    assert "libxgrammar" in libraries
    assert "libtorch" not in libraries
    assert "_raylet" not in libraries


def test_the_whole_xgrammar_package_can_be_imported_later() -> None:
    """A logits processor of the user's own may do so."""
    script = """
from engine_actors.structured_output import native
info = native.new_tokenizer_info([b"a", b"b", b""], [2])
import xgrammar
theirs = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(["a", "b", ""], stop_token_ids=[2]))
assert xgrammar.GrammarMatcher(theirs.compile_grammar('root ::= "ab"')).accept_token(0)
ours = native.compile_grammar(native.new_compiler(info), 'root ::= "b"', is_structural_tag=False)
assert native.accept_token(native.new_matcher(ours), 1)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)


def test_special_and_padded_ids_are_never_allowed(backend: XGrammarBackend, vocabulary: dict[str, int]) -> None:
    matcher = matcher_of(backend, regex=r"[\s\S]+")
    ids = allowed(matcher)
    assert vocabulary["<tool>"] not in ids
    assert vocabulary["<eos>"] not in ids
    assert max(ids) < len(vocabulary)
    assert len(ids) > 100


def test_ignore_eos_offers_no_stop_token_while_the_text_can_go_on(
    backend: XGrammarBackend, vocabulary: dict[str, int]
) -> None:
    matcher = matcher_of(backend, ignore_eos=True, regex="a{1,2}")
    matcher.accept_tokens([vocabulary["a"]])
    assert allowed(matcher) == [vocabulary["a"]]
    matcher.accept_tokens([vocabulary["a"]])
    assert matcher.is_finished
    assert allowed(matcher) == [vocabulary["<eos>"]]


def test_tokens_are_taken_back_and_tried(backend: XGrammarBackend, vocabulary: dict[str, int]) -> None:
    a, b, eos = (vocabulary[token] for token in ("a", "b", "<eos>"))
    matcher = matcher_of(backend, regex="ab*")
    assert matcher.validate_tokens([a, b, b, a]) == 3
    assert allowed(matcher) == sorted(vocabulary[token] for token in ("a", "ab"))
    matcher.accept_tokens([a, b, eos])
    assert matcher.is_finished
    matcher.rollback(2)
    assert not matcher.is_finished
    assert allowed(matcher) == sorted([b, eos])


@pytest.mark.parametrize(
    ("params", "error"),
    [
        ({"regex": "(?=a)"}, "lookahead"),
        ({"json": {"type": "array", "uniqueItems": True}}, "'uniqueItems' cannot be enforced"),
        ({"grammar": 'root ::= "a" root'}, "no finite text"),
        ({"regex": "((a{1,300}){1,300}){1,300}"}, "too ambiguous to match|did not compile within|more than 256 MiB"),
        ({"choice": [f"{number:06}" * 50 for number in range(1500)]}, "did not compile within|more than 256 MiB"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_and_explosive_grammars_are_refused(backend: XGrammarBackend, params: dict[str, Any], error: str) -> None:
    neighbour = compile_(backend, regex="ab")
    with pytest.raises(StructuredOutputError, match=error):
        compile_(backend, **params).result(WAIT_S)
    assert neighbour.result(WAIT_S).size_bytes > 0


def test_text_that_no_token_can_spell_is_refused(tmp_path: Path) -> None:
    """A vocabulary without most bytes."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "<eos>": 1}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(tmp_path)
    backend = XGrammarBackend(str(tmp_path), 2, [1])
    try:
        assert compile_(backend, regex="a+").result(WAIT_S)
        with pytest.raises(StructuredOutputError, match="no token of the vocabulary fits"):
            compile_(backend, regex="ab").result(WAIT_S)
    finally:
        backend.close()


def stopped_worker(backend: XGrammarBackend, regex: str) -> tuple[int, Future[Any]]:
    """A worker that has been stopped, and the job that it has been given."""
    compile_(backend, regex="a").result(WAIT_S)
    (worker, *_) = workers_of(backend)
    os.kill(worker, signal.SIGSTOP)
    future = compile_(backend, regex=regex)
    # Jobs are given out in order, each to the first idle worker. This one comes later and is done by another.
    assert compile_(backend, regex=f"after {regex}").result(WAIT_S)
    return worker, future


def test_compilations_give_way_to_running_requests(backend: XGrammarBackend) -> None:
    compile_(backend, regex="a").result(WAIT_S)
    assert all(os.sched_getscheduler(pid) == os.SCHED_IDLE for pid in workers_of(backend))


def test_a_compilation_that_is_stuck_is_ended_by_the_clock(backend: XGrammarBackend) -> None:
    _, stuck = stopped_worker(backend, "stuck")
    with pytest.raises(CompileTimeoutError, match="did not compile within 5 s"):
        stuck.result(WAIT_S)
    assert compile_(backend, regex="b").result(WAIT_S)


def test_a_grammar_that_crashes_its_compiler_fails_alone(backend: XGrammarBackend) -> None:
    worker, crashing = stopped_worker(backend, "crash")
    os.kill(worker, signal.SIGSEGV)
    os.kill(worker, signal.SIGCONT)
    with pytest.raises(StructuredOutputError, match=r"crash \(signal 11\)"):
        crashing.result(WAIT_S)
    assert compile_(backend, regex="b").result(WAIT_S)


def test_cancelling_stops_the_work(backend: XGrammarBackend) -> None:
    worker, stopped = stopped_worker(backend, "stopped")
    watched = os.pidfd_open(worker)
    assert stopped.cancel()
    assert has_ended(watched)


def test_when_the_process_dies_its_jobs_fail_and_the_next_starts_another(backend: XGrammarBackend) -> None:
    compile_(backend, regex="a").result(WAIT_S)
    process, reader = backend._compiler._process, backend._compiler._reader
    assert process is not None
    assert reader is not None
    os.kill(process.pid, signal.SIGSTOP)
    lost = compile_(backend, regex="lost")
    while not backend._compiler._sent:  # pytest's timeout is the limit
        time.sleep(0.001)
    process.kill()
    with pytest.raises(CompilerDiedError, match="ended with status -9"):
        lost.result(WAIT_S)
    reader.join(WAIT_S)
    assert compile_(backend, regex="b").result(WAIT_S)


def test_a_job_that_never_reached_a_process_goes_to_the_next(
    backend: XGrammarBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = backend._compiler
    compile_(backend, regex="a").result(WAIT_S)
    process, reader = compiler._process, compiler._reader
    assert process is not None
    assert reader is not None
    process.kill()
    process.wait()
    # What the writer finds in the moment before the reader has seen the end.
    running = compiler._running_process
    monkeypatch.setattr(compiler, "_running_process", lambda: process if compiler._process is None else running())
    see_the_end = compiler._see_the_process_end
    monkeypatch.setattr(compiler, "_see_the_process_end", lambda: (monkeypatch.undo(), see_the_end()))
    assert compile_(backend, regex="unsent").result(WAIT_S)


def test_workers_end_with_their_process(backend: XGrammarBackend) -> None:
    compile_(backend, regex="a").result(WAIT_S)
    process, reader = backend._compiler._process, backend._compiler._reader
    workers = workers_of(backend)
    assert workers
    assert process is not None
    assert reader is not None
    watched = [os.pidfd_open(pid) for pid in workers]
    process.kill()
    reader.join(WAIT_S)
    assert all(map(has_ended, watched))


def test_a_tokenizer_that_is_not_understood_refuses_every_grammar(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece(vocab={"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="[UNK]").save_pretrained(tmp_path)
    backend = XGrammarBackend(str(tmp_path), 2, [1])
    try:
        for _ in range(2):
            with pytest.raises(StructuredOutputError, match=r"not available: .*this one decodes by WordPiece"):
                compile_(backend, regex="a").result(WAIT_S)
    finally:
        backend.close()


def test_closing_cancels_what_is_pending_and_refuses_more(tokenizer_dir: Path) -> None:
    backend = XGrammarBackend(str(tokenizer_dir), VOCAB_SIZE, [3])
    pending = compile_(backend, regex="a")
    backend.close()
    backend.close()
    assert pending.cancelled()
    with pytest.raises(StructuredOutputError, match="shutting down"):
        compile_(backend, regex="b").result(WAIT_S)


@pytest.mark.parametrize("eos_token_ids", [[], [300], [-1]])
def test_end_of_sequence_ids_are_checked(eos_token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match=r"end-of-sequence|eos_token_ids has"):
        XGrammarBackend("unused", VOCAB_SIZE, eos_token_ids)


def test_every_kind_of_grammar_arrives(backend: XGrammarBackend) -> None:
    specs: list[dict[str, Any]] = [
        {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
        {"json_object": True},
        {"choice": ["x", "y"]},
        {"grammar": 'root ::= "(" root ")" | "."'},
        {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "v"}}},
    ]
    for future in [compile_(backend, **params) for params in specs]:
        assert future.result(WAIT_S).size_bytes > 0


def test_specs_are_checked_in_the_process_too(backend: XGrammarBackend) -> None:
    """Whoever sends a spec without checking it gets the same error."""
    with pytest.raises(StructuredOutputError, match=re.escape("json/type must be one or more of")):
        backend.compile(GrammarSpec("json", '{"type":"nonsense"}')).result(WAIT_S)


def test_grammars_need_no_torch_and_leave_it_to_be_imported() -> None:
    script = (
        "import sys\n"
        "from engine_actors.structured_output import native\n"
        "native.load()\n"
        "assert 'torch' not in sys.modules\n"
        "info = native.new_tokenizer_info([b'a', b'b', b''], [2])\n"
        "grammar = native.compile_grammar(native.new_compiler(info), 'root ::= \"a\"', is_structural_tag=False)\n"
        "import torch\n"
        "assert native.accept_token(native.new_matcher(grammar), 0) and torch.ones(2).sum() == 2\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_S)


def test_the_first_grammar_of_an_engine_core_loads_no_torch(random_llama_dir: Path) -> None:
    """Its streams would stand still for the seconds that takes."""
    script = (
        "import pickle, sys\n"
        "config = pickle.loads(sys.stdin.buffer.read())\n"
        "from engine_actors.structured_output.setup import make_manager\n"
        "make_manager(config, [1], lambda: None).close()\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    config = pickle.dumps(EngineConfig.from_kwargs(str(random_llama_dir)))
    done = subprocess.run([sys.executable, "-c", script], input=config, capture_output=True, check=True, timeout=WAIT_S)
    assert done.stdout.decode().strip() == "[]"
