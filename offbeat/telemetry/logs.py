"""Log set-up of a process: JSON lines into the run directory, short plain lines to the terminal.

Modules take their logger with ``structlog.stdlib.get_logger()`` and log events with fields. What the
standard library's loggers and ``warnings`` say ends in the same places.
"""

import contextlib
import logging
import sys
import threading
from collections.abc import Mapping, MutableMapping
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from offbeat.telemetry.redaction import Redactor

_LEVELS: Final = logging.getLevelNamesMapping()
_PLAIN_FIRST: Final = ("step",)
_NOT_IN_PLAIN: Final = frozenset(
    {"event", "level", "timestamp", "process", "run_id", "exception", "logger"}
)
Event = MutableMapping[str, Any]


def configure_logging(
    process: str,
    log_dir: Path,
    *,
    run_id: str = "",
    to_terminal: bool = False,
    level: str = "INFO",
    redactor: Redactor | None = None,
) -> "LogOutputs":
    """Set this process's logging up; call it once, before the first line is logged.

    Args:
        process: Names the file, ``<log_dir>/<process>.log``; every line carries it.
        log_dir: Made if missing. A line that the disk refuses is lost, and nothing else.
        run_id: Every line carries it.
        to_terminal: Also short plain lines on stderr: the driver.
        level: The least that is logged.
        redactor: Default: knows the secrets in this process's environment.

    Returns:
        Where the lines go. A process that ends need not close it: no line is held back.
    """
    outputs = LogOutputs(
        log_dir / f"{process}.log",
        redactor or Redactor.from_environment(),
        to_terminal=to_terminal,
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
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: outputs,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    for handler in [each for each in root.handlers if isinstance(each, _ToStructlog)]:
        root.removeHandler(handler)
    root.addHandler(_ToStructlog(level=max(_LEVELS[level], logging.WARNING)))
    logging.captureWarnings(capture=True)
    return outputs


def _whole(logger: object, method: str, event: Event) -> tuple[tuple[Event], dict[str, Any]]:
    """The event as it is: each output has its own form for it."""
    del logger, method
    return (event,), {}


class LogOutputs:
    """What a logger writes to: a file of JSON lines and, if asked, the terminal."""

    def __init__(
        self,
        path: Path,
        redactor: Redactor,
        *,
        to_terminal: bool,
        identity: Mapping[str, str],
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "a")
        self._torn = False  # the file may end in the middle of a line
        self._lock = threading.Lock()
        self._redacted, self._to_terminal, self._identity = redactor, to_terminal, identity

    def msg(self, event: Event) -> None:
        """Write one event. Never raises: a full disk must not end a run through its log."""
        self._to_file(self._redacted(json_line({**event, **self._identity})))
        if self._to_terminal:
            with contextlib.suppress(OSError):
                # Looked up at each line: a live display puts itself in the place of stderr.
                sys.stderr.write(self._redacted(plain_line(event)) + "\n")

    def close(self) -> None:
        """Lines from now on reach the terminal at most."""
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
    """The event as JSON; what JSON does not know is written as its ``repr``."""
    return msgspec.json.encode(event, enc_hook=repr).decode()


def plain_line(event: Mapping[str, Any]) -> str:
    """The event as ``12:04:31 warning sink.failing sink=wandb``; a traceback follows on its lines."""
    time_of_day = str(event.get("timestamp", ""))[11:19]
    names = [name for name in _PLAIN_FIRST if name in event]
    names += [name for name in event if name not in _NOT_IN_PLAIN and name not in names]
    fields = [f"{name}={_short(event[name])}" for name in names]
    line = " ".join(
        [time_of_day, str(event.get("level", "")), str(event.get("event", "")), *fields]
    )
    return f"{line}\n{event['exception']}" if "exception" in event else line


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value)
    return f'"{text}"' if " " in text or not text else text


class _ToStructlog(logging.Handler):
    """Hands what the standard library logs to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            min(record.levelno // 10 * 10, logging.CRITICAL),  # structlog knows whole tens only
            record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )
