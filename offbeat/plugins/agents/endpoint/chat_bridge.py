"""Translates between messages and tokens for the turns of a conversation: base of all bridges.

Drawn tokens are never encoded again. A bridge returns the prompt of the next turn as the tokens of
the history, as drawn, followed by new tokens. If it cannot, it returns the reason.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from offbeat.plugins.agents.endpoint.chat import NO_VARIABLES, ChatMessage, ParsedCall, Tools


class TemplateRefused(Exception):
    """A chat template, or a renderer instead of it, refuses these messages."""

    def __str__(self) -> str:
        return f"the model's chat template refused the messages: {super().__str__()}"


class BranchReason(enum.StrEnum):
    """Reason why a request does not continue the tokens of an earlier turn."""

    OPENING = "opening"  # the first request, or a parallel conversation
    HISTORY_EDITED = "history_edited"  # no earlier turn ends with the answers in the request
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"  # for example, it drops reasoning
    RENDERER_DECLINED = "renderer_declined"  # it renders again: a new question drops reasoning


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Prompt of one turn."""

    text: str  # the whole conversation as a template writes it, with the answer opened; else empty
    token_ids: tuple[int, ...]  # from the first token of the sample
    new_ids: tuple[int, ...]  # tokens after the history


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """A conversation up to an answer of the model."""

    messages: tuple[ChatMessage, ...]  # the last one is the answer
    tools: Tools
    prompt_text: str  # ``RenderedPrompt.text`` of the turn
    token_ids: tuple[int, ...]  # prompt and completion, as drawn
    prompt_length: int  # tokens of the prompt
    open_text: str = ""  # of an answer that the model did not end, with its stop string

    def is_followed_by(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether a conversation begins with this one; its answer may be continued."""
        length = len(self.messages)
        return (
            len(messages) >= length
            and tuple(messages[: length - 1]) == self.messages[:-1]
            and (self._is_answer(messages[length - 1]) or self.is_continued_in(messages))
        )

    def is_continued_in(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether the client continues the answer where the model was stopped."""
        sent, answer = messages[len(self.messages) - 1], self.messages[-1]
        return (
            bool(self.open_text)
            and sent.content.startswith(self.open_text)
            and not self._is_answer(sent)
            and self._is_answer(msgspec.structs.replace(sent, content=answer.content))
        )

    def _is_answer(self, sent: ChatMessage) -> bool:
        """Return whether this is the answer, with or without reasoning, which many clients drop."""
        answer = self.messages[-1]
        return sent == answer or sent == msgspec.structs.replace(answer, reasoning="")


@dataclass(frozen=True, slots=True)
class DrawnAnswer:
    """Tokens that the model drew after a prompt, without the token that ended its turn."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    is_ended: bool  # ended by the model
    stop: tuple[str, ...] = ()  # the possible stop strings, if one ended it


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """Message that the tokens of an answer encode."""

    content: str  # cut before a stop string
    calls: tuple[ParsedCall, ...] = ()
    reasoning: str = ""
    open_text: str = ""  # ``AnsweredChat.open_text``


class ChatBridge(Protocol):
    """Converts messages to tokens and back. One bridge serves all samples of a model."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn, in addition to the end tokens of the recipe and the model."""
        ...

    def opening(
        self, messages: Sequence[ChatMessage], tools: Tools, variables: str = NO_VARIABLES
    ) -> RenderedPrompt:
        """Return the prompt of a conversation without a history.

        Raises:
            TemplateRefused: The messages are refused.
        """
        ...

    def extend(
        self,
        history: AnsweredChat,
        messages: Sequence[ChatMessage],
        tools: Tools,
        variables: str = NO_VARIABLES,
    ) -> RenderedPrompt | BranchReason:
        """Return the prompt that continues ``history``, or the reason why none does.

        The messages follow ``history``, and the tools are the same. The prompt begins with
        ``history.token_ids``. A turn that was cut ends with the end token of the model's format,
        after any text that the client added.

        Raises:
            TemplateRefused: The messages are refused.
        """
        ...

    def parse(self, answer: DrawnAnswer, tools: Tools, *, parses_calls: bool) -> ParsedAnswer:
        """Return an answer as a message. If a tool call is malformed, everything is content."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text, special tokens included."""
        ...
