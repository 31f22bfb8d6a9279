"""Log set-up of a process: JSON lines into the run directory.

Modules take their logger with ``structlog.stdlib.get_logger()`` and log events with fields. What the
standard library's loggers and ``warnings`` say ends in the same place.
"""

import logging
import threading
from collections.abc import Mapping, MutableMapping
from io import FileIO
from pathlib import Path
from typing import Any

import msgspec
import structlog

from offbeat.telemetry.redaction import Redactor

Event = MutableMapping[str, Any]


def configure_logging(
    process: str,
    log_dir: Path,
    *,
    run_id: str = "",
    redactor: Redactor | None = None,
) -> "LogOutputs":
    """Set this process's logging up; call it once, before the first line is logged.

    Args:
        process: Names the file, ``<log_dir>/<process>.log``; every line carries it.
        log_dir: Made if missing. A line that the disk refuses is lost, and nothing else.
        run_id: Every line carries it.
        redactor: Default: knows the secrets in this process's environment.

    Returns:
        Where the lines go. A process that ends need not close it: no line is held back.
    """
    outputs = LogOutputs(
        log_dir / f"{process}.log",
        redactor or Redactor.from_environment(),
        identity={"process": process, **({"run_id": run_id} if run_id else {})},
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            _whole,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: outputs,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(level=logging.WARNING))
    logging.captureWarnings(capture=True)
    return outputs


def _whole(logger: object, method: str, event: Event) -> tuple[tuple[Event], dict[str, Any]]:
    """The event as it is: the output gives it its form."""
    del logger, method
    return (event,), {}


class LogOutputs:
    """The outputs of a logger: a file of JSON lines."""

    def __init__(
        self,
        path: Path,
        redactor: Redactor,
        *,
        identity: Mapping[str, str],
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "a")
        self._torn = False  # the file may end in the middle of a line
        self._lock = threading.Lock()
        self._redacted, self._identity = redactor, identity

    def msg(self, event: Event) -> None:
        """Write one event. Never raises: a full disk must not end a run through its log."""
        self._to_file(self._redacted(json_line({**event, **self._identity})))

    def close(self) -> None:
        """Lines from now on are let go."""
        with self._lock:
            self._file.close()

    def _to_file(self, text: str) -> None:
        with self._lock:
            if self._file.closed:
                return
            rest = memoryview(("\n" * self._torn + text + "\n").encode())
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._torn = False
            except OSError:  # this line is lost; the next one begins on a line of its own
                self._torn = True

    debug = info = warning = warn = error = critical = exception = fatal = msg


def json_line(event: Mapping[str, Any]) -> str:
    """The event as JSON; what JSON does not know, bytes included, is written as its ``repr``."""
    # Base64, which msgspec would make of bytes, hides a secret from the redactor.
    event = {
        key: repr(value) if isinstance(value, bytes) else value for key, value in event.items()
    }
    try:
        return msgspec.json.encode(event, enc_hook=repr).decode()
    except UnicodeEncodeError:  # half of a character, as in a file name that is no UTF-8
        escaped = {key: ascii(value).strip("'") for key, value in event.items()}
        return msgspec.json.encode(escaped).decode()


class _ToStructlog(logging.Handler):
    """Hands what the standard library logs to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            min(record.levelno // 10 * 10, logging.CRITICAL),  # structlog knows whole tens only
            record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )
