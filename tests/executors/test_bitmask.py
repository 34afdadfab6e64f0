"""Grammar masks on logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import executors.bitmask
from executors.bitmask import apply_bitmask


def random_mask(num_masks: int, vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_masks + vocab_size)
    words = torch.randint(-(2**31), 2**31, (num_masks, -(-vocab_size // 32)), generator=generator)
    return words.to(torch.int32)


def allowed(mask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.tensor(
        [[(int(row[token // 32]) >> token % 32) & 1 == 1 for token in range(vocab_size)] for row in mask]
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 1000])
def test_forbidden_tokens_become_minus_infinity_and_others_stay(vocab_size: int, dtype: torch.dtype) -> None:
    logits, mask = torch.randn(3, vocab_size).to(dtype), random_mask(3, vocab_size)
    expected = logits.masked_fill(~allowed(mask, vocab_size), float("-inf"))
    apply_bitmask(logits, mask)
    assert torch.equal(logits, expected)


def test_only_the_rows_named_are_masked() -> None:
    logits, mask = torch.randn(5, 70), random_mask(2, 70)
    expected = logits.clone()
    expected[[4, 1]] = expected[[4, 1]].masked_fill(~allowed(mask, 70), float("-inf"))
    apply_bitmask(logits, mask, torch.tensor([4, 1]))
    assert torch.equal(logits, expected)


def test_fewer_masks_than_rows_go_to_the_first_rows() -> None:
    logits = torch.zeros(3, 40)
    apply_bitmask(logits, torch.zeros(1, 2, dtype=torch.int32))
    assert logits.isinf().any(1).tolist() == [True, False, False]


def test_rows_done_in_chunks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, mask = torch.randn(7, 100), random_mask(7, 100)
    expected, chunked, by_rows = logits.clone(), logits.clone(), logits.clone()
    apply_bitmask(expected, mask)
    monkeypatch.setattr(executors.bitmask, "_MAX_BYTES_AT_ONCE", 256)
    apply_bitmask(chunked, mask)
    apply_bitmask(by_rows, mask, torch.arange(7))
    assert torch.equal(chunked, expected)
    assert torch.equal(by_rows, expected)


def test_table_of_other_devices_agrees_with_unpacking() -> None:
    mask = random_mask(2, 64)
    table = executors.bitmask._forbidden_by_byte(mask.device)
    by_table = table[mask.view(torch.uint8).to(torch.int64)].view(torch.bool)
    bits = np.unpackbits(mask.view(torch.uint8).numpy(), axis=1, bitorder="little")
    assert torch.equal(by_table, torch.from_numpy(bits == 0))
    assert torch.equal(by_table, executors.bitmask._unpack_forbidden(mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_kept_logits_keep_their_bits_and_others_are_minus_infinity_even_from_nan(dtype: torch.dtype) -> None:
    logits = torch.tensor([[-0.0, float("nan"), float("nan"), float("-inf"), 3.0, float("inf"), 7.0]], dtype=dtype)
    masked = logits.clone()
    apply_bitmask(masked, torch.tensor([[0b0011011]], dtype=torch.int32))
    kept = [0, 1, 3, 4]
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[logits.element_size()]
    assert torch.equal(masked[0, kept].view(integers), logits[0, kept].view(integers))
    assert masked[0, [2, 5, 6]].tolist() == [float("-inf")] * 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_masks_alike() -> None:
    logits, mask = torch.randn(3, 1000), random_mask(3, 1000)
    on_gpu = logits.cuda()
    apply_bitmask(logits, mask)
    apply_bitmask(on_gpu, mask.cuda(), torch.arange(3, device="cuda"))
    assert torch.equal(on_gpu.cpu(), logits)


@pytest.mark.parametrize(("num_rows", "num_masks", "num_words"), [(2, 2, 3), (2, 2, 5), (1, 2, 4)])
def test_masks_that_do_not_fit_are_refused(num_rows: int, num_masks: int, num_words: int) -> None:
    with pytest.raises(ValueError, match=r"does not fit|do not fit"):
        apply_bitmask(torch.zeros(num_rows, 100), torch.zeros(num_masks, num_words, dtype=torch.int32))
