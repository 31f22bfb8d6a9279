"""Answers questions to a live run about the weights that its engines serve.

Question and answer pass through the run directory.

``offbeat verify-weights --engine`` writes a question and polls for its answer. The driver removes
the question and asks every engine. The controller and the run's state are not involved.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog

from offbeat.launch.control import check_live
from offbeat.messages.failures import FixableError
from offbeat.messages.text import first_line
from offbeat.run_files.disk import replacing
from offbeat.runs.directory import RunDirUnusable
from offbeat.weight_sync.served import ServedWeights

FOLDER: Final = "verify"
_QUESTION, _ANSWER = ".question", ".answer"
_LOOK_S: Final = 0.1


class RunDoesNotAnswer(FixableError):
    """No driver answered a question about the served weights in time.

    Fix: omit ``--engine``, or run the command on the driver's machine.
    """


def ask(run_dir: Path, within_s: float) -> list[ServedWeights]:
    """Ask the driver of a live run which weights its engines serve.

    Raises:
        RunDirUnusable: This is not the directory of a live run, or it cannot be written.
        RunDoesNotAnswer: No answer came in time. The question is withdrawn.
    """
    check_live(run_dir, "Leave --engine out: its checkpoints are compared")
    token = secrets.token_hex(4)
    question, answer = (run_dir / FOLDER / f"{token}{end}" for end in (_QUESTION, _ANSWER))
    try:
        question.parent.mkdir(exist_ok=True)
        question.touch()
        until_s = time.monotonic() + within_s
        while not answer.exists():
            if time.monotonic() >= until_s:
                fix = "Is the run alive? Its newest checkpoint is compared without --engine"
                raise RunDoesNotAnswer(str(run_dir), f"no answer within {within_s:g} s", fix)
            time.sleep(_LOOK_S)
        served = msgspec.msgpack.decode(answer.read_bytes(), type=list[ServedWeights])
        answer.unlink()
    except OSError as error:
        fix = "Ask on the machine that runs it"
        raise RunDirUnusable(str(run_dir), error.strerror or str(error), fix) from error
    finally:
        with contextlib.suppress(OSError):
            question.unlink(missing_ok=True)
    return served


def take_questions(run_dir: Path) -> list[str]:
    """Remove the open questions and return their names: none if the directory is unreadable."""
    found = list[str]()
    with contextlib.suppress(OSError):
        for file in sorted((run_dir / FOLDER).glob(f"*{_QUESTION}")):
            file.unlink()
            found.append(file.name.removesuffix(_QUESTION))
    return found


def answer(run_dir: Path, question: str, served: Sequence[ServedWeights]) -> None:
    """Write the answer to a question atomically.

    Raises:
        OSError: The disk cannot write.
    """
    with replacing(run_dir / FOLDER / f"{question}{_ANSWER}") as staged:
        staged.write_bytes(msgspec.msgpack.encode(list(served)))


log = structlog.stdlib.get_logger()
_DEADLINE_S: Final = 50.0
"""Deadline for every engine's answer. ``offbeat verify-weights`` waits longer.

An engine answers between two decode steps, after it has hashed its weights at some GB/s."""
Replies = Mapping[str, Future[ServedWeights]]
"""Answers by engine."""


class _Open(NamedTuple):
    """A question that engines are answering."""

    name: str
    replies: Replies
    until_s: float


class ReadBacks:
    """Passes questions about served weights to all engines, and answers them without waiting."""

    def __init__(
        self,
        run_dir: Path,
        ask_engines: Callable[[], Replies],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``ask_engines`` asks every engine which weights it serves, without waiting."""
        self._run_dir, self._ask_engines, self._clock = run_dir, ask_engines, clock
        self._open = list[_Open]()

    def poll(self) -> None:
        """Pass on new questions. Answer a question when all engines have replied or are late."""
        for name in take_questions(self._run_dir):
            self._open.append(_Open(name, self._ask_engines(), self._clock() + _DEADLINE_S))
        for each in tuple(self._open):
            is_answered = all(reply.done() for reply in each.replies.values())
            if is_answered or self._clock() >= each.until_s:
                self._open.remove(each)
                self._answer(each)

    def _answer(self, question: _Open) -> None:
        served = [_read_reply(engine, reply) for engine, reply in question.replies.items()]
        try:
            answer(self._run_dir, question.name, served)
        except OSError as error:
            log.warning("verify_weights.unanswered", error=str(error))


def _read_reply(engine: str, reply: Future[ServedWeights]) -> ServedWeights:
    if not reply.done():
        reply.cancel()
        return ServedWeights(engine, None, problem=f"no answer in {_DEADLINE_S:g} s")
    if reply.cancelled():
        return ServedWeights(engine, None, problem="its loop has ended")
    error = reply.exception()
    return (
        reply.result() if error is None else ServedWeights(engine, None, problem=first_line(error))
    )
