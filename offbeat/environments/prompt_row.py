"""Names the fields of a row that make its prompt, and checks their values.

``prompt`` is a text. ``messages`` is a conversation, which the chat template renders with the
``tools`` and the ``chat_template_kwargs`` of the row.

The module also looks up columns that recipes name, and answers for graders.
"""

from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec

ASSISTANT: Final = "assistant"
_ROLES: Final = ("system", "developer", "user", ASSISTANT, "tool", "ipython", "observation")
_OTHER_NAMES: Final = {"human": "user", "gpt": ASSISTANT, "model": ASSISTANT, "function": "tool"}

OF_MESSAGES: Final[Mapping[str, type]] = {"tools": list, "chat_template_kwargs": dict}
"""Fields that the chat template renders together with ``messages``, and their types."""

_UNSHOWN: Final = ("system", "system_prompt", "video", "videos", "audio", "audios")
"""Fields with which other libraries change a prompt. Here they would have no effect."""


def of_messages(row: Mapping[str, object], key: str) -> Any:  # noqa: ANN401 - as the template takes it
    """Return a field of ``OF_MESSAGES``, or None if it is missing or empty.

    Parquet has one type per column, so data sets store tool definitions as JSON text.
    """
    value = row.get(key)
    if isinstance(value, str) and value:
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value or None


def row_problem(fields: Mapping[str, object]) -> str | None:
    """Return why a row is not a prompt, or None if it is."""
    if ("prompt" in fields) == ("messages" in fields):
        both = "both" if "prompt" in fields else "neither"
        fix = "give one, or name its column in columns, as in {prompt: question}"
        return f"has {both} of 'prompt' and 'messages' (keys: {', '.join(fields)}); {fix}"
    if "prompt" in fields:
        return _problem_of_prompt(fields["prompt"])
    return _problem_of_messages(fields["messages"])


def unshown_problem(
    fields: Mapping[str, object], *, makes_chat: bool = False, is_answered: bool = False
) -> str | None:
    """Return which field of a row cannot be part of the prompt, or None if all can.

    Args:
        fields: A row in which ``row_problem`` finds no problem.
        makes_chat: Whether the environment makes the messages itself, from other fields.
        is_answered: Whether the last message is the answer to learn, not its beginning.
    """
    for key in (*_UNSHOWN, *(OF_MESSAGES if makes_chat else ())):
        if fields.get(key):
            fix = "make it the first of 'messages'" if key.startswith("system") else "take it out"
            return (
                f"has {key!r}, which the model would not see: {fix}, or name the columns that are "
                "needed in data.columns"
            )
    if makes_chat:
        return None
    if (problem := _problem_of_options(fields)) or is_answered or "messages" not in fields:
        return problem
    return _problem_of_opening(cast("list[dict[str, object]]", fields["messages"])[-1])


def _problem_of_options(fields: Mapping[str, object]) -> str | None:
    for key, kind in OF_MESSAGES.items():
        value = of_messages(fields, key)
        if value is None:
            continue
        if "prompt" in fields:
            return f"has {key!r} next to 'prompt', which no chat template renders; give 'messages'"
        items = cast("list[object]", value if key == "tools" else [value])
        if not isinstance(value, kind) or not all(isinstance(each, dict) for each in items):
            form = "a list of objects" if key == "tools" else "an object"
            return f"{key!r} is {value!r:.80}; it is {form}, or such JSON in a string"
    return None


def _problem_of_prompt(prompt: object) -> str | None:
    if isinstance(prompt, list):
        return (
            "'prompt' is a list, but a chat is read from 'messages': rename it, or name each column "
            "that is needed in columns, as in {messages: prompt, answer: answer}"
        )
    if not isinstance(prompt, str):
        return f"'prompt' is {prompt!r:.80}; it must be a string"
    return None if prompt else "'prompt' is empty; it needs at least one character"


def _problem_of_messages(messages: object) -> str | None:
    if not isinstance(messages, list) or not messages:
        return f"'messages' is {messages!r}; it must be a list with at least one message"
    for place, message in enumerate(cast("list[object]", messages)):
        if not isinstance(message, dict):
            return f"messages[{place}] is {message!r}; a message must be an object"
        fields = cast("dict[str, object]", message)
        role = fields.get("role")
        if not isinstance(role, str) or not {"content", "tool_calls"} & fields.keys():
            return f"messages[{place}] has keys {', '.join(fields)}; it needs 'role' and 'content'"
        if role not in _ROLES:
            fix = f"did you mean {_OTHER_NAMES[role]!r}? " if role in _OTHER_NAMES else ""
            return (
                f"messages[{place}] has the role {role!r:.80}; {fix}roles are {', '.join(_ROLES)}"
            )
    return None


def _problem_of_opening(last: Mapping[str, object]) -> str | None:
    """Return why the model cannot continue the last message, or None if it can."""
    if last["role"] != ASSISTANT:
        return None
    if last.get("tool_calls"):
        return (
            "messages[-1] calls tools, but nothing answers the call; add a message of role 'tool'"
        )
    content = last.get("content")
    if not (content.strip() if isinstance(content, str) else content):
        return (
            "messages[-1] is the assistant's and empty; leave it out: the template opens the turn"
        )
    return None


def read_column(row: Mapping[str, object], name: str) -> object:
    """Return a column of a row. A dotted name that is not a column looks into nested objects.

    Raises:
        KeyError: The row has no such column.
    """
    if name in row:
        return row[name]
    value: Any = row
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise KeyError(name)
        value = cast("Any", value[part])
    return value


def answer_problem(row: Mapping[str, object], answer_key: str) -> str | None:
    """Return why a row has no answer to compare with, or None if it has one."""
    try:
        answer = read_column(row, answer_key)
    except KeyError:
        return f"has no {answer_key!r} (keys: {', '.join(row)}); the grader compares with it"
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        return f"{answer_key!r} is {answer!r:.80}; it must be a string or a number"
    return None if str(answer).strip() else f"{answer_key!r} is empty; it needs a value"
