"""Runs an engine in one dedicated thread, so that the event loop stays free.

| who          | waits for                                  | woken by                             |
|--------------|--------------------------------------------|--------------------------------------|
| callers      | their answer                               | the thread, through the event loop   |
| engine thread| nothing: without work it returns           | a command starts it again            |

Every call is a command in one inbox. The thread executes the commands between two steps. While it
has work, it runs steps back to back without waiting for the event loop. Only the thread touches the
engine.

If an engine shares its weights with the trainer, the thread asks ``StepTurns`` before each step. If
the step is not allowed, the thread returns as if it had no work. It starts again once a step is
allowed.

``SteppedEngine`` is the interface of an engine that computes in steps, for example from a plug-in.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import structlog

from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.weights import CanaryAnswer


class SteppedEngine(Protocol):
    """Engine that draws tokens in ``step``. Its weights may be exchanged between two steps."""

    tokens: int
    """Tokens generated since start."""

    busy_s: float
    """Seconds spent in ``step`` since start."""

    @property
    def name(self) -> str: ...

    @property
    def running(self) -> int:
        """Return the number of started samples."""
        ...

    @property
    def waiting(self) -> int:
        """Return the number of requests that have not started."""
        ...

    @property
    def has_work(self) -> bool:
        """Return whether a step would do anything."""
        ...

    def submit(self, request: GenerateRequest) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: The request can never be served, or its id is open.
            EngineUnavailable: The weights have no version.
        """
        ...

    def drop(self, request_id: str) -> None:
        """Remove a request. Do nothing if no such request is open."""
        ...

    def step(self) -> list[GenerateResult]:
        """Continue the open requests and return the finished ones.

        Any exception ends the engine.
        """
        ...

    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[CanaryAnswer]:
        """Return the most probable next token after each prompt, at temperature 1."""
        ...

    def set_version(self, version: int) -> None:
        """Stamp tokens with this version from the next step on.

        After ``lose``, requests are accepted again.
        """
        ...

    def lose(self, problem: str) -> None:
        """Drop open requests and refuse new ones, because the weights have no version."""
        ...


T = TypeVar("T")
E = TypeVar("E", bound=SteppedEngine)
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Command:
    """Action to run on the engine between two steps."""

    action: Callable[[Any], Any]
    answer: asyncio.Future[Any]
    answers_at_once: bool  # False: a later step answers; the command itself can only raise


@dataclass(frozen=True, slots=True)
class _Gone:
    """Reason why this engine has stopped serving."""

    problem: str
    cause: BaseException | None

    def error(self, engine: str, during: str) -> EngineUnavailable:
        error = EngineUnavailable(engine, during, self.problem, "Start another engine")
        error.__cause__ = self.cause
        return error


class StepTurns(Protocol):
    """Decides when an engine may step. The engine's thread calls it."""

    def begin(self, retry: Callable[[], object]) -> bool:
        """Begin a step. If that is not allowed, return False and call ``retry`` once it is.

        ``retry`` may be called in any thread.
        """
        ...

    def end(self) -> None:
        """End the step that was begun."""
        ...


