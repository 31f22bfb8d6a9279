"""One sample of an agent: its turns as they arrive, and the tokens that are trained at the end.

Turns form a tree. A request that continues an earlier answer is the child of that turn. Its prompt
begins with the tokens of that turn exactly as drawn. Any other request is a root, with the reason
why. Every leaf is a *branch* of the sample. A drawn token is trained once, in the first branch that
holds it.

Repetitions of a request share one sampling.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Final, NoReturn, TypeVar

import msgspec

from offbeat.generators.stop_strings import text_before_stop
from offbeat.messages.failures import InvalidRequest, RolloutFailed, StrayMediaToken
from offbeat.messages.generation import STOPPED_AT_STRING, GenerateResult
from offbeat.plugins.agents.endpoint.chat import NO_VARIABLES, ChatMessage, ToolCall, Tools
from offbeat.plugins.agents.endpoint.chat_bridge import (
    AnsweredChat,
    BranchReason,
    ChatBridge,
    DrawnAnswer,
    RenderedPrompt,
)
from offbeat.plugins.agents.endpoint.errors import LimitExceeded, SessionFinished
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.multi_turn import Transcript

T = TypeVar("T")

_LONG_TEXT: Final = 1 << 15
"""Minimum characters of a conversation that is rendered and encoded in a thread."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of one sample. A request beyond a bound is refused by its name."""

    max_requests: int = 1000  # turns, including failed ones
    max_open_requests: int = 16
    max_branches: int = 64
    max_sample_tokens: int = 1 << 20  # of all branches, each with its prompt and its shared tokens


class ChatTurn(msgspec.Struct, frozen=True):
    """Request for the next answer of a conversation."""

    messages: tuple[ChatMessage, ...]
    tools: Tools = ()
    stop: tuple[str, ...] = ()
    max_new_tokens: int | None = None  # None: the recipe's value
    parses_tool_calls: bool = True
    parallel_tool_calls: bool = True
    seed: int | None = None  # mixed into the sample's seed: equal seeds must not make equal samples
    variables: str = NO_VARIABLES


class TokenTurn(msgspec.Struct, frozen=True):
    """Request for a continuation of tokens."""

    token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    seed: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """One answered request."""

    number: int
    parent: "Turn | None"
    reason: BranchReason | None  # None: it continues its parent
    prompt: RenderedPrompt
    result: GenerateResult
    history: AnsweredChat  # without messages for a request by tokens
    text: str  # text of the answer, cut before a stop string
    finish_reason: str  # stop | length | tool_calls

    @property
    def answer(self) -> ChatMessage:
        return self.history.messages[-1]

    @property
    def completion_ids(self) -> list[int]:
        return self.result.token_ids.tolist()


@dataclass(frozen=True, slots=True)
class Branch:
    """One line of turns, from the first prompt to the last answer."""

    reason: BranchReason  # why it is not part of another branch
    transcript: Transcript

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.transcript.prompt_ids


