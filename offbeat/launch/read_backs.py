"""Answers of a live run to questions about the weights that its engines serve."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from offbeat.launch.weight_requests import answer, take_questions
from offbeat.messages.text import first_line
from offbeat.weight_sync.served import ServedWeights

log = structlog.stdlib.get_logger()
_DEADLINE_S: Final = 50.0
"""Deadline of every engine's answer: less than ``offbeat verify-weights`` waits. An engine answers
between two decode steps, after it has hashed its weights at some GB/s."""
Replies = Mapping[str, Future[ServedWeights]]
"""Answers by engine."""


class _Open(NamedTuple):
    """A question that engines are answering."""

    name: str
    replies: Replies
    until_s: float


class ReadBacks:
    """Questions about the served weights, passed to all engines and answered without waiting."""

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
        """Pass new questions on, and answer those whose engines have all answered, or are late."""
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
