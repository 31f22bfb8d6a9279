"""The driver's answers to questions about the weights that engines serve."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import ray
import structlog
from ray.exceptions import RayError

from offbeat.actors.handles import Handle
from offbeat.launch.weight_requests import answer, take_questions
from offbeat.messages.text import first_line
from offbeat.weight_sync.served import ServedWeights

log = structlog.stdlib.get_logger()
_DEADLINE_S: Final = 50.0
"""Deadline of every engine's answer: less than ``offbeat verify-weights`` waits. An engine answers
between two decode steps, after it has hashed its weights at some GB/s."""


class _Open(NamedTuple):
    """A question that engines are answering."""

    name: str
    replies: Mapping[str, Any]  # by engine
    until_s: float


class ReadBacks:
    """Questions about the served weights, passed to all engines and answered without waiting."""

    def __init__(self, run_dir: Path, engines: Mapping[str, Handle]) -> None:
        self._run_dir, self._engines = run_dir, engines
        self._open = list[_Open]()

    def poll(self) -> None:
        """Pass new questions on, and answer those whose engines have all answered, or are late."""
        for name in take_questions(self._run_dir):
            replies = {
                engine: handle.served_weights.remote() for engine, handle in self._engines.items()
            }
            self._open.append(_Open(name, replies, time.monotonic() + _DEADLINE_S))
        for each in tuple(self._open):
            refs = list(each.replies.values())
            ready: list[Any] = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
            if len(ready) == len(refs) or time.monotonic() >= each.until_s:
                self._open.remove(each)
                self._answer(each, set(ready))

    def _answer(self, question: _Open, ready: set[Any]) -> None:
        served = list[ServedWeights]()
        for engine, ref in question.replies.items():
            if ref not in ready:
                served.append(
                    ServedWeights(engine, None, problem=f"no answer in {_DEADLINE_S:g} s")
                )
                continue
            try:
                served.append(cast("ServedWeights", ray.get(ref)))
            except RayError as error:
                served.append(ServedWeights(engine, None, problem=first_line(error)))
        try:
            answer(self._run_dir, question.name, served)
        except OSError as error:
            log.warning("verify_weights.unanswered", error=str(error))
