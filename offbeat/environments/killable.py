"""Child processes that run user code and can be killed at any moment, and a pool of them.

Not ``multiprocessing.Pool``: a task there cannot be killed, a dead process hangs the pool, and
values travel as pickle. Here a child is the leader of a process group, which one SIGKILL ends.

A child scores one group at a time with a reward function. A call that is late, fails or is cancelled
kills it. A subclass may run another program, and many calls at once in one process.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import Callable, Coroutine, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Protocol, Self

import msgspec

from offbeat.environments.frames import (
    LONGEST_ANSWER_BYTES,
    Ready,
    Refused,
    RewardCall,
    RewardReply,
    RewardTarget,
    TryBegun,
    framed,
)
from offbeat.environments.reward_value import NamedRewards, RewardFault
from offbeat.messages.failures import OffbeatError
from offbeat.messages.framing import LENGTH, body_length

PROGRAM: Final = "offbeat.environments.reward_child"
"""Module that a child runs to call a reward function."""

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_DIED: Final = "reward_process_died"
_IMPORT_FAILED: Final = "reward_import_failed"
_STDERR = 2
_TWICE = (
    "sample {} was answered twice, or in another call: user code writes to this program's socket"
)
_FROM_CHILD = msgspec.json.Decoder(Ready | Refused | RewardReply | TryBegun)
_LAST_FRAMES_S: Final = 1.0
"""Longest wait for what a killed child had written; only a process that left its group holds it."""


class RewardFailed(OffbeatError):
    """A group gets no rewards; ``reason`` names the failure counter."""

    reason: str
    detail: str
    fault: RewardFault = RewardFault.SAMPLE
    traceback: str = ""  # of what user code raised
    sample: int | None = None  # that has no reward; None: not known
    refusal: tuple[str, str] | None = None  # problem and fix of a target that cannot be imported

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(slots=True)
class CallCount:
    """Number of calls of a function that the children of a pool have begun, tries included."""

    made: int = 0


@dataclass(slots=True)
class OpenCall:
    """A call that is open in a child, such as a group to score."""

    samples: int
    answers: asyncio.Future[list[NamedRewards | None]]
    deadline: asyncio.Timeout  # of the next sample of a plain function; of all of an async one
    replies: dict[int, RewardReply] = field(default_factory=dict[int, RewardReply])


class Child:
    """A process, the calls that are open in it, and the socket to it.

    After an error of a call the child must not be used again, unless it ``outlives_calls``.
    """

    outlives_calls: ClassVar[bool] = False
    """Whether the process continues after a call that failed or was cancelled."""

    def __init__(
        self,
        target: RewardTarget,
        process: Process,
        streams: Streams,
        *,
        count: CallCount,
        on_call_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called when the child is worn or gone; see there."""
        self._target, self._process, self._count = target, process, count
        self._reader, self._writer = streams
        self._on_call_end, self._on_change = on_call_end, on_change
        self.ready = Ready(concurrent=False)
        """Facts about the target, once it is imported."""
        self._open: dict[int, OpenCall] = {}
        self._begun = 0
        self._is_draining = False
        self._end: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self.is_worn = False
        """Whether it is to be replaced, and still ends the calls that it has open."""
        self.is_gone = False
        self.idle_loss: RewardFailed | None = None
        """Why the process ended, if it had been given no call."""

    @classmethod
    async def start(
        cls,
        target: RewardTarget,
        *,
        count: CallCount,
        on_call_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> Self:
        """Start a process and import the target in it; add its calls to ``count``.

        Raises:
            RewardFailed: ``reward_import_failed``, or the process died or hung in its imports.
        """
        process, streams = await spawn(PROGRAM, target)
        events = {"on_call_end": on_call_end, "on_change": on_change}
        child = cls(target, process, streams, count=count, **events)
        await child.begin()
        return child

    async def begin(self) -> None:
        """Import the target in the new process; if this fails, the process ends.

        Raises:
            RewardFailed: As ``start``.
        """
        try:
            await self._greet()
        except BaseException:
            await self.close()
            raise
        self._receiving = asyncio.create_task(self._receive(), name="reward-replies")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._end is not None and self._end.done()

    @property
    def open_calls(self) -> int:
        return len(self._open)

    async def call(
        self, row: dict[str, Any], responses: Sequence[str]
    ) -> list[NamedRewards | None]:
        """Return the rewards of each response, or None for one that the function does not apply to.

        A cancellation ends the call.

        The deadline applies to one sample's call: to each in turn for a plain function, to all
        together for an async one, whose calls run concurrently.

        Raises:
            RewardFailed: For the first sample without a reward, or with two; the process is gone.
        """
        self._begun += 1
        number, deadline_s = self._begun, self._target.deadline_s
        with ExitStack() as undo:
            undo.callback(self._on_call_end)
            encoded = msgspec.Raw(msgspec.json.encode(row))
            request = framed(RewardCall(number, encoded, list(responses)))
            undo.pop_all()
        answers = asyncio.get_running_loop().create_future()
        call = self._open[number] = OpenCall(len(responses), answers, asyncio.timeout(None))
        self._writer.write(request)
        try:
            async with call.deadline:
                self._begin_sample(call)
                return await call.answers
        except TimeoutError:
            late = f"{self._target.target} ran longer than {deadline_s:g} s; killed"
            raise RewardFailed("reward_deadline", late, sample=self._running(call)) from None
        finally:
            if number in self._open:
                self._cancel(number)

    def drain(self) -> None:
        """End the process when its last call has ended."""
        self._is_draining = True
        if not self._open:
            self.kill()

    def kill(self) -> asyncio.Task[None]:
        """Kill the process group; the task is done when the process is gone."""
        if self._end is None:
            with suppress(ProcessLookupError):  # it has already ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._end = asyncio.create_task(self._ended(), name="reward-child-end")
        return self._end

    async def close(self) -> None:
        """Kill the process group and wait until the process is gone."""
        await asyncio.wait({self.kill()})

    async def _greet(self) -> None:
        target = self._target
        try:
            async with asyncio.timeout(target.start_s):
                self._send(target)
                reply = await self._message()
        except TimeoutError:
            limit = f"environment.reward_start_s={target.start_s:g}"
            detail = f"importing {target.target} took longer than {limit}; raise it"
            raise RewardFailed(_IMPORT_FAILED, detail, RewardFault.IMPORT) from None
        if isinstance(reply, Refused):
            why = reply.problem, reply.fix
            raise RewardFailed(_IMPORT_FAILED, reply.detail, RewardFault.IMPORT, refusal=why)
        if isinstance(reply, Ready):
            self.ready = reply

    def _send(self, message: RewardTarget | msgspec.Struct) -> None:
        self._writer.write(framed(message))

    def _begin_sample(self, call: OpenCall) -> None:
        """Count the call of the next sample of a plain function, and set its deadline."""
        self._count.made += not self.ready.concurrent
        if self._target.deadline_s is not None:
            now = asyncio.get_running_loop().time()
            call.deadline.reschedule(now + self._target.deadline_s)

    def _running(self, call: OpenCall) -> int | None:
        """Return the sample whose call is running, or None if several are."""
        return None if self.ready.concurrent else len(call.replies)

    def _cancel(self, number: int) -> None:
        """End a call that is still open and whose caller has left."""
        del number
        self.kill()

    async def _receive(self) -> None:
        lost = RewardFailed(_DIED, f"the process of {self._target.target}")
        try:
            while True:
                match await self._message():
                    case TryBegun():
                        self._count.made += 1
                    case RewardReply() as reply:
                        self._replied(reply)
                    case message:
                        raise RewardFailed(_DIED, f"it sent {message!r}, no answer")  # noqa: TRY301
        except RewardFailed as error:
            lost = error
        finally:
            self._lose(lost)

    async def _message(self) -> Ready | Refused | RewardReply | TryBegun:
        """Return the next message.

        Raises:
            RewardFailed: ``reward_process_died``, also of a message beyond any size.
        """
        try:
            nbytes = body_length(await self._reader.readexactly(LENGTH.size))
            if nbytes > LONGEST_ANSWER_BYTES:
                raise RewardFailed(_DIED, f"it sent {nbytes} bytes, no answer")
            return _FROM_CHILD.decode(await self._reader.readexactly(nbytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._process.wait()
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            detail = f"the process of {self._target.target} ended with {how}"
            raise RewardFailed(_DIED, detail) from None
        except msgspec.DecodeError as error:
            raise RewardFailed(_DIED, f"it sent no answer: {error}") from None

    def _replied(self, reply: RewardReply) -> None:
        call = self._open.get(reply.call)
        if call is not None and call.answers.done() and not self.outlives_calls:
            return  # a sample has failed, or is late: the caller kills this process
        if call is None or reply.sample in call.replies:
            raise RewardFailed("reward_answered_twice", _TWICE.format(reply.sample))
        is_whole = (reply.rewards is None) != (reply.problem is None)
        if not (is_whole and 0 <= reply.sample < call.samples):
            raise RewardFailed(_DIED, f"it sent {reply!r}, no answer")
        call.replies[reply.sample] = reply
        problem = reply.problem
        if problem is not None and problem.fault is RewardFault.NONE and self._target.may_be_none:
            problem = None  # the function does not apply to the sample
        if call.answers.done():
            pass  # cancelled
        elif problem is not None:
            call.answers.set_exception(RewardFailed(*problem, sample=reply.sample))
        elif len(call.replies) == call.samples:
            replies = [call.replies[sample] for sample in range(call.samples)]
            call.answers.set_result([each.rewards for each in replies])
        elif not self.ready.concurrent:
            self._begin_sample(call)
        if len(call.replies) == call.samples and (self.outlives_calls or problem is None):
            self._close_call(reply.call)

    def _close_call(self, number: int) -> None:
        del self._open[number]
        self._on_call_end()
        if self._is_draining and not self._open:
            self.kill()

    def _lose(self, lost: RewardFailed) -> None:
        """Fail the open calls, and end what is left of the process group."""
        self.kill()
        failure_of = self._explain_loss(lost)
        opened, self._open, self.is_gone = self._open, {}, True
        self.idle_loss = None if self._begun else lost
        for number, call in opened.items():
            if not call.answers.done():
                failure = failure_of(number)
                failure.sample = self._running(call)
                call.answers.set_exception(failure)
            self._on_call_end()
        self._on_change()

    def _explain_loss(self, lost: RewardFailed) -> Callable[[int], RewardFailed]:
        """Return a function that says why an open call fails, given its number."""
        return lambda _: lost

    async def _ended(self) -> None:
        await self._process.wait()
        if self._receiving is not None:
            # A process that left the group may hold the socket open.
            await asyncio.wait({self._receiving}, timeout=_LAST_FRAMES_S)
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()


async def spawn(
    program: str, target: RewardTarget, passed: Sequence[int] = ()
) -> tuple[Process, Streams]:
    """Start a process for ``target`` and connect to it.

    It executes the module ``program`` with the number of its end of a socket, the id of this process,
    and the numbers of the descriptors ``passed``, which it inherits.
    """
    ours, theirs = socket.socketpair()
    with ExitStack() as undo, theirs:  # undone if cancelled, too
        undo.callback(ours.close)
        streams = await asyncio.open_unix_connection(sock=ours)
        undo.callback(streams[1].close)
        process = await _execute(program, target, (theirs.fileno(), *passed))
        undo.pop_all()
    return process, streams


async def _execute(program: str, target: RewardTarget, passed: Sequence[int]) -> Process:
    # One thread for numpy and torch, and the parent's import path.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    import_path = os.pathsep.join(path for path in sys.path if path)
    names = os.environ if target.variables is None else target.variables
    inherited = {name: value for name, value in os.environ.items() if name in names}
    channel, *others = map(str, passed)
    return await create_subprocess_exec(
        sys.executable,
        "-P",  # the working directory must not shadow the child's own imports
        "-m",
        program,
        channel,
        str(os.getpid()),
        *others,
        pass_fds=passed,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        cwd=target.working_dir,
        env=threads | inherited | {"PYTHONPATH": import_path},
    )


class StartChild(Protocol):
    """Starts a child as ``Child.start`` does."""

    def __call__(
        self,
        target: RewardTarget,
        *,
        count: CallCount,
        on_call_end: Callable[[], None],
        on_change: Callable[[], None],
    ) -> Coroutine[Any, Any, Child]: ...


class RewardPool:
    """Pool of ``size`` children; further calls wait their turn, first come, first served.

    All methods belong to one event loop.
    """

    def __init__(
        self,
        target: RewardTarget,
        size: int,
        start: StartChild = Child.start,
        calls_at_once: int = 1,
    ) -> None:
        """``calls_at_once``: how many calls a child that ``start`` starts can have open."""
        self._target, self._size, self._start_child = target, size, start
        self._places = asyncio.Semaphore(size * calls_at_once)
        self._slots: list[_Slot] = []
        self.count = CallCount()

    async def start(self) -> None:
        """Start all children.

        Raises:
            RewardFailed: The target cannot be imported. No child is left running.
        """

        def start(on_change: Callable[[], None]) -> Coroutine[Any, Any, Child]:
            events = {"on_call_end": self._places.release, "on_change": on_change}
            return self._start_child(self._target, count=self.count, **events)

        self._slots = [_Slot(start) for _ in range(self._size)]
        try:
            for slot in self._slots:
                await slot.child()
        except BaseException:
            await self.close()
            raise

    async def call(
        self, row: dict[str, Any], responses: Sequence[str]
    ) -> list[NamedRewards | None]:
        """Return the rewards of each response, or None for one that the function does not apply to.

        A cancellation ends the call.

        Raises:
            RewardFailed: With the reason of the first sample that has no reward.
        """
        if not responses:
            return []
        await self._places.acquire()
        # A call in a child that is being replaced has a place too, so the emptiest of the others
        # has room.
        slot = min(self._slots, key=lambda each: (each.load, not each.pids))
        slot.expected += 1
        try:
            child = await slot.child()
        except BaseException:
            self._places.release()
            raise
        finally:
            slot.expected -= 1
        return await child.call(row, responses)

    async def close(self) -> None:
        """Kill every child. No call may be running."""
        for slot in self._slots:
            await slot.close()
        self._slots = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children that run, also of those that are being replaced."""
        return tuple(pid for slot in self._slots for pid in slot.pids)


class _Slot:
    """A place in the pool, whose child is ready, starting, or failed to start.

    A worn child is replaced at once and ends its open calls meanwhile; at most one does so, therefore
    a slot has never more than two.
    """

    def __init__(self, start: Callable[[Callable[[], None]], Coroutine[Any, Any, Child]]) -> None:
        """``start`` starts a child, given what the child calls when it is worn or gone."""
        self._start_child = start
        self._former: list[Child] = []  # replaced, and not ended yet
        self._is_closing = False
        self._start = self._starting()
        self.expected = 0  # calls that wait for the child to start

    @property
    def load(self) -> int:
        current = self._current
        return self.expected + (0 if current is None else current.open_calls)

    @property
    def pids(self) -> list[int]:
        return [each.pid for each in self._children if not each.is_gone]

    async def child(self) -> Child:
        """Return the child, once started. A cancellation here does not cancel the start.

        Raises:
            RewardFailed: It did not start. The next call tries again.
        """
        while True:
            start = self._start
            await asyncio.wait({start})
            if start is self._start:  # else it has been replaced meanwhile
                break
        if not start.cancelled() and start.exception() is not None:
            self._start = self._starting()
        return start.result()

    async def close(self) -> None:
        self._is_closing = True
        self._start.cancel()
        await asyncio.wait({self._start})
        for each in self._children:
            await each.close()

    @property
    def _current(self) -> Child | None:
        is_ready = self._start.done() and not self._start.cancelled()
        return self._start.result() if is_ready and self._start.exception() is None else None

    @property
    def _children(self) -> list[Child]:
        return self._former if self._current is None else [*self._former, self._current]

    def _starting(self) -> asyncio.Future[Child]:
        return asyncio.create_task(self._start_child(self._replace), name="reward-child-start")

    def _replace(self) -> None:
        """Start another child if the current one is gone, or worn and none drains."""
        current = self._current
        if self._is_closing or current is None:
            return
        drains = any(not each.is_gone for each in self._former)
        if current.is_gone or (current.is_worn and not drains):
            self._former = [each for each in self._former if not each.has_ended] + [current]
            self._start = (
                self._starting() if current.idle_loss is None else _fail(current.idle_loss)
            )
            current.drain()


def _fail(lost: RewardFailed) -> asyncio.Future[Child]:
    """Return a start that has failed: the next call raises it and starts another child.

    A target whose process ends after its import would be restarted for ever.
    """
    failed: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
    failed.set_exception(lost)
    failed.exception()  # asyncio logs one that nobody has read
    return failed
