"""Tokens to text, as they come: whole characters only, stop strings found wherever token borders fall.

One `Detokenizer` per completion, held by `engine_actors.output_processor`. Concatenated deltas equal decoding all
tokens at once. The tokenizers library's own DecodeStream is not used: it fails when a byte-fallback run turns out
invalid after part of it was emitted, and repeats the prompt's text when that ends inside a character. The window below
handles both for about 1 µs more per token.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

DecodeFn = Callable[[list[int]], str]

BROKEN = "\ufffd"
"""What decoders put where bytes are not (yet) a character."""
MAX_HELD_TOKENS = 64
"""Tokens held while their last character is incomplete; more than that is garbage, not a character to come."""
WINDOW_TOKENS = 12
"""Tokens of emitted text kept as left context before the window is cut."""
CONTEXT_TOKENS = 6
"""Left context kept then, and taken from the prompt at first. UTF-8 decoding falls into step within three bytes."""


class TokenDecoder:
    """How one tokenizer turns ids into text; shared by all requests with the same options.

    Attributes:
        decode: All ids to text, at once. Ids the tokenizer does not know decode to nothing.
        byte_token_ids: Tokens that stand for one raw byte each and decode to characters only as a whole run
            (SentencePiece byte fallback). Empty for byte-level vocabularies, whose bytes combine freely.
        skipped_token_ids: Special tokens that decode to nothing; a byte run goes on across them.
    """

    def __init__(
        self, tokenizer: Any, skip_special_tokens: bool = True, spaces_between_special_tokens: bool = True
    ) -> None:
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self.decode: DecodeFn
        self.byte_token_ids: frozenset[int] = frozenset()
        self.skipped_token_ids: frozenset[int] = frozenset()
        if backend is not None:
            self.decode = lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
            if "ByteFallback" in repr(backend.decoder):
                ids = (backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
                self.byte_token_ids = frozenset(i for i in ids if i is not None)
            if skip_special_tokens:
                added = backend.get_added_tokens_decoder()
                self.skipped_token_ids = frozenset(i for i, token in added.items() if token.special)
            return
        if skip_special_tokens:
            self.skipped_token_ids = frozenset(tokenizer.all_special_ids)
        self.decode = lambda ids: tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
            clean_up_tokenization_spaces=False,
        )
        vocabulary = tokenizer.get_vocab()
        tokens = (f"<0x{byte:02X}>" for byte in range(256))
        self.byte_token_ids = frozenset(vocabulary[t] for t in tokens if t in vocabulary)


class IncrementalDecoder:
    """The text of a growing token sequence.

    Keeps a window of tokens: `_num_emitted` whose text (`_emitted_text`) has gone out, then those held back.
    """

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int]) -> None:
        self._decode = decoder.decode
        self._byte_token_ids = decoder.byte_token_ids
        self._skipped_token_ids = decoder.skipped_token_ids
        self._window = self._context_of(prompt_token_ids)
        self._num_emitted = len(self._window)
        # A prompt may end inside a character; its broken end is then not yet emitted, and if the output does not
        # complete it, it is the prompt's text, not the output's.
        self._emitted_text, self._num_broken_in_prompt = self._split_prompt(self._window)

    def _context_of(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """The prompt's last tokens: enough that they decode to something, so that leading spaces come out right."""
        size = CONTEXT_TOKENS
        while True:
            context = list(prompt_token_ids[-size:])
            if len(context) == len(prompt_token_ids) or self._decode(context).strip(BROKEN + " "):
                return context
            size *= 4

    def _split_prompt(self, context: list[int]) -> tuple[str, int]:
        """The prompt's text up to its last whole character, and how many broken ones come after it."""
        text = self._decode(context) if context else ""
        if text.endswith(BROKEN) and context[-1] in self._byte_token_ids:
            # One incomplete character breaks all of a byte run, so the text before it shows only without it.
            for num_broken in range(1, min(4, len(context))):
                before = self._decode(context[:-num_broken])
                if not before.endswith(BROKEN):
                    return before, num_broken
        whole = text.rstrip(BROKEN)
        return whole, len(text) - len(whole)

    def push(self, token_ids: Sequence[int]) -> str:
        """Append tokens; the text that is now certain. Empty while a character is incomplete."""
        window = self._window
        window.extend(token_ids)
        num_held = len(window) - self._num_emitted
        if num_held < MAX_HELD_TOKENS and self._byte_token_ids and self._ends_in_byte_run():
            return ""
        text = self._decode(window)
        if not text.endswith(BROKEN):
            return self._emit(text, len(window))
        if num_held < MAX_HELD_TOKENS:
            return ""
        for cut in range(len(window) - 1, len(window) - 4, -1):
            text_before = self._decode(window[:cut])
            if not text_before.endswith(BROKEN):
                return self._emit(text_before, cut)
        # Bytes that never make a character. Only the last broken one can still change.
        new = self._new_part(text[:-1])
        del window[:-CONTEXT_TOKENS]
        self._num_emitted = 0
        self._emitted_text = self._decode(window)[:-1]
        return new

    def _ends_in_byte_run(self) -> bool:
        for token_id in reversed(self._window):
            if token_id not in self._skipped_token_ids:
                return token_id in self._byte_token_ids
        return False

    def flush(self) -> str:
        """The end: the text held back, broken or not."""
        if len(self._window) == self._num_emitted:
            return ""
        return self._emit(self._decode(self._window), len(self._window))

    def _emit(self, text: str, num_tokens: int) -> str:
        """`text` is what the first `num_tokens` of the window decode to; all of it is emitted now."""
        new = self._new_part(text)
        self._num_emitted, self._emitted_text = num_tokens, text
        if num_tokens > WINDOW_TOKENS and self._window[num_tokens - 1] in self._byte_token_ids:
            # A byte run is valid or not as a whole: context that began inside it would spoil what follows.
            del self._window[:num_tokens]
            self._num_emitted, self._emitted_text = 0, ""
        elif num_tokens > WINDOW_TOKENS:
            start = num_tokens - CONTEXT_TOKENS
            context = self._decode(self._window[start:num_tokens])
            if context.strip(BROKEN + " "):
                del self._window[:start]
                self._num_emitted, self._emitted_text = CONTEXT_TOKENS, context
        return new

    def _new_part(self, text: str) -> str:
        if not text.startswith(self._emitted_text):
            # The decoder changed what is out already (e.g. a long byte-fallback run turned out invalid).
            # Emitted text cannot be taken back; go on from the same length.
            return text[len(self._emitted_text) :]
        new = text[len(self._emitted_text) :]
        if self._num_broken_in_prompt and new:
            prompts_own = new[: self._num_broken_in_prompt]
            new = new[len(prompts_own) - len(prompts_own.lstrip(BROKEN)) :]
            self._num_broken_in_prompt = 0
        return new


