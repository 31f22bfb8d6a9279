"""Child processes that can be killed at any moment, and a pool of them of constant size.

Not ``multiprocessing.Pool``: a task there cannot be killed, a dead process hangs the pool, and
values travel as pickle. Here a child is a process group of its own; a call that is late, dies or is
cancelled costs exactly one SIGKILL, and a new child is started before the error is raised.
"""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import Process, create_subprocess_exec
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from offbeat.environments.async_calls import CallLimits
from offbeat.environments.frames import (
    LONGEST_ANSWER_BYTES,
    CancelCall,
    Hello,
    Ready,
    Refused,
    RewardCall,
    RewardReply,
    TryBegun,
    framed,
)
from offbeat.environments.reward_value import NamedRewards, RewardFault
from offbeat.messages.failures import OffbeatError
from offbeat.messages.framing import LENGTH, body_length

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
    sample: int | None = None  # that has no reward; None: not known
    traceback: str = ""  # of what user code raised

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass(frozen=True, slots=True)
class RewardTarget:
    """The function that each child runs, and its limits."""

    target: str  # module:name
    working_dir: Path
    options: dict[str, Any]  # keyword arguments of every call
    memory_mib: int  # address space
    deadline_s: float | None  # of one sample's call; None: the caller cancels late calls
    start_s: float  # to start the process and import the target in it
    source: str = ""  # digest of the target's source when the run began; empty: not known
    variables: tuple[str, ...] | None = None  # of the environment, that it inherits; None: all
    limits: CallLimits | None = None  # of an async function's calls; None: none
    may_be_none: bool = False  # whether it may return None: it does not apply to the sample


@dataclass(slots=True)
class CallCount:
    """Number of calls of a function that the children of a pool have begun, tries included."""

    made: int = 0


