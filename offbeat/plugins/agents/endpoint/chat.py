"""Messages of a chat in one canonical form: two that say the same are equal."""

from typing import Any, Final

import msgspec

from offbeat.environments.text import read_arguments


class ToolCall(msgspec.Struct, frozen=True):
    """One call of a tool by the model."""

    id: str
    name: str
    arguments: str  # compact where it is JSON: see ``compact_json``


class ChatMessage(msgspec.Struct, frozen=True):
    """One message; a content that is null or missing is empty, parts of text are joined."""

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""  # of an answer, where the bridge reads it apart from the content

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates expect it: arguments of tools as objects."""
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
"""Definitions of tools, each as JSON in the order in which the client wrote its fields."""

NO_VARIABLES: Final = "{}"
"""Variables that a request gives the chat template (``chat_template_kwargs``), as JSON: none."""


def compact_json(text: str) -> str:
    """Return JSON without spaces; text that is no JSON as it is.

    The order of keys stays: a chat template shows it to the model.
    """
    try:
        return msgspec.json.encode(msgspec.json.decode(text)).decode()
    except (msgspec.DecodeError, RecursionError):
        return text


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": read_arguments(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
