"""Bridges the turns of a conversation with the library renderers, which knows models' formats.

A renderer writes the messages of one family of models as tokens. It parses answers from tokens:
reasoning, tool calls in the format of the family, content. It continues a history of tokens without
a chat template, so nothing must be rendered twice and compared.
"""

from collections.abc import Sequence
from threading import Lock
from typing import Any

import msgspec

from offbeat.generators.stop_strings import text_before_stop
from offbeat.plugins.agents.endpoint.chat import (
    NO_VARIABLES,
    ChatMessage,
    ParsedCall,
    Tools,
    is_flat_enough,
)
from offbeat.plugins.agents.endpoint.chat_bridge import (
    AnsweredChat,
    BranchReason,
    DrawnAnswer,
    ParsedAnswer,
    RenderedPrompt,
    TemplateRefused,
)
from offbeat.plugins.agents.endpoint.template_bridge import ChatTemplate

Objects = list[dict[str, Any]]
"""Messages or tools in the library's format."""


class RendererBridge:
    """``ChatBridge`` by a renderer of the library renderers."""

    def __init__(
        self,
        renderer: Any,  # noqa: ANN401 - a renderer of the library
        codec: ChatTemplate,
    ) -> None:
        """``codec`` is the renderer's tokenizer. Its template is not used."""
        self._renderer, self._codec = renderer, codec
        # Encoding changes the wrapper of a fast tokenizer, so one thread at a time may encode.
        self._lock = Lock()
        self.stop_token_ids = tuple(renderer.get_stop_token_ids())

    def opening(
        self, messages: Sequence[ChatMessage], tools: Tools, variables: str = NO_VARIABLES
    ) -> RenderedPrompt:
        _refuse_variables(variables)
        try:
            with self._lock:
                ids = self._renderer.render_ids(
                    _sent(messages), tools=_decode_tools(tools), add_generation_prompt=True
                )
        except (ValueError, TypeError, RecursionError) as error:
            raise TemplateRefused(str(error)) from error
        return RenderedPrompt("", tuple(ids), tuple(ids))

    def extend(
        self,
        history: AnsweredChat,
        messages: Sequence[ChatMessage],
        tools: Tools,
        variables: str = NO_VARIABLES,
    ) -> RenderedPrompt | BranchReason:
        _refuse_variables(variables)
        length, drawn = len(history.messages), history.token_ids
        prompt, completion = drawn[: history.prompt_length], drawn[history.prompt_length :]
        if history.is_continued_in(messages):
            more = messages[length - 1].content[len(history.open_text) :]
            completion = (*completion, *self._codec.encode(more))
        try:
            with self._lock:
                bridged = self._renderer.bridge_to_next_turn(
                    list(prompt),
                    list(completion),
                    _sent(messages[length:]),
                    tools=_decode_tools(tools),
                )
        except (ValueError, TypeError, RecursionError) as error:
            raise TemplateRefused(str(error)) from error
        # Check the renderer's promise: it would cut off tokens after an end token in the answer.
        if bridged is None or tuple(bridged.token_ids[: len(drawn)]) != drawn:
            return BranchReason.RENDERER_DECLINED
        ids = tuple(bridged.token_ids)
        return RenderedPrompt("", ids, ids[len(drawn) :])

    def parse(self, answer: DrawnAnswer, tools: Tools, *, parses_calls: bool) -> ParsedAnswer:
        whole = self.decode(answer.token_ids)
        try:
            with self._lock:
                found = self._renderer.parse_response(
                    list(answer.token_ids),
                    tools=_decode_tools(tools),
                    prompt_ids=list(answer.prompt_ids),
                )
        except (ValueError, TypeError, LookupError, RecursionError):  # text that it cannot parse
            content, reasoning, calls = whole, "", []
        else:
            content, reasoning = found.content, found.reasoning_content or ""
            calls = [_call(attempt) for attempt in found.tool_calls]
        if calls and parses_calls and None not in calls:
            content = text_before_stop(content, answer.stop)
            return ParsedAnswer(content, tuple(call for call in calls if call), reasoning)
        if calls:  # not requested or incomplete: the agent reads the model's text
            content, reasoning = whole, ""
        # Text after the content, such as white space, is part of the text that a client continues.
        open_text = "" if answer.is_ended else whole[max(0, whole.rfind(content)) :]
        if not content or not open_text.startswith(content):
            open_text = ""
        return ParsedAnswer(
            text_before_stop(open_text or content, answer.stop), (), reasoning, open_text
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._codec.decode(token_ids)


def _refuse_variables(variables: str) -> None:
    if variables != NO_VARIABLES:
        problem = (
            "environment.renderer takes no chat_template_kwargs: set the renderer's own options"
        )
        raise TemplateRefused(problem)


def _sent(messages: Sequence[ChatMessage]) -> Objects:
    return [message.for_template() for message in messages]


def _decode_tools(tools: Tools) -> Objects | None:
    return [msgspec.json.decode(tool) for tool in tools] or None


def _call(attempt: Any) -> ParsedCall | None:  # noqa: ANN401 - a ParsedToolCall of the library
    """Return a complete call, or None for any other attempt."""
    if str(attempt.status) != "ok" or not attempt.name or not isinstance(attempt.arguments, dict):
        return None
    call = ParsedCall(attempt.name, attempt.arguments)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]
    return call if is_flat_enough(call) else None
