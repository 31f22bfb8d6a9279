"""Messages of a chat in one canonical form: messages with the same meaning are equal.

Also parses tool calls in the text of an answer, in the format of Hermes and Qwen models:
``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, any number of them at the end of the
text. Any deviating text is content: a half-understood call would train the model on a call that it
did not make.
"""

import re
from typing import Any, Final

import msgspec

from offbeat.environments.text import read_arguments
from offbeat.messages.bad_json import DEEPEST, nesting_depth


class ToolCall(msgspec.Struct, frozen=True):
    """One tool call by the model."""

    id: str
    name: str
    arguments: str  # compact if it is JSON: see ``compact_json``


class ChatMessage(msgspec.Struct, frozen=True):
    """One message. A null or missing content is empty, and parts of text are joined."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""  # of an answer, if the bridge separates it from the content

    @property
    def characters(self) -> int:
        """Return the length of all its texts."""
        texts = (self.role, self.content, self.tool_call_id, self.name, self.reasoning)
        called = sum(
            len(each.id) + len(each.name) + len(each.arguments) for each in self.tool_calls
        )
        return sum(map(len, texts)) + called

    def for_template(self) -> dict[str, Any]:
        """Return the message in the form for chat templates, with tool arguments as objects."""
        fields: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id:
            fields["tool_call_id"] = self.tool_call_id
        if self.name:
            fields["name"] = self.name
        if self.reasoning:
            fields["reasoning_content"] = self.reasoning
        return fields


Tools = tuple[str, ...]
"""Definitions of tools, each as JSON with its fields in the client's order."""

NO_VARIABLES: Final = "{}"
"""No variables for the chat template (``chat_template_kwargs``), as JSON."""


def compact_json(text: str) -> str:
    """Return JSON without spaces, and other text unchanged.

    The order of keys stays, because a chat template shows it to the model.
    """
    try:
        return msgspec.json.encode(msgspec.json.decode(text)).decode()
    except (msgspec.DecodeError, RecursionError):
        return text


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


_OPENING: Final = "<tool_call>"
_CLOSING: Final = "</tool_call>"
_SPACE: Final = re.compile(r"\s*+")


class ParsedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call as the model wrote it."""

    name: str
    arguments: dict[str, Any]


def parse_tool_calls(text: str) -> tuple[str, tuple[ParsedCall, ...]]:
    """Split an answer into its content and its tool calls.

    Runs in linear time on any text, even if a model writes only opening tags.

    Returns:
        The text before the first call, and the calls. Without calls, or if anything about them is
        malformed, the whole text and no call. Malformed means: JSON, fields, types, an open tag,
        text between or after the calls, arguments nested deeper than ``DEEPEST``.
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
    """Return the call between two tags, or None if it is malformed."""
    try:
        call = msgspec.json.decode(block, type=ParsedCall, strict=True)
    except (msgspec.DecodeError, RecursionError):
        return None
    return call if call.name and is_flat_enough(call) else None


def is_flat_enough(call: ParsedCall) -> bool:
    """Return whether a chat template and the client can write the arguments of a call."""
    return nesting_depth(call.arguments) <= DEEPEST
