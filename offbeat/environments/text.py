"""Defines the part of a tokenizer that environments use, and renders prompts with it."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol, cast

import jinja2
import jinja2.ext
import jinja2.meta
import msgspec
from jinja2.nodes import Node
from jinja2.parser import Parser

from offbeat.environments.prompt_row import ASSISTANT, of_messages
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt

_SET_HERE: Final = ("messages", "tools", "add_generation_prompt")
"""Variables of a chat template that a row's chat_template_kwargs must not set."""


class UnreadByTemplate(Exception):
    """The chat template does not read a field of a row, so the prompt would lack the field."""

    def __init__(self, field: str, known: Iterable[str]) -> None:
        super().__init__(field, known)
        self.field, self.known = field, known

    def __str__(self) -> str:
        read = ", ".join(sorted({*self.known} - {*_SET_HERE})) or "none"
        return (
            f"the model's chat template does not read {self.field} (variables that it reads: "
            f"{read}). Remove it, or give the model another chat_template.jinja"
        )


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that environments use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

    def get_vocab(self) -> dict[str, int]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **options: Any,  # noqa: ANN401 - tools, and variables of the template
    ) -> Any:  # noqa: ANN401 - token ids, or text without ``tokenize``
        ...


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenise the prompt as the model reads it.

    ``prompt`` is tokenised unchanged, with the special tokens that the tokenizer adds by default.
    ``messages`` are rendered by the chat template.
    """
    if prompt.data.get("messages") is None:
        return tuple(tokenizer.encode(prompt.data["prompt"]))
    return tuple(render_prompt(prompt.data, tokenizer, tokenize=True, return_dict=False))


def render_prompt(
    row: Mapping[str, Any],
    template: Any,  # noqa: ANN401 - a tokenizer or a processor of transformers
    **output: bool,
) -> Any:  # noqa: ANN401 - token ids, or text
    """Render the messages of a row by the chat template, with the other fields that it reads.

    The template opens the assistant's turn. But if the last message is the assistant's, it is that
    turn, and the model continues its text.

    Raises:
        UnreadByTemplate: The template does not read a field of the row.
    """
    messages = for_template(row["messages"], template)
    options = template_options(row, template)
    if is_begun := messages[-1]["role"] == ASSISTANT:
        options["continue_final_message"] = True
    return template.apply_chat_template(
        messages, add_generation_prompt=not is_begun, **options, **output
    )


def begun_answer(row: Mapping[str, Any]) -> str:
    """Return the text of the assistant's last message, which the model continues, or no text."""
    messages = row.get("messages")
    if not messages or messages[-1]["role"] != ASSISTANT:
        return ""
    return str(_in_one_text(messages[-1]).get("content") or "")


def template_options(
    row: Mapping[str, Any],
    template: Any,  # noqa: ANN401 - a tokenizer or a processor of transformers
) -> dict[str, Any]:
    """Return the row's values for the chat template in addition to messages: tools, and variables.

    Raises:
        UnreadByTemplate: The template does not read one of them.
    """
    tools: Any = of_messages(row, "tools")
    variables: dict[str, Any] = of_messages(row, "chat_template_kwargs") or {}
    if tools is None and not variables:
        return {}
    known = _variables(_template_text(template, tools))
    if tools is not None and "tools" not in known:
        raise UnreadByTemplate("tools", known)
    for name in variables:
        if name in _SET_HERE or name not in known:
            raise UnreadByTemplate(f"chat_template_kwargs.{name}", known)
    return variables if tools is None else {"tools": tools, **variables}


def _template_text(template: Any, tools: object) -> str:  # noqa: ANN401
    if hasattr(template, "get_chat_template"):
        return template.get_chat_template(tools=tools)
    text: Any = template.chat_template  # of a processor
    return text if isinstance(text, str) else text["default"]


@lru_cache(maxsize=8)
def _variables(template: str) -> frozenset[str]:
    """Return the names of the variables that a chat template reads."""
    syntax = jinja2.Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])  # noqa: S701 - nothing is rendered
    return frozenset(jinja2.meta.find_undeclared_variables(syntax.parse(template)))


