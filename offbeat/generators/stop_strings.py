"""Finds the token that completes a stop string in a sample's text.

An engine ends a sample at that token and keeps all drawn tokens, so the trainer gets exactly the
sampled tokens. Code that shows the text cuts it before the stop string (``text_before_stop``).
"""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""

_UNFINISHED: Final = "\ufffd"
_LONGEST_HELD: Final = 8
"""Maximum tokens held back. A character has at most 4 bytes; more held tokens are invalid UTF-8."""


class TextStream:
    """Text of tokens that arrive one by one.

    The pieces, joined, are the text of all tokens. A character with bytes in several tokens is held
    back until it is complete. Each piece is decoded after the tokens of the previous piece, because
    some tokenizers write a space only between two tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self.held_text = ""
        """Text of the held tokens, up to the incomplete character."""
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Add a token and return the text that it completes."""
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        piece = text[len(self._context_text) :]
        is_unfinished = text.endswith(_UNFINISHED)
        if is_unfinished and len(self._pending) < _LONGEST_HELD:
            self.held_text = piece.rstrip(_UNFINISHED)
            return ""
        self.held_text = ""
        if is_unfinished:  # its bytes must not join the bytes of later tokens
            self._context, self._context_text = [], ""
        elif piece:  # a token without text is not context
            self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        return piece


class StopMatcher:
    """Searches the text of one sample for its stop strings.

    The cost per token does not grow with the sample. Only the last piece's tokens and the tokens
    after it are decoded, at most twice ``_LONGEST_HELD``. Of the earlier text, only the end is
    kept: one character less than the longest stop string. A stop string that began further back
    would have been found before.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._stream, self._stop = TextStream(decode), tuple(stop)
        self._reach = max(map(len, self._stop)) - 1
        self._tail = ""  # end of the text so far, which may contain a started stop string

    def push(self, token: int) -> bool:
        """Add the next token and return whether the text now contains a stop string."""
        text = self._tail + self._stream.push(token)
        self._tail = text[max(len(text) - self._reach, 0) :]
        seen = text + self._stream.held_text
        return any(each in seen for each in self._stop)


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text before the stop string that ends first, or all text if there is none.

    If two stop strings end at the same place, the longer one is cut off.
    """
    found = ((text.find(each), len(each)) for each in stop)
    ends = [(start + length, start) for start, length in found if start >= 0]
    return text[: min(ends)[1]] if ends else text