class EngineLoop(Generic[E]):
    """Asyncio interface of an engine that computes in steps. All methods belong to one event loop.

    A step that raises breaks the engine permanently. Every open call and every later call raises
    ``EngineUnavailable`` with the step's error as its cause.
    """

    def __init__(
        self,
        engine: E,
        steps_in: Executor | None = None,
        turns: StepTurns | None = None,
    ) -> None:
        """Create the loop of an engine.

        Args:
            engine: The engine.
            steps_in: Executor with one thread that runs the engine, or None for a new one.
            turns: Decides when the engine may step, or None if it always may.
        """
        self._engine, self._turns = engine, turns
        self._inbox: deque[_Command] = deque()  # filled by the event loop, emptied by the thread
        self._open: dict[str, asyncio.Future[GenerateResult]] = {}
        self._thread = steps_in or ThreadPoolExecutor(1, thread_name_prefix=f"{engine.name}-steps")
        self._working: asyncio.Future[None] | None = None
        self._start_is_due = False
        self._gone: _Gone | None = None

    @property
    def running(self) -> int:
        """Number of samples being decoded."""
        return self._engine.running

    @property
    def waiting(self) -> int:
        """Number of requests that have not been started."""
        return self._engine.waiting

    @property
    def tokens(self) -> int:
        """Tokens generated since start."""
        return self._engine.tokens

    @property
    def busy_s(self) -> float:
        """Seconds spent in steps since start."""
        return self._engine.busy_s

    # -- requests ----------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return the finished samples of a request. Cancelling the call drops the request.

        Raises:
            InvalidRequest: The engine can never serve the request, or its id is open.
            EngineUnavailable: The engine broke or was closed before the request finished.
        """
        self.check_usable("generate")
        id_ = request.request_id
        if id_ in self._open:
            raise InvalidRequest(id_, "a request of this id is open", "Use each id once")
        answer: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._open[id_] = answer
        self._post(lambda engine: engine.submit(request), answer, answers_at_once=False)
        try:
            return await answer
        except asyncio.CancelledError:
            if self._gone is None:  # ``answer`` is cancelled, so any result would be discarded
                self._post(lambda engine: engine.drop(id_), answer, answers_at_once=True)
            raise
        finally:
            del self._open[id_]

    # -- control -----------------------------------------------------------------------------------

    async def between_steps(self, action: Callable[[E], T]) -> T:
        """Run an action in the engine's thread between two steps, for example to swap weights.

        An exception of the action is raised here and does not break the engine.
        """
        self.check_usable("run between steps")
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._post(action, answer, answers_at_once=True)
        return await answer

    def lose(self, problem: str) -> None:
        """Make every open call raise ``EngineUnavailable``, because the weights have no version.

        The engine itself refuses later calls until its weights have a version again.
        """
        for answer in self._open.values():
            if not answer.done():
                unavailable = EngineUnavailable(
                    self._engine.name, "generate", problem, "Ask another engine"
                )
                answer.set_exception(unavailable)

    def fail(self, problem: str) -> None:
        """Stop serving permanently. Open and later calls raise ``EngineUnavailable``."""
        if self._gone is None:
            self._fail_all(_Gone(problem, cause=None))

    async def close(self) -> None:
        """End the thread after the current step. Open calls raise ``EngineUnavailable``."""
        self.fail("it was closed")
        if self._working is not None:
            await asyncio.wait((self._working,))
        self._thread.shutdown()

    # -- the event loop's side ---------------------------------------------------------------------

    def _post(
        self,
        action: Callable[[E], Any],
        answer: asyncio.Future[Any],
        *,
        answers_at_once: bool,
    ) -> None:
        self._inbox.append(_Command(action, answer, answers_at_once))
        if self._working is None and not self._start_is_due:
            # Deferred, so that all requests of this event loop turn share the first prefill
            self._start_is_due = True
            answer.get_loop().call_soon(self._start)

    def _start(self) -> None:
        self._start_is_due = False
        if self._gone is None:
            loop = asyncio.get_running_loop()
            self._working = loop.run_in_executor(self._thread, self._work, loop)
            self._working.add_done_callback(self._stopped_working)

    def _stopped_working(self, working: asyncio.Future[None]) -> None:
        self._working = None
        error = working.exception()
        if error is not None:
            log.error("engine.broken", engine=self._engine.name, error=repr(error))
            if self._gone is None:
                self._fail_all(_Gone(f"a step raised {error!r}", cause=error))
        elif self._inbox:  # posted after the thread last checked
            self._start()

    def _retry(self) -> None:
        """Restart the thread, after a refused step, with a command that does nothing."""
        if self._gone is None:
            done = asyncio.get_running_loop().create_future()
            self._post(lambda _: None, done, answers_at_once=True)

    def _deliver(self, results: list[GenerateResult]) -> None:
        for result in results:
            answer = self._open.get(result.request_id)
            if answer is not None and not answer.done():
                answer.set_result(result)

    def _fail_all(self, gone: _Gone) -> None:
        self._gone = gone
        unanswered = [command.answer for command in self._inbox]
        self._inbox.clear()
        for answer in (*self._open.values(), *unanswered):
            if not answer.done():
                answer.set_exception(gone.error(self._engine.name, "answer"))

    def check_usable(self, during: str) -> None:
        """Raise unless the engine serves.

        Raises:
            EngineUnavailable: The engine is broken or closed.
        """
        if self._gone is not None:
            raise self._gone.error(self._engine.name, during)

    # -- the thread's side -------------------------------------------------------------------------

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """Execute commands and steps until none are left."""
        while self._gone is None:
            while self._inbox:
                self._execute(self._inbox.popleft(), loop)
            if not self._engine.has_work or not self._begin_step(loop):
                return
            try:
                finished = self._engine.step()
            finally:
                if self._turns is not None:
                    self._turns.end()
            if finished:
                loop.call_soon_threadsafe(self._deliver, finished)

    def _begin_step(self, loop: asyncio.AbstractEventLoop) -> bool:
        retry = partial(loop.call_soon_threadsafe, self._retry)
        return self._turns is None or self._turns.begin(retry)

    def _execute(self, command: _Command, loop: asyncio.AbstractEventLoop) -> None:
        try:
            value = command.action(self._engine)
        except Exception as error:  # noqa: BLE001 -- not handled here, but passed to the caller
            loop.call_soon_threadsafe(_answer_error, command.answer, error)
        else:
            if command.answers_at_once:
                loop.call_soon_threadsafe(_answer, command.answer, value)


def _answer(answer: asyncio.Future[T], value: T) -> None:
    if not answer.done():  # not cancelled by its caller
        answer.set_result(value)


def _answer_error(answer: asyncio.Future[Any], error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)
