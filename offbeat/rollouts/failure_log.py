"""Records failures: one line of ``RUN/failures.jsonl`` for each failed sample or group."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import structlog

from offbeat.config.user_code import format_traceback
from offbeat.environments.killable import RewardFailed
from offbeat.environments.media_prompts import find_media
from offbeat.environments.text import Tokenizer
from offbeat.messages.failures import (
    ENVIRONMENT_UNAVAILABLE,
    Component,
    OffbeatError,
    RolloutFailed,
)
from offbeat.messages.groups import RolloutTask
from offbeat.messages.text import bound_text, printable
from offbeat.rollouts.response_text import decode_for_reader
from offbeat.rollouts.samples import TOO_FEW
from offbeat.run_files.files import FAILURES, Files
from offbeat.telemetry.logs import Redactor

_MOST: Final = 200
"""Maximum records of one process. The file has a separate limit."""

_TOKENS: Final = 4096  # of a response, from its end
_PROMPT_CHARACTERS: Final = 40
_NOT_KEPT: Final = {ENVIRONMENT_UNAVAILABLE, TOO_FEW}
"""Reasons that are not kept: an outage, and a group whose samples are already kept one by one."""

log = structlog.stdlib.get_logger()


class FailureLog:
    """Appends failures of the environment to the run's file, in the background.

    Outages are not kept, because no row causes them. If the disk fails, the record is lost.
    """

    def __init__(self, files: Files, redactor: Redactor) -> None:
        self._files, self._redactor = files, redactor
        self._kept = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="failure-log")

    def add(self, task: RolloutTask, failure: RolloutFailed, tokenizer: Tokenizer | None) -> None:
        """Keep a failure of the environment, and name its prompt in its message."""
        response_ids, failure.response_ids = failure.response_ids[-_TOKENS:], ()
        failure.prompt = _beginning(task)
        if (
            failure.source is not Component.ENVIRONMENT
            or failure.reason in _NOT_KEPT
            or self._kept >= _MOST
        ):
            return
        self._kept += 1
        row = json.dumps(
            find_media().without_content(task.prompt.data), ensure_ascii=False, default=str
        )
        record = {
            "time": time.time(),
            "group": task.group_id,
            "attempt": task.attempt,
            "sample": failure.sample,
            "kind": failure.kind,
            "reason": failure.reason,
            "detail": failure.detail,
            "environment": task.prompt.environment,
            "evaluation": task.evaluation,
            "row_index": task.prompt.row,
            "row": bound_text(row),
            "response": bound_text(decode_for_reader(tokenizer, response_ids)),
            "traceback": next(_tracebacks(failure), ""),
            "engine": task.engine,
            "version": task.version,
        }
        self._writer.submit(self._append, self._redactor(json.dumps(record)).encode() + b"\n")

    def close(self) -> None:
        """Wait until all records are written."""
        self._writer.shutdown()

    def _append(self, line: bytes) -> None:
        try:
            self._files.append(FAILURES, line)
        except (OSError, OffbeatError) as error:
            log.warning("failures.not_written", error=str(error))


def _tracebacks(failure: BaseException) -> Iterator[str]:
    """Yield tracebacks of user code: sent by a child, or from exceptions in this process."""
    cause = failure.__cause__
    while cause is not None:
        if isinstance(cause, RewardFailed) and cause.traceback:
            yield cause.traceback
        elif not isinstance(cause, OffbeatError):
            yield format_traceback(cause)
        cause = cause.__cause__


def _beginning(task: RolloutTask) -> str:
    """Return the beginning of a prompt's text, or empty text if the row has no text."""
    data = task.prompt.data
    text: object = data.get("prompt") or data.get("question")
    match data.get("messages"):  # in an agent's row it may be anything
        case [*_, {"content": spoken}]:
            text = text or spoken
        case _:
            pass
    if not isinstance(text, str):
        return ""
    cut = printable(text[:_PROMPT_CHARACTERS])
    return f"{cut} ..." if len(text) > _PROMPT_CHARACTERS else cut
