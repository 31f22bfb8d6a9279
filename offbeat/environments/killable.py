"""Child processes that run user code and can be killed at any moment, and a pool of them.

``multiprocessing.Pool`` is not used, because its tasks cannot be killed, a dead process hangs it,
and values are sent as pickle. Here each child leads a process group, which one SIGKILL ends.

The pool does not depend on what its children do: a ``ChildJob`` names the program that they
execute. A call has a row and several texts, and each text gets a reply. By default a child has one
call at a time, and is killed if the call is late, fails or is cancelled. The table shows what
happens in a child with many calls at once:

| event                                     | its call        | other calls in the process         |
|-------------------------------------------|-----------------|------------------------------------|
| it returns or raises                      | is answered     | are not affected                   |
| it is cancelled, and ends                 | is cancelled    | continue; no new calls are sent    |
| it is cancelled, and does not end in time | is cancelled    | the process is killed: ``SHARED``  |
| the process dies while it executes        | has failed      | ``SHARED``                         |
| the process dies of SIGKILL, or while no  | ``SHARED``, or  | ``SHARED``                         |
| call executes                             | failed if alone |                                    |

A call that fails with ``RewardFault.SHARED`` is not at fault. The process marks in shared memory
which call executes (``CallMark``). If a call is alone in its process, the process is killed instead
of cancelling the call.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import Any, Final, Self

import msgspec

from offbeat.environments.frames import (
    LONGEST_ANSWER_BYTES,
    CallMark,
    CancelCall,
    Ready,
    Refused,
    RewardCall,
    RewardReply,
    RewardTarget,
    TryBegun,
    frame_message,
)
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import NamedRewards, RewardFault
from offbeat.messages.failures import Component, FailureKind, OffbeatError, RolloutFailed
from offbeat.messages.framing import LENGTH, body_length
from offbeat.messages.groups import PROCESS_LOST, RolloutTask

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]

_DIED: Final = "reward_process_died"
_IMPORT_FAILED: Final = "reward_import_failed"
_STDERR = 2
_TWICE = (
    "sample {} was answered twice, or in another call: user code writes to this program's socket"
)
_FROM_CHILD = msgspec.json.Decoder(Ready | Refused | RewardReply | TryBegun)
_LAST_FRAMES_S: Final = 1.0
"""Longest wait for a killed child's last output. Only processes outside its group can delay it."""
_GRACE_S: Final = 2.0
"""Time for a cancelled call to end before its process is killed, with all other calls in it."""

_KINDS: Final = {
    RewardFault.SHARED: FailureKind.INFRASTRUCTURE,
    RewardFault.IMPORT: FailureKind.BUG,
    RewardFault.SAMPLE: FailureKind.DATA,
    RewardFault.NONE: FailureKind.DATA,
}


@dataclass(frozen=True, slots=True)
class ChildJob:
    """Work of a pool's children: their program, and how many calls each child may receive."""

    program: str = "offbeat.environments.reward_child"  # a module, which calls ``run_child``
    call_name: str = "call"  # in messages
    late: str = "{target} ran longer than {deadline_s:g} s; killed"  # message of a late call
    calls_at_once: int = 1
    calls_in_all: int | None = None  # after so many a child accepts no more; None: no limit
    grace_s: float = _GRACE_S  # for a cancelled call to end, if other calls run in the process
    outlives_calls: bool = False  # whether a process continues after a call that failed


@dataclass(frozen=True, slots=True)
class ChildEvents:
    """Functions that a child calls on an event."""

    on_begin: Callable[[], None] = lambda: None  # a call of user code begins, including a retry
    on_end: Callable[[], None] = lambda: None  # a call of the child has ended
    on_change: Callable[[], None] = lambda: None  # the child is worn or gone


_SCORING: Final = ChildJob()
_UNHEARD: Final = ChildEvents()