@dataclass(slots=True, eq=False)
class SampleSession:
    """The turns of one sample. All methods belong to one event loop."""

    engine: EngineClient
    bridge: ChatBridge
    sample: int = 0
    retry: int = 0  # 0 at the first try of the sample; every try draws with different seeds
    limits: SessionLimits = field(default_factory=SessionLimits)
    turns: list[Turn] = field(default_factory=list[Turn])  # in the order of their answers
    failure: Exception | None = None  # first failure of the engine, or of the code that answers
    refused_requests: int = 0
    last_refusal: str = ""  # of a request by the agent, to explain a missing turn
    is_finished: bool = False
    open_requests: int = 0
    tokens: int = 0  # of all branches, each with its prompt and its shared tokens
    _failed: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: "count[int]" = field(default_factory=count)
    _by_question: dict[int, list[Turn]] = field(default_factory=dict[int, list[Turn]])
    _parents: set[int] = field(default_factory=set[int])  # numbers of turns that were continued

    # --- turns ------------------------------------------------------------------------------------

    async def chat(self, request: ChatTurn) -> Turn:
        """Return the model's next answer.

        Raises:
            SessionFinished: The sample has ended.
            LimitExceeded: One of the sample's limits.
            TemplateRefused: The chat template refuses the messages.
            RolloutFailed: As documented in ``EngineClient.check_text`` and ``EngineClient.sample``.
                Errors of the engine are raised unchanged.
        """
        parent, reason, prompt = await self._prompt(request)
        number, result = await self._generate(prompt, parent, request)
        drawn = _drawn(prompt, result, request.stop)
        parsed = self.bridge.parse(drawn, request.tools, parses_calls=request.parses_tool_calls)
        calls = parsed.calls if request.parallel_tool_calls else parsed.calls[:1]
        answer = ChatMessage(
            "assistant",
            parsed.content,
            tuple(
                ToolCall(
                    f"call_{number}_{index}",
                    call.name,
                    msgspec.json.encode(call.arguments).decode(),
                )
                for index, call in enumerate(calls)
            ),
            reasoning=parsed.reasoning,
        )
        ended = "length" if result.finish_reasons[0] == "length" else "stop"
        return self._record(
            Turn(
                number,
                parent,
                reason,
                prompt,
                result,
                AnsweredChat(
                    (*request.messages, answer),
                    request.tools,
                    prompt.text,
                    (*prompt.token_ids, *result.token_ids.tolist()),
                    len(prompt.token_ids),
                    parsed.open_text,
                ),
                parsed.content,
                "tool_calls" if calls else ended,
            )
        )

    async def continue_tokens(self, request: TokenTurn) -> Turn:
        """Return a continuation of tokens, as a child of the longest turn that they begin with.

        Raises:
            SessionFinished: The sample has ended.
            LimitExceeded: One of the sample's limits.
            RolloutFailed: As documented in ``EngineClient.check_text`` and ``EngineClient.sample``.
                Errors of the engine are raised unchanged.
        """
        ids = request.token_ids
        earlier = [turn for turn in self.turns if turn.history.token_ids == ids[: _length(turn)]]
        parent = max(earlier, key=_length, default=None)
        reason = None
        if parent is None:
            reason = BranchReason.HISTORY_EDITED if self.turns else BranchReason.OPENING
        prompt = RenderedPrompt("", ids, ids if parent is None else ids[_length(parent) :])
        number, result = await self._generate(prompt, parent, request)
        history = AnsweredChat((), (), "", (*ids, *result.token_ids.tolist()), len(ids))
        ended = "length" if result.finish_reasons[0] == "length" else "stop"
        drawn = _drawn(prompt, result, request.stop)
        text = text_before_stop(self.bridge.decode(drawn.token_ids), drawn.stop)
        return self._record(Turn(number, parent, reason, prompt, result, history, text, ended))

    def was_continued(self, turn: Turn) -> bool:
        """Return whether a later turn continues this one and has already been answered."""
        return turn.number in self._parents

    # --- the end ----------------------------------------------------------------------------------

    def fail(self, error: Exception) -> None:
        """Record a failure of the engine, or of the code that answers. Only the first is kept."""
        if self.failure is None:
            self.failure = error
            self._failed.set()

    async def raise_failure(self) -> NoReturn:
        """Wait for the failure of the sample, and raise it."""
        await self._failed.wait()
        assert self.failure is not None  # noqa: S101 - set before the event
        raise self.failure

    def finish(self) -> tuple[Branch, ...]:
        """End the sample; return its branches in the order in which they were opened."""
        self.is_finished = True
        trained = set[int]()
        branches = list[Branch]()
        for leaf in self.turns:
            if not self.was_continued(leaf):
                branches.append(_branch(leaf, trained))
        return tuple(branches)

    # --- inside -----------------------------------------------------------------------------------

    async def _prompt(
        self, request: ChatTurn
    ) -> tuple[Turn | None, BranchReason | None, RenderedPrompt]:
        bridge, reason = self.bridge, BranchReason.OPENING
        asked = (request.messages, request.tools, request.variables)
        if self.turns and any(message.role == "assistant" for message in request.messages):
            reason = BranchReason.HISTORY_EDITED
        for parent in self._find_continued(request.messages):
            if request.tools != parent.history.tools:
                reason = BranchReason.TOOLS_CHANGED
                continue
            prompt = await _apart(request, partial(bridge.extend, parent.history, *asked))
            if isinstance(prompt, RenderedPrompt):
                return parent, None, prompt
            reason = prompt
        opening = await _apart(request, partial(bridge.opening, *asked))
        return None, reason, opening

    def _find_continued(self, messages: tuple[ChatMessage, ...]) -> Sequence[Turn]:
        """Return the longest turns with a conversation that is a prefix of these messages."""
        chain, found = 0, list[Turn]()
        for message in messages:
            asked_here = self._by_question.get(chain, ()) if message.role == "assistant" else ()
            same = [turn for turn in asked_here if turn.history.is_followed_by(messages)]
            found = same or found
            chain = hash((chain, message))
        return found[::-1]  # the newest of equal ones first

    async def _generate(
        self, prompt: RenderedPrompt, parent: Turn | None, request: ChatTurn | TokenTurn
    ) -> tuple[int, GenerateResult]:
        number = self._admit(prompt, parent)
        self.engine.check_text(prompt.new_ids, "the conversation")
        task, sampling = self.engine.task, self.engine.sampling
        room = (
            self.limits.max_sample_tokens - self.tokens - self._count_added_tokens(prompt, parent)
        )
        most, ends = min(sampling.max_new_tokens, room), sampling.stop_token_ids
        if request.max_new_tokens is not None:
            most = min(most, request.max_new_tokens)
        more = (
            request.stop_token_ids if isinstance(request, TokenTurn) else self.bridge.stop_token_ids
        )
        if more:
            ends = tuple(dict.fromkeys((*ends, *more)))
        stop = tuple(dict.fromkeys((*sampling.stop, *request.stop)))
        sampling = msgspec.structs.replace(
            sampling, max_new_tokens=most, stop_token_ids=ends, stop=stop
        )
        again = f":{self.retry}" if self.retry else ""
        rng = random.Random(f"{task.seed}:{self.sample}:{number}:{request.seed}{again}")
        engine = replace(self.engine, sampling=sampling)
        id_ = f"{task.request_prefix}-{self.sample}-{number}"
        self.open_requests += 1
        try:
            result = await engine.sample(id_, prompt.token_ids, 1, rng.getrandbits(31))
        except Exception as error:
            if not _is_the_agents(error):
                self.fail(error)
            raise
        finally:
            self.open_requests -= 1
        if self.is_finished:
            raise SessionFinished
        return number, result

    def _admit(self, prompt: RenderedPrompt, parent: Turn | None) -> int:
        limits = self.limits
        if self.is_finished:
            raise SessionFinished
        if self.open_requests >= limits.max_open_requests:
            raise LimitExceeded("max_open_requests", limits.max_open_requests)
        self._check_room(self._count_added_tokens(prompt, parent) + 1, parent)
        number = next(self._numbers)
        if number >= limits.max_requests:
            raise LimitExceeded("max_requests", limits.max_requests)
        return number

    def _check_room(self, tokens: int, parent: Turn | None) -> None:
        """Check that the sample has room for a turn that adds ``tokens`` tokens.

        Raises:
            LimitExceeded: ``max_branches``, ``max_sample_tokens``.
        """
        limits = self.limits
        branches = sum(not self.was_continued(turn) for turn in self.turns)
        if self._opens_branch(parent) and branches >= limits.max_branches:
            raise LimitExceeded("max_branches", limits.max_branches)
        if self.tokens + tokens > limits.max_sample_tokens:
            raise LimitExceeded("max_sample_tokens", limits.max_sample_tokens)

    def _opens_branch(self, parent: Turn | None) -> bool:
        return parent is None or self.was_continued(parent)

    def _count_added_tokens(self, prompt: RenderedPrompt, parent: Turn | None) -> int:
        """Return the tokens that a prompt adds; a new branch counts its history again."""
        return len(prompt.token_ids if self._opens_branch(parent) else prompt.new_ids)

    def _record(self, turn: Turn) -> Turn:
        """Add a turn.

        Raises:
            LimitExceeded: Another request that was open at the same time has used up the room.
        """
        tokens = self._count_added_tokens(turn.prompt, turn.parent) + len(turn.result.token_ids)
        self._check_room(tokens, turn.parent)
        self.turns.append(turn)
        self.tokens += tokens
        if turn.parent is not None:
            self._parents.add(turn.parent.number)
        chain = 0
        for message in turn.history.messages[:-1]:
            chain = hash((chain, message))
        if turn.history.messages:
            self._by_question.setdefault(chain, []).append(turn)
        return turn


