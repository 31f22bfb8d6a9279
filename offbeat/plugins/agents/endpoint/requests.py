"""Bodies of requests: defines what agents may request, and refuses everything else by name.

A field that is not listed here is refused. A field that would change how tokens are drawn is only
accepted with the recipe's value, because the trainer computes with that value.
"""

from collections.abc import Generator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
import structlog
from msgspec import Meta, Struct

from offbeat.messages.bad_json import json_problem
from offbeat.messages.generation import SamplingParams
from offbeat.plugins.agents.endpoint.chat import ChatMessage, ToolCall, compact_json
from offbeat.plugins.agents.endpoint.errors import RequestRefused, refuse_field
from offbeat.plugins.agents.endpoint.session import ChatTurn, TokenTurn

log = structlog.stdlib.get_logger()
StopString = Annotated[str, Meta(max_length=1000)]
Stop = StopString | Annotated[list[StopString], Meta(max_length=16)] | None
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Count = Annotated[int, Meta(ge=1, le=2**63 - 1)] | None
Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # Python's ints have no end
T = TypeVar("T")


class _Body(Struct, forbid_unknown_fields=True):
    """Base of every object in a body."""


class ContentPart(_Body):
    """One part of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None


class CalledFunction(_Body):
    """Name and arguments of a call that the model made."""

    name: str
    arguments: str


class SentCall(_Body):
    """A tool call of an earlier answer, as the client sends it back."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: Whole | None = None


class SentMessage(_Body):
    """A message of the conversation. Fields of other providers' answers may be present if empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[SentCall] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    reasoning: str | None = None  # vLLM's newer name of the next field
    reasoning_content: str | None = None

    def canonical(self) -> ChatMessage:
        """Return the message in the canonical form, in which messages are compared.

        Raises:
            RequestRefused: A part of its content is not text.
        """
        return ChatMessage(
            "system" if self.role == "developer" else self.role,
            _text(self.content),
            tuple(
                ToolCall(call.id, call.function.name, compact_json(call.function.arguments))
                for call in self.tool_calls or ()
            ),
            self.tool_call_id or "",
            self.name or "",
            self.reasoning_content or self.reasoning or "",
        )


class OfferedTool(_Body, kw_only=True):
    """A tool that the model may call. The chat template shows it unchanged, in this order."""

    type: Literal["function"] = "function"
    function: dict[str, Any]


class ChosenFunction(_Body):
    """Name of the tool that the client wants called."""

    name: str


class ToolChoice(_Body):
    """The client's choice of one tool."""

    function: ChosenFunction
    type: Literal["function"] = "function"


class StreamOptions(_Body):
    """Options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False


class _Sampling(_Body):
    """Fields that are accepted only with the value that changes nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    n: Whole | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None


