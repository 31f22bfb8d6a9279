"""Joins the turns of a conversation without encoding again what the model drew.

A chat template knows messages, not tokens. Rendered anew and encoded, the history of a conversation
may be other tokens than those that were drawn, and the model would be trained on what it never saw.
Here the prompt of the next turn is the history as drawn, and behind it only what the template writes
*after* it: the difference of two renderings, of which the shorter must be a prefix of the longer.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from offbeat.endpoint.chat import ChatMessage, Tools


class ChatTemplate(Protocol):
    """The chat template and the tokenizer of a model."""

    def render(self, messages: Sequence[ChatMessage], tools: Tools, *, opens_answer: bool) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateRefused: The template does not take these messages.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return tokens of text in which special tokens are written out; none are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text without special tokens."""
        ...


class TemplateRefused(Exception):
    """A chat template does not take these messages."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return f"the model's chat template refused the messages: {self.problem}"


class BranchReason(enum.StrEnum):
    """Reason why a request does not continue the tokens of an earlier turn."""

    OPENING = "opening"  # the first request, or a conversation beside the others
    HISTORY_EDITED = "history_edited"  # no earlier turn ends with the answers it contains
    TOOLS_CHANGED = "tools_changed"
    TEMPLATE_REWRITES_HISTORY = "template_rewrites_history"  # it drops reasoning, for example


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """Prompt of one turn."""

    text: str  # the whole conversation as the template writes it, the answer opened
    token_ids: tuple[int, ...]  # from the first token of the sample
    new_ids: tuple[int, ...]  # those behind the history


@dataclass(frozen=True, slots=True)
class AnsweredChat:
    """A conversation up to an answer of the model."""

    messages: tuple[ChatMessage, ...]  # the last one is the answer
    tools: Tools
    prompt_text: str  # ``RenderedPrompt.text`` of the turn
    token_ids: tuple[int, ...]  # prompt and completion, as drawn
    open_text: str = ""  # of an answer that the model did not end itself, its stop string included

    def is_followed_by(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether a conversation begins with this one, its answer as it was or gone on with."""
        length = len(self.messages)
        return (
            len(messages) >= length
            and tuple(messages[: length - 1]) == self.messages[:-1]
            and (messages[length - 1] == self.messages[-1] or self.is_continued_in(messages))
        )

    def is_continued_in(self, messages: Sequence[ChatMessage]) -> bool:
        """Return whether the client goes on with the answer where the model was stopped in it."""
        sent, answer = messages[len(self.messages) - 1], self.messages[-1]
        return (
            bool(self.open_text)
            and sent.content.startswith(self.open_text)
            and sent != answer
            and msgspec.structs.replace(sent, content=answer.content) == answer
        )


class TemplateBridge:
    """Prompts by a chat template; pure. One serves all samples of a model."""

    def __init__(self, template: ChatTemplate, end_texts: Mapping[int, str]) -> None:
        """``end_texts``: the tokens that end a turn, as the template writes them."""
        self.template, self._ends = template, dict(end_texts)
        self._opening: str | None = None  # what the template writes to open an answer, once known

    def opening(self, messages: Sequence[ChatMessage], tools: Tools) -> RenderedPrompt:
        """Return the prompt of a conversation without a history.

        Raises:
            TemplateRefused: The template does not take these messages.
        """
        text = self.template.render(messages, tools, opens_answer=True)
        token_ids = tuple(self.template.encode(text))
        return RenderedPrompt(text, token_ids, token_ids)

    def extend(
        self, history: AnsweredChat, messages: Sequence[ChatMessage], tools: Tools
    ) -> RenderedPrompt | BranchReason:
        """Return the prompt that continues ``history``, or why there is none.

        The prompt begins with ``history.token_ids``. A turn that was cut is closed with the token
        by which the template ends it, behind what the client has added to it.

        Raises:
            TemplateRefused: The template does not take these messages.
        """
        if not history.is_followed_by(messages):
            return BranchReason.HISTORY_EDITED
        if tools != history.tools:
            return BranchReason.TOOLS_CHANGED
        render, asked = self.template.render, self._asked(history)
        sent = messages[: len(history.messages)]
        answered = render(sent, tools, opens_answer=False)
        following = render(messages, tools, opens_answer=True)
        answer, content = answered[len(asked) :], sent[-1].content.strip()
        drawn = history.prompt_text[len(asked) :] + history.open_text  # as the answer was opened
        goes_on = history.is_continued_in(messages)
        if not (
            history.prompt_text.startswith(asked)
            and answered.startswith(asked)
            and (answer.startswith(drawn) if goes_on else content in answer)
            and following.startswith(answered)
        ):
            return BranchReason.TEMPLATE_REWRITES_HISTORY
        if goes_on:
            behind = answer[len(drawn) :]
        else:
            behind = self._behind(answer, content, last=history.token_ids[-1])
        new_ids = tuple(self.template.encode(behind + following[len(answered) :]))
        return RenderedPrompt(following, (*history.token_ids, *new_ids), new_ids)

    def _asked(self, history: AnsweredChat) -> str:
        """Return the text of the prompt of a turn, without the opening of the answer."""
        text, opening = history.prompt_text, self._opening
        if opening is not None and text.endswith(opening):
            return text.removesuffix(opening)
        asked = self.template.render(history.messages[:-1], history.tools, opens_answer=False)
        if text.startswith(asked):
            self._opening = text.removeprefix(asked)
        return asked

    def _behind(self, answer: str, content: str, *, last: int) -> str:
        """Return what the template writes behind the last token that was drawn of an answer."""
        found = [(answer.rfind(text), text, id_) for id_, text in self._ends.items()]
        at, end, end_id = max(found, default=(-1, "", -1))
        if at < 0:  # the template ends no turn with a token
            return answer[answer.rfind(content) + len(content) :] if content else ""
        closing = answer[at + len(end) :]
        return closing if last == end_id else end + closing
