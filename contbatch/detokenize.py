"""Token ids to text, piece by piece, for streaming.

Two things make a stream of text harder than decoding a list of tokens. A character may be spread over several
tokens, so text is given out only once its bytes are whole. And text must not be given out while it could still
turn into a stop string: the longest tail that begins a stop string is held back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Decoder(Protocol):
    """The part of a tokenizer that streaming needs."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens; bytes that are not whole characters show as U+FFFD."""
        ...


class IncrementalDetokenizer:
    """Turns the tokens of one request into text that is never taken back.

    Args:
        decoder: the tokenizer; None gives no text at all.
        stop: the text ends before the first of these that appears.
    """

    def __init__(self, decoder: Decoder | None, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = tuple(stop)
        self._token_ids: list[int] = []
        self._prefix = 0
        self._read = 0
        self._held = ""
        self.text = ""
        """All text given out so far."""
        self.stopped = False
        """True once a stop string was found."""

    def feed(self, token_id: int) -> str:
        """Take one token; returns the text that can be given out now (often "")."""
        if self._decoder is None or self.stopped:
            return ""
        self._token_ids.append(token_id)
        before = self._decoder.decode(self._token_ids[self._prefix : self._read])
        after = self._decoder.decode(self._token_ids[self._prefix :])
        if len(after) <= len(before) or after.endswith("\ufffd"):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return self._release(self._held + after[len(before) :])

    def flush(self) -> str:
        """The request ended: give out what was held back, incomplete characters as U+FFFD."""
        if self._decoder is None or self.stopped:
            return ""
        before = self._decoder.decode(self._token_ids[self._prefix : self._read])
        rest = self._decoder.decode(self._token_ids[self._prefix :])[len(before) :]
        self._prefix = self._read = len(self._token_ids)
        text = self._cut(self._held + rest)
        self._held = ""
        self.text += text
        return text

    def _release(self, text: str) -> str:
        """Give out `text` but for a stop string and a tail that could become one."""
        cut = self._cut(text)
        keep = 0 if self.stopped else self._tail(cut)
        self._held = cut[len(cut) - keep :]
        released = cut[: len(cut) - keep]
        self.text += released
        return released

    def _cut(self, text: str) -> str:
        found = [text.find(stop) for stop in self._stop if stop in text]
        if not found:
            return text
        self.stopped = True
        return text[: min(found)]

    def _tail(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        lengths = range(min(len(text), max(map(len, self._stop), default=1) - 1), 0, -1)
        return next((n for n in lengths if any(s.startswith(text[-n:]) for s in self._stop)), 0)