class ChatRequest(_Sampling, kw_only=True):
    """Body of ``POST /v1/chat/completions``."""

    model: str
    messages: Annotated[list[SentMessage], Meta(min_length=1)]
    tools: list[OfferedTool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    stop: Stop = None
    max_tokens: Count = None
    max_completion_tokens: Count = None
    seed: Whole | None = None
    logprobs: bool | None = None
    top_logprobs: Whole | None = None
    response_format: dict[str, Any] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    # These fields do not affect the model's input.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None

    def turn(self, sampling: SamplingParams) -> ChatTurn:
        """Return the turn to sample.

        Raises:
            RequestRefused: A value that the recipe does not sample with, or that is not supported.
        """
        _check_sampling(self, sampling)
        if self.top_logprobs:
            raise refuse_field("top_logprobs", "only the drawn token's logprob is known: use 0")
        if self.response_format not in (None, {"type": "text"}):
            raise refuse_field("response_format", 'only {"type": "text"} is supported')
        if self.messages[-1].role == "assistant":
            problem = (
                "the last message is the assistant's, which the chat template would close before it "
                "opens another: end with a message of the user or of a tool"
            )
            raise refuse_field("messages", problem)
        limits = [each for each in (self.max_tokens, self.max_completion_tokens) if each]
        try:
            tools = [msgspec.json.encode(tool).decode() for tool in self.tools or ()]
            variables = msgspec.json.encode(
                self.chat_template_kwargs or {}, order="sorted"
            ).decode()
        except RecursionError as error:
            raise refuse_field("tools", "a definition is nested too deeply") from error
        return ChatTurn(
            messages=tuple(message.canonical() for message in self.messages),
            tools=tuple(tools),
            stop=_stop(self.stop),
            max_new_tokens=min(limits, default=None),
            parses_tool_calls=bool(self.tools) and self.tool_choice != "none",
            parallel_tool_calls=self.parallel_tool_calls is not False,
            seed=self.seed,
            variables=variables,
        )


class TokenSampling(_Sampling):
    """``sampling_params`` of a request by tokens."""

    max_tokens: Count = None
    stop: Stop = None
    stop_token_ids: list[TokenId] | None = None
    seed: Whole | None = None
    logprobs: Whole | None = None
    skip_special_tokens: bool | None = None  # no text is returned
    routed_experts_prompt_start: Whole | None = None  # no routed experts are returned


class TokenRequest(_Body):
    """Body of ``POST /inference/v1/generate``."""

    token_ids: list[TokenId]
    sampling_params: TokenSampling
    model: str | None = None
    stream: Literal[False] | None = None
    request_id: str | None = None
    cache_salt: str | None = None
    priority: Whole | None = None

    def turn(self, sampling: SamplingParams) -> TokenTurn:
        """Return the turn to sample.

        Raises:
            RequestRefused: A value that the recipe does not sample with, or that is not supported.
        """
        asked = self.sampling_params
        _check_sampling(asked, sampling)
        if asked.logprobs is not None and asked.logprobs > 1:
            raise refuse_field("logprobs", "only the drawn token's logprob is known: use 1")
        return TokenTurn(
            tuple(self.token_ids),
            _stop(asked.stop),
            tuple(asked.stop_token_ids or ()),
            asked.max_tokens,
            asked.seed,
        )


def decode_body(body: bytes, kind: type[T]) -> T:
    """Return a body as an object of this type.

    Raises:
        RequestRefused: It is not JSON, or has unknown fields or wrong types.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "invalid_request", str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        problem = f"the body {json_problem(body)}"
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "invalid_json", problem) from error


@contextmanager
def reading_body() -> Generator[None]:
    """Refuse a body that the block cannot read, because an agent may send any value.

    Raises:
        RequestRefused: The block raised it, or an error of a value.
    """
    try:
        yield
    except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError) as error:
        log.warning("endpoint.body_unreadable", error=repr(error))
        problem = f"the body cannot be read: {type(error).__name__}"
        raise RequestRefused(HTTPStatus.BAD_REQUEST, "invalid_request", problem) from error


_EVERY_TOKEN: Final = -1
"""Value of ``top_k`` that also means no limit; vLLM accepts it."""

_NEUTRAL: Final[dict[str, tuple[Any, ...]]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
}


def _check_sampling(asked: _Sampling, sampling: SamplingParams) -> None:
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(asked, name)) not in neutral:
            raise refuse_field(name, f"{value!s:.80} is not supported: leave it out")
    for name in ("temperature", "top_p", "top_k", "min_p"):
        value, fixed = getattr(asked, name), getattr(sampling, name)
        if name == "top_k" and value == _EVERY_TOKEN:
            value = 0
        if value is not None and value != fixed:
            problem = f"{value:g} is asked for, but the recipe samples with {fixed:g}: leave it out"
            raise refuse_field(name, problem)


def _stop(stop: Stop) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in strings:
        raise refuse_field("stop", "it holds an empty string: leave that out")
    return strings


def _text(content: str | list[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text" or part.text is None:
            raise refuse_field("messages", f"parts of type {part.type} are not supported: use text")
    return "\n".join(part.text or "" for part in content)
