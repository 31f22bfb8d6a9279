"""Bridges the turns of a conversation by any chat template.

A chat template works on messages, not tokens. Rendered and encoded again, the history of a
conversation may differ from the drawn tokens, and the model would be trained on tokens it never
saw. Here the prompt of the next turn is the history as drawn, followed only by the template's text
*after* it. That text is the difference of two renderings; the shorter must be a prefix of the
longer.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from offbeat.generators.stop_strings import text_before_stop
from offbeat.plugins.agents.endpoint.chat import NO_VARIABLES, ChatMessage, Tools, parse_tool_calls
from offbeat.plugins.agents.endpoint.chat_bridge import (
    AnsweredChat,
    BranchReason,
    DrawnAnswer,
    ParsedAnswer,
    RenderedPrompt,
)


class ChatTemplate(Protocol):
    """The chat template and the tokenizer of a model."""

    def render(
        self, messages: Sequence[ChatMessage], tools: Tools, variables: str, *, opens_answer: bool
    ) -> str:
        """Return the text of a conversation.

        Raises:
            TemplateRefused: The template refuses these messages.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text with special tokens written out. No tokens are added."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return text, special tokens included."""
        ...


class TemplateBridge:
    """``ChatBridge`` by the model's chat template. Pure. Parses tool calls in the Hermes format."""

    stop_token_ids = ()

    def __init__(self, template: ChatTemplate, end_texts: Mapping[int, str]) -> None:
        """``end_texts``: the tokens that end a turn, as the template writes them."""
        self._template, self._ends = template, dict(end_texts)
        self._opening: str | None = None  # text with which the template opens an answer, once known

    def opening(
        self, messages: Sequence[ChatMessage], tools: Tools, variables: str = NO_VARIABLES
    ) -> RenderedPrompt:
        text = self._template.render(messages, tools, variables, opens_answer=True)
        token_ids = tuple(self._template.encode(text))
        return RenderedPrompt(text, token_ids, token_ids)

    def extend(
        self,
        history: AnsweredChat,
        messages: Sequence[ChatMessage],
        tools: Tools,
        variables: str = NO_VARIABLES,
    ) -> RenderedPrompt | BranchReason:
        render, asked = self._template.render, self._render_prompt(history, variables)
        sent = messages[: len(history.messages)]
        answered = render(sent, tools, variables, opens_answer=False)
        following = render(messages, tools, variables, opens_answer=True)
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
        new_ids = tuple(self._template.encode(behind + following[len(answered) :]))
        return RenderedPrompt(following, (*history.token_ids, *new_ids), new_ids)

    def parse(self, answer: DrawnAnswer, tools: Tools, *, parses_calls: bool) -> ParsedAnswer:  # noqa: ARG002 -- calls of any name are read
        drawn = self.decode(answer.token_ids)
        text = text_before_stop(drawn, answer.stop)
        content, calls = parse_tool_calls(text) if parses_calls else (text, ())
        return ParsedAnswer(content, calls, open_text="" if calls or answer.is_ended else drawn)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._template.decode(token_ids)

    def _render_prompt(self, history: AnsweredChat, variables: str) -> str:
        """Return the text of the prompt of a turn, without the opening of the answer."""
        text, opening = history.prompt_text, self._opening
        if opening is not None and text.endswith(opening):
            return text.removesuffix(opening)
        asked = self._template.render(
            history.messages[:-1], history.tools, variables, opens_answer=False
        )
        if text.startswith(asked):
            self._opening = text.removeprefix(asked)
        return asked

    def _behind(self, answer: str, content: str, *, last: int) -> str:
        """Return the text that the template writes after the last drawn token of an answer."""
        found = [(answer.rfind(text), text, id_) for id_, text in self._ends.items()]
        at, end, end_id = max(found, default=(-1, "", -1))
        if at < 0:  # the template ends no turn with a token
            return answer[answer.rfind(content) + len(content) :] if content else ""
        closing = answer[at + len(end) :]
        return closing if last == end_id else end + closing
