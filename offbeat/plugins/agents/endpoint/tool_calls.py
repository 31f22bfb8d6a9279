"""Tool calls in the text of an answer, in the format of Hermes and Qwen models.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them at the end of the
text. Whatever deviates is content: a half-understood call would train the model on a call that
nobody made.
"""

import re
from typing import Any, Final

import msgspec

from offbeat.messages.nesting import DEEPEST, nesting_depth

_OPENING: Final = "<tool_call>"
_CLOSING: Final = "</tool_call>"
_SPACE: Final = re.compile(r"\s*+")


class ParsedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Split an answer into its content and its tool calls.

    It takes linear time on any text: a model may write nothing but opening tags.

    Returns:
        The text in front of the first call and the calls; the whole text and no call if there is
        none, or if anything about them is malformed: JSON, fields, types, an open tag, text between
        or behind the calls, arguments nested deeper than ``DEEPEST``.
    """
    start = at = text.find(_OPENING)
    if start < 0:
        return text, ()
    calls = list[ParsedCall]()
    while at < len(text):
        end = text.find(_CLOSING, at)
        if end < 0 or not text.startswith(_OPENING, at):
            return text, ()
        call = _call_in(text[at + len(_OPENING) : end])
        if call is None:
            return text, ()
        calls.append(call)
        behind = _SPACE.match(text, end + len(_CLOSING))
        at = len(text) if behind is None else behind.end()
    return text[:start].rstrip(), tuple(calls)


def _call_in(block: str) -> ParsedCall | None:
    """Return the call that stands between two tags; None if it is malformed."""
    try:
        call = msgspec.json.decode(block, type=ParsedCall, strict=True)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call if call.name and is_flat_enough(call) else None


def is_flat_enough(call: ParsedCall) -> bool:
    """Return whether a chat template, and the client, can write the arguments of a call."""
    return nesting_depth(call.arguments) <= DEEPEST