class StopStrings:
    """Finds the stop string that is complete first, and tells how much of the text must be held back for one.

    The result does not depend on how the text arrives in pieces: of all occurrences the one that ends first counts, and
    of those ending together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = frozenset(stops)
        self._in_order = sorted(self._stops)
        self._lengths = sorted({len(stop) for stop in stops}, reverse=True)
        self._first_chars = {stop[0] for stop in stops}

    def find(self, text: str, start: int) -> tuple[int, str] | None:
        """(position, stop) of the first occurrence that ends after `text[:start]`."""
        # A few characters are new at a time, and stop strings may be many.
        for end in range(start + 1, len(text) + 1):
            for length in self._lengths:
                if length <= end and text[end - length : end] in self._stops:
                    return end - length, text[end - length : end]
        return None

    def num_held(self, text: str) -> int:
        """Length of the longest end of `text` that could be the beginning of a stop string."""
        stops = self._in_order
        for size in range(min(self._lengths[0] - 1, len(text)), 0, -1):
            if text[-size] not in self._first_chars:
                continue
            tail = text[-size:]
            # Of the strings after `tail` in order, those that begin with it come first.
            after = bisect.bisect_right(stops, tail)
            if after < len(stops) and stops[after].startswith(tail):
                return size
        return 0


class Detokenizer:
    """One completion's text, with stop strings.

    `text` grows by `push`; a caller that streams takes `take_delta`, which leaves back what may become a stop string.

    Attributes:
        text: Everything decoded so far, cut at the stop string once `stop` is set.
        stop: The stop string found.
    """

    def __init__(
        self,
        decoder: TokenDecoder,
        prompt_token_ids: Sequence[int],
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._decoder = IncrementalDecoder(decoder, prompt_token_ids)
        self._stops = StopStrings(stops) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._pieces: list[str] = []
        self._text = ""
        self._num_taken = 0
        self.stop: str | None = None

    @property
    def text(self) -> str:
        if self._pieces:
            self._text += "".join(self._pieces)
            self._pieces.clear()
        return self._text

    @property
    def needs_each_token(self) -> bool:
        """Whether a stop string may end the text, so that tokens must be pushed one by one as they come."""
        return self._stops is not None

    def push(self, token_ids: Sequence[int]) -> int:
        """Append tokens; how many were used (fewer than given when a stop string ended the text)."""
        if self._stops is None:
            self._pieces.append(self._decoder.push(token_ids))
            return len(token_ids)
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            self._append(self._decoder.push([token_id]))
            if self.stop is not None:
                return count
        return len(token_ids)

    def finish(self) -> None:
        """No more tokens: decode what was held back. May find a stop string in it."""
        if self.stop is None:
            self._append(self._decoder.flush())
        self._stops = None

    def take_delta(self) -> str:
        """Text not taken yet, except an end that may turn into a stop string."""
        text = self.text
        end = len(text)
        if self._stops is not None and self.stop is None and not self._include_stop:
            end -= self._stops.num_held(text)
        delta = text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return delta

    def text_so_far(self) -> str:
        """Everything `take_delta` has given or would give."""
        text = self.text
        if self._stops is not None and self.stop is None and not self._include_stop:
            return text[: len(text) - self._stops.num_held(text)]
        return text

    def _append(self, piece: str) -> None:
        if not piece:
            return
        self._pieces.append(piece)
        if self._stops is None or self._num_tokens <= self._min_tokens:
            return
        text = self.text
        found = self._stops.find(text, len(text) - len(piece))
        if found is not None:
            position, self.stop = found
            self._text = text[: position + (len(self.stop) if self._include_stop else 0)]