@dataclass(slots=True)
class RewardChild:
    """One child process and the socket to it. Serves one call at a time."""

    target: RewardTarget
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    concurrent: bool = False
    calls: int = 0  # number of calls begun
    count: CallCount = field(default_factory=CallCount)

    @classmethod
    async def start(
        cls, target: RewardTarget, mark_fd: int | None = None, count: CallCount | None = None
    ) -> Self:
        """Start a process and import the target in it; ``mark_fd`` is for an agent, see ``Hello``.

        ``count`` is what the child's calls are added to.

        Raises:
            RewardFailed: ``reward_import_failed``, or the process died or hung in its imports.
        """
        ours, theirs = socket.socketpair()
        try:
            reader, writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:  # a cancellation, while the pool is closed
            ours.close()
            theirs.close()
            raise
        try:
            with theirs:
                process = await _spawn(theirs, target, mark_fd)
        except BaseException:
            writer.close()
            raise
        child = cls(target, process, reader, writer, count=count or CallCount())
        try:
            await child._greet(mark_fd)
        except BaseException:
            await child.close()
            raise
        return child

    async def answers(self, prompt: dict[str, Any], responses: Sequence[str]) -> list[RewardReply]:
        """Return one answer with a reward per response. After any error the child must not be used again.

        The deadline applies to one sample's call: to each in turn for a plain function, to all
        together for an async one, whose calls run concurrently.

        Raises:
            RewardFailed: For the first sample without a reward, or with two.
        """
        self.calls += 1
        call = RewardCall(self.calls, msgspec.Raw(msgspec.json.encode(prompt)), list(responses))
        answers = dict[int, RewardReply]()
        deadline_s, loop = self.target.deadline_s, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                self.send(call)
                for _ in call.responses:
                    self.count.made += not self.concurrent  # its samples are scored in turn
                    try:
                        answer = await self.receive()
                    except RewardFailed as died:
                        died.sample = None if self.concurrent else len(answers)
                        raise
                    if not isinstance(answer, RewardReply) or answer.sample >= len(responses):
                        raise RewardFailed("reward_process_died", f"it sent {answer!r}, no answer")
                    if answer.call != call.number or answer.sample in answers:
                        raise RewardFailed("reward_answered_twice", _TWICE.format(answer.sample))
                    does_not_apply = answer.fault is RewardFault.NONE and self.target.may_be_none
                    if answer.reward is None and not does_not_apply:
                        raise RewardFailed(
                            answer.reason,
                            answer.detail,
                            answer.fault,
                            answer.sample,
                            answer.traceback,
                        )
                    answers[answer.sample] = answer
                    if deadline_s is not None and not self.concurrent:
                        deadline.reschedule(loop.time() + deadline_s)
        except TimeoutError:
            late = f"{self.target.target} ran longer than {deadline_s:g} s; killed"
            at = None if self.concurrent else len(answers)
            raise RewardFailed("reward_deadline", late, sample=at) from None
        return [answers[sample] for sample in range(len(responses))]

    def send(self, message: Hello | RewardCall | CancelCall) -> None:
        self.writer.write(framed(message))

    async def close(self) -> None:
        """Kill the process group and wait until the process is gone."""
        self.kill()
        await self.process.wait()
        if self.concurrent:
            with suppress(RewardFailed, TimeoutError, ValueError):  # the end of what it has written
                async with asyncio.timeout(_LAST_FRAMES_S):
                    while True:
                        await self.receive()
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    def kill(self) -> None:
        with suppress(ProcessLookupError):  # it has already ended
            os.killpg(self.process.pid, signal.SIGKILL)

    async def _greet(self, mark_fd: int | None) -> None:
        target = self.target
        hello = Hello(
            target.target,
            str(target.working_dir),
            target.options,
            target.memory_mib,
            target.source,
            mark_fd,
            target.limits,
        )
        try:
            async with asyncio.timeout(target.start_s):
                self.send(hello)
                reply = await self.receive()
        except TimeoutError:
            limit = f"environment.reward_start_s={target.start_s:g}"
            detail = f"importing {target.target} took longer than {limit}; raise it"
            raise RewardFailed(_IMPORT_FAILED, detail, RewardFault.IMPORT) from None
        if isinstance(reply, Refused):
            raise RewardFailed(_IMPORT_FAILED, reply.detail, RewardFault.IMPORT)
        self.concurrent = isinstance(reply, Ready) and reply.concurrent

    async def receive(self) -> Ready | Refused | RewardReply:
        """Return the next message that is no notice; tries that are announced before it are counted.

        Raises:
            RewardFailed: ``reward_process_died``, also of a message beyond any size.
        """
        while isinstance(message := await self._message(), TryBegun):
            self.count.made += 1
        return message

    async def _message(self) -> Ready | Refused | RewardReply | TryBegun:
        """Return the next message.

        Raises:
            RewardFailed: ``reward_process_died``, also of a message beyond any size.
        """
        try:
            nbytes = body_length(await self.reader.readexactly(LENGTH.size))
            if nbytes > LONGEST_ANSWER_BYTES:
                raise RewardFailed("reward_process_died", f"it sent {nbytes} bytes, no answer")
            return _FROM_CHILD.decode(await self.reader.readexactly(nbytes))
        except (asyncio.IncompleteReadError, ConnectionError):
            status = await self.process.wait()
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            detail = f"the process of {self.target.target} ended with {how}"
            raise RewardFailed("reward_process_died", detail) from None
        except msgspec.DecodeError as error:
            raise RewardFailed("reward_process_died", f"it sent no answer: {error}") from None


