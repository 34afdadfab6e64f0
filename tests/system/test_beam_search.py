"""Beam search finds the sequences of transformers' generate, with their scores."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import LLM, BeamSearchParams
from engine_actors.errors import InvalidRequestError
from tests.fakes import CONFIG, EOS, byte_level_tokenizer

PROMPTS = [[(37 * i) % 500 + 2 for i in range(length)] for length in (5, 16, 40)]


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "initializer_range": 0.2, "tie_word_embeddings": False}))
    with torch.no_grad():
        model.lm_head.weight[EOS] = model.lm_head.weight[100] * 2.5  # Likely enough to end some beams.
    model.save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def llm(llama_dir: Path) -> Iterator[LLM]:
    with LLM(
        str(llama_dir), dtype="float32", num_gpu_blocks_override=200, torch_num_threads=1,
        engine_core="inproc", distributed_executor_backend="uni",
    ) as engine:  # fmt: skip
        yield engine


@pytest.mark.parametrize(
    ("width", "options"),
    [(4, {}), (1, {}), (3, {"length_penalty": 0.2}), (5, {"length_penalty": 2.0}), (4, {"ignore_eos": True}), (30, {})],
)
def test_sequences_and_scores_are_those_of_transformers(
    llama_dir: Path, llm: LLM, width: int, options: dict[str, Any]
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    params = BeamSearchParams(beam_width=width, max_tokens=12, include_stop_str_in_output=True, **options)
    found = llm.beam_search(PROMPTS, params)
    ended = set()
    for prompt, output in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        model.generation_config.eos_token_id = None if params.ignore_eos else EOS
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width, max_new_tokens=12,
            do_sample=False, length_penalty=params.length_penalty, early_stopping=False, pad_token_id=0,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        assert len(output.sequences) == width
        for index, sequence in enumerate(output.sequences):
            tokens = expected.sequences[index].tolist()
            assert sequence.tokens == tokens[: len(sequence.tokens)]
            assert set(tokens[len(sequence.tokens) :]) <= {0, EOS}  # Padding.
            if width > 1:
                assert sequence.score == pytest.approx(expected.sequences_scores[index].item(), abs=1e-4)
            generated = sequence.tokens[len(prompt) :]
            pairs = zip(sequence.logprobs, generated, strict=True)
            assert sequence.cum_logprob == pytest.approx(sum(p[token].logprob for p, token in pairs), abs=1e-4)
            assert sequence.finish_reason == (
                "stop" if sequence.tokens[-1] == EOS and not params.ignore_eos else "length"
            )
            ended.add(sequence.finish_reason)
    if width >= 4:
        assert ended == ({"length"} if params.ignore_eos else {"stop", "length"})


def test_text_prompts_limits_and_the_end_token(llm: LLM) -> None:
    whole = llm.beam_search(["The fox", "naïve"], BeamSearchParams(beam_width=3, max_tokens=6))
    one_by_one = llm.beam_search(
        ["The fox", "naïve"], BeamSearchParams(beam_width=3, max_tokens=6), concurrency_limit=1
    )
    for output, other in zip(whole, one_by_one, strict=True):
        assert [(s.tokens, s.text) for s in output.sequences] == [(s.tokens, s.text) for s in other.sequences]
    assert all(s.text.startswith("The fox") and EOS not in s.tokens for s in whole[0].sequences)
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.beam_search([[]], BeamSearchParams(beam_width=2, max_tokens=6))


@pytest.mark.parametrize(
    "options", [{"beam_width": 0}, {"max_tokens": 0}, {"temperature": 0.7}, {"length_penalty": float("nan")}]
)
def test_wrong_parameters_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        BeamSearchParams(**{"beam_width": 2, "max_tokens": 2, **options})