async def _apart(request: ChatTurn, make: Callable[[], T]) -> T:
    """Create a prompt; in a thread if it is long, so that other samples do not wait for it."""
    if sum(message.characters for message in request.messages) < _LONG_TEXT:
        return make()
    return await asyncio.to_thread(make)


def _drawn(prompt: RenderedPrompt, result: GenerateResult, stop: tuple[str, ...]) -> DrawnAnswer:
    ids, reason = result.token_ids.tolist(), result.finish_reasons[0]
    is_ended = reason == "stop"
    return DrawnAnswer(
        prompt.token_ids,
        tuple(ids[:-1] if is_ended else ids),
        is_ended,
        stop if reason == STOPPED_AT_STRING else (),
    )


def _is_the_agents(error: Exception) -> bool:
    """Return whether the agent caused a request's failure. If so, the sample has not failed."""
    match error:
        case InvalidRequest() | StrayMediaToken():
            return True
        case RolloutFailed():
            return error.reason in {"prompt_too_long", "prompt_empty"}
        case _:
            return False


def _length(turn: Turn) -> int:
    return len(turn.history.token_ids)


def _branch(leaf: Turn, trained: set[int]) -> Branch:
    """Return the branch that ends with ``leaf``.

    Turns in ``trained`` are context. The others are added to ``trained``.
    """
    line = [leaf]
    while (parent := line[-1].parent) is not None:
        line.append(parent)
    root = line[-1]
    transcript = Transcript(prompt_ids=root.prompt.token_ids)
    for turn in reversed(line):
        observation = () if turn is root else turn.prompt.new_ids
        transcript.add_turn(observation, turn.result, is_context=turn.number in trained)
        trained.add(turn.number)
    assert root.reason is not None  # noqa: S101 - a turn without a parent has one
    return Branch(root.reason, transcript)


