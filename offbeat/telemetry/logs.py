"""Configures the logging of a process: JSON lines into the run directory.

Modules take their logger with ``structlog.stdlib.get_logger()`` and log events with fields. The
standard library's loggers and ``warnings`` write to the same file.
"""

import logging
import threading
import warnings
from collections.abc import Generator, Mapping, MutableMapping
from contextlib import contextmanager
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
) -> "JsonLinesLog":
    """Configure this process's logging; call once, before the first line is logged.

    Args:
        process: Name of the file, ``<log_dir>/<process>.log``, and a field of every line.
        log_dir: Created if missing. A line that the disk refuses is lost, and nothing else.
        run_id: A field of every line.
        redactor: By default, one with the secrets in this process's environment.

    Returns:
        The outputs of the logger. Closing is optional: lines are not buffered.
    """
    outputs = JsonLinesLog(
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


@contextmanager
def log_to(
    process: str, log_dir: Path, *, run_id: str = "", redactor: Redactor | None = None
) -> Generator[None]:
    """Log into a file in the block, then go back to the logging of before.

    Args:
        process: Name of the file and a field of every line, as in ``configure_logging``.
        log_dir: Created if missing.
        run_id: A field of every line.
        redactor: By default, one with the secrets in this process's environment.
    """
    was_configured, before = structlog.is_configured(), structlog.get_config()
    handlers, show_warning = [*logging.getLogger().handlers], warnings.showwarning
    outputs = configure_logging(process, log_dir, run_id=run_id, redactor=redactor)
    try:
        yield
    finally:
        if warnings.showwarning is not show_warning:
            logging.captureWarnings(capture=False)
        logging.getLogger().handlers = handlers
        structlog.reset_defaults()
        if was_configured:
            structlog.configure(**before)
        outputs.close()


def _whole(logger: object, method: str, event: Event) -> tuple[tuple[Event], dict[str, Any]]:
    """Return the event unchanged: the output formats it."""
    del logger, method
    return (event,), {}


class JsonLinesLog:
    """Writes log events to a file, one JSON object per line."""

    def __init__(
        self,
        path: Path,
        redactor: Redactor,
        *,
        identity: Mapping[str, str],
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = FileIO(path, "a")
        self._torn = False  # whether the file may end in the middle of a line
        self._lock = threading.Lock()
        self._redacted, self._identity = redactor, identity

    def msg(self, event: Event) -> None:
        """Write one event. Never raises: a full disk must not end a run because of its log."""
        text = self._redacted(json_line({**event, **self._identity}))
        with self._lock:
            if self._file.closed:
                return
            rest = memoryview(("\n" * self._torn + text + "\n").encode())
            try:
                while rest:
                    rest = rest[self._file.write(rest) :]
                self._torn = False
            except OSError:  # this line is lost; the next one starts on a new line
                self._torn = True

    def close(self) -> None:
        """Close the file; later lines are discarded."""
        with self._lock:
            self._file.close()

    debug = info = warning = warn = error = critical = exception = fatal = msg


def json_line(event: Mapping[str, Any]) -> str:
    """Encode the event as JSON.

    Values without a JSON form, bytes included, are written as ``repr``.
    """
    # Base64, which msgspec would use for bytes, hides a secret from the redactor.
    event = {
        key: repr(value) if isinstance(value, bytes) else value for key, value in event.items()
    }
    try:
        return msgspec.json.encode(event, enc_hook=repr).decode()
    except UnicodeEncodeError:  # a lone surrogate, as in a file name that is not UTF-8
        escaped = {key: ascii(value).strip("'") for key, value in event.items()}
        return msgspec.json.encode(escaped).decode()


class _ToStructlog(logging.Handler):
    """Forwards records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            min(record.levelno // 10 * 10, logging.CRITICAL),  # structlog knows whole tens only
            record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )
