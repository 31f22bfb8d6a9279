"""The chat template of a Hugging Face tokenizer."""

from collections.abc import Sequence
from typing import Any, Protocol

import jinja2
import msgspec

from offbeat.endpoint.chat import NO_VARIABLES, ChatMessage, Tools
from offbeat.endpoint.chat_bridge import TemplateRefused
from offbeat.environments.text import UnreadByTemplate, for_template, template_options


class BackendTokenizer(Protocol):
    """The part of ``tokenizers.Tokenizer`` in use; unlike its wrapper, it changes nothing of itself."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Any: ...  # noqa: ANN401

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class TemplatedTokenizer(Protocol):
    """The part of a fast Hugging Face tokenizer in use."""

    @property
    def backend_tokenizer(self) -> Any: ...  # noqa: ANN401

    def apply_chat_template(
        self,
        conversation: Any,  # noqa: ANN401
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **options: Any,  # noqa: ANN401
    ) -> Any: ...  # noqa: ANN401


class TokenizerTemplate:
    """``ChatTemplate`` of a tokenizer's own template."""

    def __init__(self, tokenizer: TemplatedTokenizer) -> None:
        self._tokenizer = tokenizer
        self._backend: BackendTokenizer = tokenizer.backend_tokenizer

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Tools,
        variables: str = NO_VARIABLES,
        *,
        opens_answer: bool,
    ) -> str:
        given: dict[str, Any] = {"chat_template_kwargs": variables}
        given["tools"] = [msgspec.json.decode(tool) for tool in tools]
        try:
            return self._tokenizer.apply_chat_template(
                for_template([message.for_template() for message in messages], self._tokenizer),
                add_generation_prompt=opens_answer,
                tokenize=False,
                **template_options(given, self._tokenizer),
            )
        except (jinja2.TemplateError, TypeError, RecursionError, UnreadByTemplate) as error:
            raise TemplateRefused(str(error)) from error

    def encode(self, text: str) -> list[int]:
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def end_texts(self, end_ids: Sequence[int]) -> dict[int, str]:
        """Return the text of the tokens that end a turn."""
        return {id_: self.decode([id_]) for id_ in end_ids}