class _Generation(jinja2.ext.Extension):
    """Jinja tag that transformers adds around answers."""

    tags = {"generation"}  # noqa: RUF012 - as the base has it

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def for_template(
    messages: Sequence[Mapping[str, Any]],
    template: Any,  # noqa: ANN401 - a tokenizer or a processor of transformers
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with their texts in the form that the chat template reads.

    Templates of some image-text models (SmolVLM, Idefics3) read a list of parts as content, and
    drop plain text. Most templates of text models read plain text, and print a list of parts in
    Python's notation. Neither kind reports an error. Parts that are not text stay unchanged. Null
    fields of a part are removed, because Qwen's templates treat any text with a field ``image`` as
    a picture. Arguments of tool calls become objects, which templates write as JSON. The role
    ``developer``, which most templates drop, becomes ``system``.
    """
    messages = [_with_objects(_without_nulls(message)) for message in messages]
    contents = [message.get("content") for message in messages]
    has_texts = any(isinstance(content, str) for content in contents)
    if not has_texts and not any(map(_is_text_parts, contents)):
        return messages
    reads_texts = _differs(template, "1", "2")
    if reads_texts and not any(map(_is_text_parts, contents)):
        return messages
    reads_parts = _reads_parts(template)
    if has_texts and reads_parts and not reads_texts:
        return [_in_parts(message) for message in messages]
    if reads_texts and not reads_parts:
        return [_in_one_text(message) for message in messages]
    return messages


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its role, and the arguments of its calls, as templates read them."""
    if message.get("role") == "developer":
        message = {**message, "role": "system"}
    if not (calls := message.get("tool_calls")):
        return message
    return {**message, "tool_calls": [_call_with_object(call) for call in calls]}


def _call_with_object(call: Any) -> Any:  # noqa: ANN401 - of a row
    match call:
        case {"function": {"arguments": str(arguments)} as function}:
            return {**call, "function": {**function, "arguments": read_arguments(arguments)}}
        case {"name": str(), "arguments": str(arguments)}:
            return {**call, "arguments": read_arguments(arguments)}
        case _:
            return call


def read_arguments(text: str) -> Any:  # noqa: ANN401 - any JSON
    """Return the arguments of a tool call as an object, or the text itself if it is not JSON."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return text


def in_one_form(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message in a canonical form, which is equal for messages with the same content."""
    plain = _in_one_text(_with_objects(_without_nulls(message)))
    return {key: value for key, value in plain.items() if value not in (None, [])}


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without null fields in its parts."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_known(part) for part in cast("list[object]", content)]}


def _known(part: object) -> object:
    if not isinstance(part, Mapping):
        return part
    fields = cast("Mapping[str, object]", part).items()
    return {key: value for key, value in fields if value is not None}


def _reads_parts(template: Any) -> bool:  # noqa: ANN401
    """Return whether the template writes only the text of a part."""
    part = {"type": "text", "text": "1"}
    try:
        if _differs(template, [part], [{**part, "unknown": "1"}]):
            return False
        return _differs(template, [part], [{**part, "text": "2"}])
    except (jinja2.TemplateError, TypeError):  # it joins a list with a text
        return False


def _differs(template: Any, one: object, another: object) -> bool:  # noqa: ANN401
    """Return whether the template renders two contents of a message differently."""
    first, second = (
        template.apply_chat_template(
            [{"role": "user", "content": content}],
            add_generation_prompt=False,
            tokenize=False,
            return_dict=False,
        )
        for content in (one, another)
    )
    return first != second


def _is_text_parts(content: object) -> bool:
    return isinstance(content, list) and all(
        isinstance(part, Mapping)
        and cast("Mapping[str, object]", part).get("type") == "text"
        and isinstance(cast("Mapping[str, object]", part).get("text"), str)
        for part in cast("list[object]", content)
    )


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _in_one_text(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its texts joined, as templates that read parts would join them."""
    content = message.get("content")
    if not _is_text_parts(content):
        return message
    return {**message, "content": "".join(part["text"] for part in message["content"])}


def content_ids(result: GenerateResult) -> list[list[int]]:
    """Return each sample's tokens without the stop token."""
    token_ids, ends = result.token_ids.tolist(), result.offsets.tolist()
    return [
        token_ids[start : end - (reason == "stop")]
        for start, end, reason in zip(ends, ends[1:], result.finish_reasons, strict=False)
    ]
