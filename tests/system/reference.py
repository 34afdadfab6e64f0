"""What transformers says: greedy tokens of SmolLM2 in float32, one prompt at a time. Cached between runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from engine_actors.fetch_model import cache_dir

ROOT = Path(__file__).parent.parent.parent
PROMPT_LENGTHS = (
    *(1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129),
    *(200, 255, 256, 257, 300, 400, 500, 511, 512, 513, 600, 700, 850, 900),
)
"""30 lengths, on both sides of every block boundary that matters."""
MAX_TOKENS = 64
QUICK_LENGTHS = (1, 2, 16, 17, 33, 64, 129, 257, 513)
QUICK_MAX_TOKENS = 40
"""What `make test` runs of it; `make soak` runs all."""


def mixed_prompts(tokenizer_dir: Path, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[list[int]]:
    """Real English of each of `lengths`, no two with a common beginning."""
    from transformers import AutoTokenizer

    text = (ROOT / "LICENSE").read_text()
    ids = AutoTokenizer.from_pretrained(tokenizer_dir)(text)["input_ids"]
    return [ids[37 * i : 37 * i + length] for i, length in enumerate(lengths)]


def greedy_reference(model_dir: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """`generate` of transformers in float32 for each prompt alone, EOS ignored."""
    import torch
    import transformers

    key = hashlib.sha256(
        json.dumps([prompts, max_tokens, torch.__version__, transformers.__version__]).encode()
        + (model_dir / "engine-actors-manifest.json").read_bytes()
    ).hexdigest()
    cached = cache_dir() / "test-references" / f"{key}.json"
    if cached.exists():
        tokens: list[list[int]] = json.loads(cached.read_text())
        return tokens
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # go on past EOS without masking it
    tokens = []
    with torch.inference_mode():
        for prompt in prompts:
            ids = torch.tensor([prompt])
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                pad_token_id=0,
            )
            tokens.append(out[0, len(prompt) :].tolist())
    cached.parent.mkdir(parents=True, exist_ok=True)
    cached.write_text(json.dumps(tokens))
    return tokens