class RewardFailed(OffbeatError):
    """A group has no rewards. ``reason`` is the name of the failure counter.

    Fix: correct the reward at the named line.
    """

    reason: str
    detail: str
    fault: RewardFault = RewardFault.SAMPLE
    traceback: str = ""  # of the error in user code
    sample: int | None = None  # sample without a reward; None: unknown
    refusal: tuple[str, str] | None = None  # problem and fix of a target that cannot be imported

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"

    def fail(self, task: RolloutTask) -> EnvironmentUnavailable | RolloutFailed:
        """Return the error that an environment raises for the group of ``task``."""
        if self.fault is RewardFault.SERVICE:
            return EnvironmentUnavailable(self.detail)
        return RolloutFailed(
            _KINDS[self.fault],
            task.prompt_index,
            task.attempt,
            self.reason,
            self.detail,
            Component.ENVIRONMENT,
            self.sample,
        )


@dataclass(slots=True)
class OpenCall:
    """Call that is open in a child, such as a group to score."""

    samples: int
    answers: asyncio.Future[list[NamedRewards | None]]
    deadline: asyncio.Timeout  # of a plain function's next sample; of all of an async one's
    replies: dict[int, RewardReply] = field(default_factory=dict[int, RewardReply])


class Child:
    """A process, its open calls, and the socket to it.

    After a call fails, the child must not be used again unless its job outlives calls. A child is
    worn (due to be replaced) if it has cancelled a call that ran next to others, because that call
    may have left threads or processes. It is also worn after as many calls as its job allows.
    """

    def __init__(
        self,
        target: RewardTarget,
        job: ChildJob,
        process: Process,
        streams: Streams,
        mark: CallMark,
        events: ChildEvents,
    ) -> None:
        self._target, self._job, self._process = target, job, process
        self._reader, self._writer = streams
        self._mark, self._events = mark, events
        self.ready = Ready(concurrent=False)
        """Facts about the target, once it is imported."""
        self._open: dict[int, OpenCall] = {}
        self._begun = 0
        self._killed_for: int | None = None  # the cancelled call that did not end
        self._is_draining = False
        self._end: asyncio.Task[None] | None = None
        self._receiving: asyncio.Task[None] | None = None
        self.is_worn = False
        """Whether the child will be replaced. It still finishes its open calls."""
        self.is_gone = False
        self.idle_loss: RewardFailed | None = None
        """Why the process ended, if it ended before it received any call."""

    @classmethod
    async def start(
        cls, target: RewardTarget, job: ChildJob = _SCORING, events: ChildEvents = _UNHEARD
    ) -> Self:
        """Start a process and import the target in it.

        Raises:
            RewardFailed: ``reward_import_failed``, or the process died or hung during its imports.
        """
        child = cls(target, job, *await _spawn(job.program, target), events)
        try:
            await child._greet()
        except BaseException:
            await child.close()
            raise
        child._receiving = asyncio.create_task(child._receive(), name="reward-replies")
        return child

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
        """Return the rewards of each response, or None if the function does not apply to it.

        Cancelling this coroutine ends the call.

        For a plain function, the deadline applies to each sample in turn. For an async function, it
        applies to all samples together, because their calls run concurrently.

        Raises:
            RewardFailed: A sample has no reward, or two. The error is about the first such sample.
                The process is gone.
        """
        self._begun += 1
        number = self._begun
        with ExitStack() as undo:
            undo.callback(self._events.on_end)
            encoded = msgspec.Raw(msgspec.json.encode(row))
            request = frame_message(RewardCall(number, encoded, list(responses)))
            undo.pop_all()
        answers = asyncio.get_running_loop().create_future()
        call = self._open[number] = OpenCall(len(responses), answers, asyncio.timeout(None))
        self._writer.write(request)
        try:
            async with call.deadline:
                self._begin_sample(call)
                return await call.answers
        except TimeoutError:
            raise self._explain_late(number, call) from None
        finally:
            if number in self._open:
                self._cancel(number)

    def drain(self) -> None:
        """End the process once its last call has ended."""
        self._is_draining = True
        if not self._open:
            self.kill()

    def kill(self) -> asyncio.Task[None]:
        """Kill the process group. The returned task is done when the process is gone."""
        if self._end is None:
            with suppress(ProcessLookupError):  # it has already ended
                os.killpg(self._process.pid, signal.SIGKILL)
            self._end = asyncio.create_task(self._wait_for_end(), name="reward-child-end")
        return self._end

    async def close(self) -> None:
        """Kill the process group and wait until the process is gone."""
        await asyncio.wait({self.kill()})

    async def _greet(self) -> None:
        target = self._target
        try:
            async with asyncio.timeout(target.start_s):
                self._writer.write(frame_message(target))
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

    def _begin_sample(self, call: OpenCall) -> None:
        """Count the call of the next sample of a plain function, and set its deadline."""
        if not self.ready.concurrent:
            self._events.on_begin()
        if self._target.deadline_s is not None:
            now = asyncio.get_running_loop().time()
            call.deadline.reschedule(now + self._target.deadline_s)

    def _explain_late(self, number: int, call: OpenCall) -> RewardFailed:
        """Return the failure of a late call, not at fault if another call blocks the event loop."""
        target, deadline_s = self._target.target, self._target.deadline_s
        late, blocking = self._job.late.format(target=target, deadline_s=deadline_s), ""
        if self._job.calls_at_once > 1:
            blocking = self._mark.blocking
        if blocking and number != self._mark.number:
            who = f"{late}, because another {self._job.call_name}"
            detail = f"{who} keeps the event loop of its process: {blocking}"
            return RewardFailed(PROCESS_LOST, detail, RewardFault.SHARED)
        if blocking:
            late += f", and keeps the event loop of its process: {blocking}"
        return RewardFailed("reward_deadline", late, sample=self._running(call))

    def _running(self, call: OpenCall) -> int | None:
        """Return the sample with the running call, or None if several are."""
        return None if self.ready.concurrent else len(call.replies)

    def _cancel(self, number: int) -> None:
        """End a call that is still open after its caller was cancelled."""
        if self._job.calls_at_once == 1:
            self.kill()
            return
        self._writer.write(frame_message(CancelCall(number)))
        asyncio.get_running_loop().call_later(self._job.grace_s, self._kill_for, number)
        self.is_worn = True
        self._events.on_change()

    def _kill_for(self, number: int) -> None:
        if number in self._open:
            self._killed_for = number
            self.kill()

    async def _receive(self) -> None:
        lost = RewardFailed(_DIED, f"the process of {self._target.target}")
        try:
            while True:
                match await self._message():
                    case TryBegun():
                        self._events.on_begin()
                    case RewardReply() as reply:
                        self._handle_reply(reply)
                    case message:
                        raise RewardFailed(_DIED, f"it sent {message!r}, no answer")  # noqa: TRY301
        except RewardFailed as error:
            lost = error
        finally:
            self._lose(lost)

    async def _message(self) -> Ready | Refused | RewardReply | TryBegun:
        """Return the next message.

        Raises:
            RewardFailed: ``reward_process_died``, also if a message exceeds the size limit.
        """
        try:
            nbytes = body_length(await self._reader.readexactly(LENGTH.size))
            if nbytes > LONGEST_ANSWER_BYTES:
                raise RewardFailed(_DIED, f"it sent {nbytes} bytes, not an answer")
            return _FROM_CHILD.decode(await self._reader.readexactly(nbytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self._process.wait()
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            detail = f"the process of {self._target.target} ended with {how}"
            raise RewardFailed(_DIED, detail) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RewardFailed(_DIED, f"it sent no answer: {error}") from None

    def _handle_reply(self, reply: RewardReply) -> None:
        call = self._open.get(reply.call)
        if call is not None and call.answers.done() and not self._job.outlives_calls:
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
        if len(call.replies) == call.samples and (self._job.outlives_calls or problem is None):
            self._close_call(reply.call)

    def _close_call(self, number: int) -> None:
        del self._open[number]
        self._events.on_end()
        if self._is_draining and not self._open:
            self.kill()
        if self._job.calls_in_all is not None and self._begun >= self._job.calls_in_all:
            self.is_worn = True
            self._events.on_change()

    def _lose(self, lost: RewardFailed) -> None:
        """Fail the open calls and kill the rest of the process group."""
        self.kill()
        opened, self._open, self.is_gone = self._open, {}, True
        self.idle_loss = None if self._begun else lost
        executing, name = self._mark.number, self._job.call_name
        if self._killed_for is not None:
            blocked = f"another {name} could not be ended, because this one kept the event loop"
            at = f", at {self._mark.blocking}" if self._mark.blocking else ""
            lost = RewardFailed(lost.reason, f"{blocked} of {self._target.target}{at}; killed")
        elif self._process.returncode == -signal.SIGKILL:
            executing = 0  # the killer is unknown, so no call is blamed
        detail = f"its process ended with {len(opened)} {name}s in it: {lost.detail}"
        for number, call in opened.items():
            is_shared = len(opened) > 1 and number != executing
            failure = RewardFailed(PROCESS_LOST, detail, RewardFault.SHARED) if is_shared else lost
            if not call.answers.done():
                failure.sample = self._running(call)
                call.answers.set_exception(failure)
            self._events.on_end()
        self._events.on_change()

    async def _wait_for_end(self) -> None:
        await self._process.wait()
        if self._receiving is not None:
            # A process that left the group may hold the socket open.
            await asyncio.wait({self._receiving}, timeout=_LAST_FRAMES_S)
            self._receiving.cancel()
            await asyncio.wait({self._receiving})
        self._writer.close()
        with suppress(ConnectionError):
            await self._writer.wait_closed()
        self._mark.close()


async def _spawn(program: str, target: RewardTarget) -> tuple[Process, Streams, CallMark]:
    """Start a process for ``target`` and connect to it.

    The process executes the module ``program`` with three arguments: the number of its socket end,
    the id of this process, and the descriptor of a mark's file.
    """
    # One thread for numpy and torch, and the parent's import path.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    import_path = os.pathsep.join(path for path in sys.path if path)
    names = os.environ if target.variables is None else target.variables
    inherited = {name: value for name, value in os.environ.items() if name in names}
    with TemporaryFile() as marked, ExitStack() as undo:  # undone also if cancelled
        ours, theirs = socket.socketpair()
        undo.callback(ours.close)
        with theirs:
            streams = await asyncio.open_unix_connection(sock=ours)
            undo.callback(streams[1].close)
            mark = CallMark(marked.fileno())
            undo.callback(mark.close)
            process = await create_subprocess_exec(
                sys.executable,
                "-P",  # the working directory must not shadow the child's own imports
                "-m",
                program,
                str(theirs.fileno()),
                str(os.getpid()),
                str(marked.fileno()),
                pass_fds=(theirs.fileno(), marked.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,
                cwd=target.working_dir,
                env=threads | inherited | {"PYTHONPATH": import_path},
            )
        undo.pop_all()
    return process, streams, mark


class ChildPool:
    """Pool of ``size`` children. If all are busy, further calls wait in order of arrival.

    A child that is worn or gone is replaced at once. A worn child still finishes its open calls. At
    most ``size`` worn children do so at a time. All methods belong to one event loop.
    """

    def __init__(self, target: RewardTarget, size: int, job: ChildJob = _SCORING) -> None:
        self._target, self._size, self._job = target, size, job
        self._places = asyncio.Semaphore(size * job.calls_at_once)
        self._events = ChildEvents(self._count, self._places.release, self._replace)
        self._starts: list[asyncio.Future[Child]] = []  # of the current children
        self._former: list[Child] = []  # replaced but not ended yet
        self._expected: list[asyncio.Future[Child]] = []  # start that each waiting call waits for
        self.calls_begun = 0
        """Calls of user code that the children have begun, including retries."""

    async def start(self) -> None:
        """Start all children.

        Raises:
            RewardFailed: The target cannot be imported. No child is left running.
        """
        self._starts = [self._start_child() for _ in range(self._size)]
        try:
            for start in self._starts:
                await start
        except BaseException:
            await self.close()
            raise

    async def call(
        self, row: dict[str, Any], responses: Sequence[str]
    ) -> list[NamedRewards | None]:
        """Return the rewards of each response, or None if the function does not apply to it.

        Cancelling this coroutine ends the call.

        Raises:
            RewardFailed: A sample has no reward. The error has the reason of the first such sample.
        """
        if not responses:
            return []
        await self._places.acquire()
        try:
            child = await self._emptiest()
        except BaseException:
            self._places.release()
            raise
        return await child.call(row, responses)

    async def close(self) -> None:
        """Kill every child. No call may be running."""
        starts, self._starts = self._starts, []
        for start in starts:
            start.cancel()
        await asyncio.gather(*starts, return_exceptions=True)
        for child in (*self._former, *map(_get_started, starts)):
            if child is not None:
                await child.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the process ids of running children, including replaced ones."""
        children = (*self._former, *map(_get_started, self._starts))
        return tuple(child.pid for child in children if child is not None and not child.is_gone)

    async def _emptiest(self) -> Child:
        """Return the child with the fewest calls, once it has started.

        It has room, because a call in a child that is being replaced also occupies a place in the
        pool. If this coroutine is cancelled, the start continues.

        Raises:
            RewardFailed: The child did not start. The next call tries again.
        """
        while True:
            start = min(self._starts, key=self._load)
            self._expected.append(start)
            try:
                await asyncio.wait({start})
            finally:
                self._expected.remove(start)
            if start in self._starts:  # else it has been replaced meanwhile
                break
        if _get_started(start) is None:
            self._starts[self._starts.index(start)] = self._start_child()
        return start.result()

    def _load(self, start: asyncio.Future[Child]) -> tuple[int, bool]:
        child, expected = _get_started(start), self._expected.count(start)
        return (expected, True) if child is None else (expected + child.open_calls, child.is_gone)

    def _count(self) -> None:
        self.calls_begun += 1

    def _start_child(self) -> asyncio.Future[Child]:
        start = Child.start(self._target, self._job, self._events)
        return asyncio.create_task(start, name="reward-child-start")

    def _replace(self) -> None:
        """Replace children that are gone, and worn ones while fewer than ``size`` drain."""
        self._former = [each for each in self._former if not each.has_ended]
        for place, start in enumerate(self._starts):
            child = _get_started(start)
            is_full = sum(not each.is_gone for each in self._former) >= self._size
            if child is None or not (child.is_gone or (child.is_worn and not is_full)):
                continue
            self._former.append(child)
            loss = child.idle_loss
            self._starts[place] = self._start_child() if loss is None else _fail(loss)
            child.drain()


def _get_started(start: asyncio.Future[Child]) -> Child | None:
    """Return the child if its start has succeeded, else None."""
    is_up = start.done() and not start.cancelled() and start.exception() is None
    return start.result() if is_up else None


def _fail(lost: RewardFailed) -> asyncio.Future[Child]:
    """Return a failed start: the next call raises its error and starts another child.

    Without this, a target whose process ends after its import would be restarted forever.
    """
    failed: asyncio.Future[Child] = asyncio.get_running_loop().create_future()
    failed.set_exception(lost)
    failed.exception()  # asyncio logs an exception that nobody has read
    return failed