Asked = ChatTurn | TokenTurn


@dataclass(slots=True, eq=False)
class _Call:
    task: asyncio.Task[Turn]
    waiters: int = 0


class SharedCalls:
    """The requests of one session. All methods belong to one event loop.

    A client sends its request again after a broken connection. While the first request runs, the
    second waits for the same answer. After that it receives the same answer until a later turn
    continues it. A call without any waiting request is cancelled.
    """

    def __init__(self, session: SampleSession) -> None:
        self._session = session
        self._calls: dict[Asked, _Call] = {}
        self._running = set[asyncio.Task[Turn]]()

    async def answer(
        self, asked: Asked, sample: Callable[[], Coroutine[Any, Any, Turn]], *, may_repeat: bool
    ) -> Turn:
        """Return the answer to a request. Call ``sample`` unless the request is a repetition.

        Args:
            asked: The request.
            sample: Creates the answer. Its errors are raised here.
            may_repeat: False if the client states that this is not a repetition.
        """
        call = self._calls.get(asked) if may_repeat else None
        if call is None or not self._can_answer(call):
            task = asyncio.create_task(sample(), name="endpoint-sample")
            self._running.add(task)
            call = self._calls[asked] = _Call(task)
            task.add_done_callback(partial(self._discard, asked, call))
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiters -= 1
            if not call.waiters and not call.task.done():
                call.task.cancel()

    async def close(self) -> None:
        """Cancel all running calls."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _can_answer(self, call: _Call) -> bool:
        task = call.task
        if not task.done():
            return task.cancelling() == 0
        if task.cancelled() or task.exception() is not None:
            return False
        return not self._session.was_continued(task.result())

    def _discard(self, asked: Asked, call: _Call, task: asyncio.Task[Turn]) -> None:
        self._running.discard(task)
        # A call without an answer is dropped: an agent may send any number of refused requests.
        # ``exception`` also marks the error as retrieved, because nobody may be waiting.
        is_without_answer = task.cancelled() or task.exception() is not None
        if is_without_answer and self._calls.get(asked) is call:
            del self._calls[asked]