@dataclass(slots=True)
class RewardPool:
    """Pool of ``size`` children; further calls wait their turn, first come, first served."""

    target: RewardTarget
    size: int
    count: CallCount = field(default_factory=CallCount)
    _slots: list["_Slot"] = field(default_factory=list["_Slot"])
    _free: asyncio.Queue["_Slot"] = field(default_factory=asyncio.Queue["_Slot"])

    async def start(self) -> None:
        """Start all children.

        Raises:
            RewardFailed: The target cannot be imported. No child is left running.
        """
        self._slots = [_Slot(self.target, self.count) for _ in range(self.size)]
        try:
            for slot in self._slots:
                await slot.child()
                self._free.put_nowait(slot)
        except BaseException:
            await self.close()
            raise

    async def score(
        self, prompt: dict[str, Any], responses: Sequence[str]
    ) -> list[float | NamedRewards | None]:
        """Return one reward per response, with the final answer where the function names it.

        None if the function does not apply. Otherwise as ``answers``.
        """
        replies = await self.answers(prompt, responses)
        return [
            reply.reward
            if reply.answer is None or reply.reward is None
            else NamedRewards(reply.reward, reply.by_name, reply.answer)
            for reply in replies
        ]

    async def answers(self, prompt: dict[str, Any], responses: Sequence[str]) -> list[RewardReply]:
        """Return one answer with a reward per response.

        A child whose call failed or was cancelled is killed and replaced.

        Raises:
            RewardFailed: With the reason of the first sample that has no reward.
        """
        slot = await self._free.get()
        fit = False
        try:
            child = await slot.child()
            answers = await child.answers(prompt, responses)
            fit = True
        finally:
            if not fit:
                slot.replace()
            self._free.put_nowait(slot)
        return answers

    async def close(self) -> None:
        """Kill every child. No call may be running."""
        for slot in self._slots:
            await slot.close()
        self._slots = []

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the children that are ready."""
        return tuple(pid for slot in self._slots if (pid := slot.pid) is not None)


class _Slot:
    """A place in the pool, whose child is ready, starting, or failed to start.

    Replacing needs no await, so that no cancellation can shrink the pool.
    """

    def __init__(self, target: RewardTarget, count: CallCount) -> None:
        self._target, self._count = target, count
        start = RewardChild.start(target, count=count)
        self._start = asyncio.create_task(start, name="reward-child-start")
        # Separate from the start, so that cancelling the new child never spares the old one.
        self._end: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        ready = self._start.done() and not self._start.cancelled() and not self._start.exception()
        return self._start.result().process.pid if ready else None

    async def child(self) -> RewardChild:
        """Return the child, once started. A cancellation here does not cancel the start."""
        await asyncio.wait({self._start})
        return self._start.result()

    def replace(self) -> None:
        """Kill the child and start another, unless one is already starting."""
        if self._start.done():
            self._end = asyncio.create_task(_ended(self._start), name="reward-child-end")
            self._start = asyncio.create_task(self._restart(self._end), name="reward-child-start")

    async def close(self) -> None:
        self._start.cancel()
        await asyncio.wait({self._start})
        await _ended(self._start)
        if self._end is not None:
            await asyncio.wait({self._end})

    async def _restart(self, end: asyncio.Task[None]) -> RewardChild:
        await asyncio.wait({end})
        return await RewardChild.start(self._target, count=self._count)


async def _ended(start: asyncio.Task[RewardChild]) -> None:
    """Wait until a child that is starting has ended, if it ever started."""
    if not start.cancelled() and start.exception() is None:
        await start.result().close()


async def _spawn(theirs: socket.socket, target: RewardTarget, mark_fd: int | None) -> Process:
    passed = (theirs.fileno(),) if mark_fd is None else (theirs.fileno(), mark_fd)
    return await create_subprocess_exec(
        sys.executable,
        "-P",  # the working directory must not shadow the child's own imports
        "-m",
        "offbeat.environments.reward_child",
        str(theirs.fileno()),
        str(os.getpid()),
        pass_fds=passed,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=_STDERR,
        start_new_session=True,
        cwd=target.working_dir,
        env=_environment(target.variables),
    )


def _environment(variables: tuple[str, ...] | None) -> dict[str, str]:
    """Return the parent's environment with its import path, and one thread for numpy and torch.

    ``variables`` are the names of those that are passed on; None: all.
    """
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    import_path = os.pathsep.join(path for path in sys.path if path)
    passed = {
        name: value for name, value in os.environ.items() if variables is None or name in variables
    }
    return threads | passed | {"PYTHONPATH": import_path}
