"""The part of a tokenizer that environments use."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import Prompt


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that environments use."""

    @property
    def eos_token_id(self) -> int | None: ...

    def __len__(self) -> int: ...

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
    and leave out one that is a text, without an error.
    """
    if not any(isinstance(message.get("content"), str) for message in messages):
        return messages
    one, another = (
        template.apply_chat_template(
            [{"role": "user", "content": text}],
            add_generation_prompt=False,
            tokenize=False,
            return_dict=False,
        )
        for text in ("1", "2")
    )
    return messages if one != another else [_in_parts(message) for message in messages]


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def content_ids(result: GenerateResult) -> list[list[int]]:
    """Return each sample's tokens without the stop token."""
    token_ids, ends = result.token_ids.tolist(), result.offsets.tolist()
    return [
        token_ids[start : end - (reason == "stop")]
        for start, end, reason in zip(ends, ends[1:], result.finish_reasons, strict=False)
    ]
