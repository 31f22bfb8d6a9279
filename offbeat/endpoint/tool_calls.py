"""Tool calls in the text of an answer, in the format of Hermes and Qwen models.

``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them at the end of the
text. Whatever deviates is content: a half-understood call would train the model on a call that
nobody made.
"""

import re
from typing import Any, Final

import msgspec

_BLOCK: Final = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_OPENING: Final = "<tool_call>"


class ParsedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Split an answer into its content and its tool calls.

    Returns:
        The text in front of the first call and the calls; the whole text and no call if there is
        none, or if anything about them is malformed: JSON, fields, types, an open tag, text between
        or behind the calls.
    """
    start = text.find(_OPENING)
    if start < 0:
        return text, ()
    calls = text[start:]
    if _BLOCK.sub("", calls).strip():
        return text, ()
    try:
        parsed = [
            msgspec.json.decode(block, type=ParsedCall, strict=True)
            for block in _BLOCK.findall(calls)
        ]
    except (msgspec.DecodeError, RecursionError):
        return text, ()
    if not all(call.name for call in parsed):
        return text, ()
    return text[:start].rstrip(), tuple(parsed)
