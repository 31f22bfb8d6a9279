"""The part of a tokenizer that environments use."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt


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
    ) -> Any:  # noqa: ANN401 - token ids, or text without ``tokenize``
        ...


def encode_prompt(prompt: Prompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Tokenise the prompt as the model reads it.

    ``prompt`` is tokenised as it is, with the special tokens that the tokenizer adds by itself.
    ``messages`` are rendered by the chat template, which opens the assistant's turn.
    """
    messages = prompt.data.get("messages")
    if messages is None:
        return tuple(tokenizer.encode(prompt.data["prompt"]))
    return tuple(
        tokenizer.apply_chat_template(
            for_template(messages, tokenizer),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
    )


def for_template(
    messages: Sequence[Mapping[str, Any]],
    template: Any,  # noqa: ANN401 - a tokenizer or a processor of transformers
) -> Sequence[Mapping[str, Any]]:
    """Return the messages with their texts in the form that the chat template reads.

    Templates of some image-text models (SmolVLM, Idefics3) read a content that is a list of parts,
    and leave out one that is a text. Most templates of text models read a text, and print a list of
    parts as Python writes it. Neither is an error of the template. Parts other than texts stay; of
    each part the fields that are null are left out: to Qwen's templates a text with a field
    ``image`` is a picture, whatever the field is.
    """
    messages = [_without_nulls(message) for message in messages]
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


def in_one_form(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message in a form that is equal for messages that say the same."""
    if isinstance(message.get("content"), str) and None not in message.values():
        return message
    plain = _in_one_text(_without_nulls(message))
    return {key: value for key, value in plain.items() if value is not None}


def _without_nulls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message without the fields of its parts that are null."""
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
    """Return whether the template writes the text of a part, and nothing else of the part."""
    part = {"type": "text", "text": "1"}
    if _differs(template, [part], [{**part, "unknown": "1"}]):
        return False
    return _differs(template, [part], [{**part, "text": "2"}])


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
    """Return the message with its texts joined as templates that read parts write them."""
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
