"""Finds the token with which a sample's text completes a stop string.

An engine ends a sample at that token and keeps every token that was drawn: what is trained is what
was sampled. Whoever shows the text cuts it in front of the stop string (``text_before_stop``).
"""

from collections.abc import Callable, Sequence
from typing import Final

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens included."""

_UNFINISHED: Final = "\ufffd"
_LONGEST_HELD: Final = 8
"""Tokens held back at most. A character has four bytes: more tokens than this are not valid UTF-8."""


class TextStream:
    """Text of tokens that arrive one by one.

    The pieces join to the text of all tokens, also where a character's bytes are spread over tokens:
    such a character is held back until it is whole. Each piece is decoded behind the tokens of the
    piece before, because some tokenizers write a space only between two tokens.
    """

    def __init__(self, decode: Decode) -> None:
        self.held_text = ""
        """Text of the tokens that are held back, up to the character that is not whole."""
        self._decode = decode
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """Return the text that is whole now and was not before."""
        self._pending.append(token)
        text = self._decode([*self._context, *self._pending])
        piece = text[len(self._context_text) :]
        is_unfinished = text.endswith(_UNFINISHED)
        if is_unfinished and len(self._pending) < _LONGEST_HELD:
            self.held_text = piece.rstrip(_UNFINISHED)
            return ""
        self.held_text = ""
        if is_unfinished:  # its bytes must not join those of what follows
            self._context, self._context_text = [], ""
        elif piece:  # a token without text is no context
            self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        return piece


class StopMatcher:
    """Watches the text of one sample for its stop strings.

    A token costs the same at any length of the sample. Only the tokens since the last piece of text
    and those of that piece are decoded, at most twice ``_LONGEST_HELD``. Of the text before them, one
    character less than the longest stop string is kept: a string with more of it would be complete.
    """

    def __init__(self, decode: Decode, stop: Sequence[str]) -> None:
        self._stream, self._stop = TextStream(decode), tuple(stop)
        self._reach = max(map(len, self._stop)) - 1
        self._tail = ""  # the end of the text so far, in which a stop string may have begun

    def push(self, token: int) -> bool:
        """Take the next token; True if the text up to it contains a stop string."""
        text = self._tail + self._stream.push(token)
        self._tail = text[max(len(text) - self._reach, 0) :]
        seen = text + self._stream.held_text
        return any(each in seen for each in self._stop)


def text_before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text in front of the stop string that is complete first; all of it without one.

    Of two that are complete at the same place, the longer one is cut off.
    """
    found = ((text.find(each), len(each)) for each in stop)
    ends = [(start + length, start) for start, length in found if start >= 0]
    return text[: min(ends)[1]] if ends else text
