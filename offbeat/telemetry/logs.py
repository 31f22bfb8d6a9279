"""Configures the logging of a process: JSON lines into the run directory.

Modules get their logger with ``structlog.stdlib.get_logger()`` and log events with fields. The
standard library's loggers and ``warnings`` write to the same file. Secrets are removed from texts
before they are written.

The module also sets up the processes of a run.
"""

import atexit
import faulthandler
import gc
import logging
import os
import signal
import threading
import warnings
from collections.abc import Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, Final

import msgspec
import structlog

from offbeat.config.run import RunConfig
from offbeat.config.secrets import of_recipe
from offbeat.messages.redaction import (
    REDACTED,
    compile_secrets,
    of_environment,
    remember_secrets,
)


class Redactor:
    """Removes known secrets, also JSON-escaped ones, and passwords in URLs from any text."""

    def __init__(self, secrets: Iterable[str]) -> None:
        self._pattern = compile_secrets(set(secrets))

    @classmethod
    def from_environment(
        cls, environ: Mapping[str, str] = os.environ, config: RunConfig | None = None
    ) -> "Redactor":
        """Create a redactor for environment variables and recipe keys with the name of a secret."""
        named = set[str]() if config is None else of_recipe(config.model_dump())
        remember_secrets(named)
        return cls(of_environment(environ) | named)

    def __call__(self, text: str) -> str:
        return self._pattern.sub(REDACTED, text)


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
        log_dir: Created if missing. If a write fails, only that line is lost.
        run_id: A field of every line.
        redactor: By default, a redactor of the secrets in this process's environment.

    Returns:
        The outputs of the logger. Closing is optional: lines are not buffered.
    """
    outputs = _open_outputs(process, log_dir, run_id, redactor)
    _send_logs_to(outputs)
    return outputs


def _open_outputs(
    process: str, log_dir: Path, run_id: str, redactor: Redactor | None
) -> "JsonLinesLog":
    return JsonLinesLog(
        log_dir / f"{process}.log",
        redactor or Redactor.from_environment(),
        identity={"process": process, **({"run_id": run_id} if run_id else {})},
    )


def _send_logs_to(outputs: "JsonLinesLog") -> None:
    """Send events of structlog, the standard library's loggers and ``warnings`` to ``outputs``."""
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


class _Logging:
    """Logging configuration of a process at one moment, to restore it later."""

    def __init__(self) -> None:
        self._config = structlog.get_config() if structlog.is_configured() else None
        self._handlers = [*logging.getLogger().handlers]
        self._show_warning = warnings.showwarning

    def restore(self) -> None:
        if warnings.showwarning is not self._show_warning:
            logging.captureWarnings(capture=False)
        logging.getLogger().handlers = self._handlers
        structlog.reset_defaults()
        if self._config is not None:
            structlog.configure(**self._config)


class _OpenBlocks:
    """Open blocks of ``log_to``. Blocks of several runs may end in any order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outputs = list["JsonLinesLog"]()  # the newest last
        self._before: _Logging | None = None  # logging configuration outside of every block

    def enter(self, outputs: "JsonLinesLog") -> None:
        with self._lock:
            self._before = self._before or _Logging()
            self._outputs.append(outputs)
            _send_logs_to(outputs)

    def leave(self, outputs: "JsonLinesLog") -> None:
        with self._lock:
            self._outputs.remove(outputs)
            if self._outputs:
                _send_logs_to(self._outputs[-1])
            elif self._before is not None:
                self._before.restore()
                self._before = None


_OPEN_BLOCKS: Final = _OpenBlocks()


@contextmanager
def log_to(
    process: str, log_dir: Path, *, run_id: str = "", redactor: Redactor | None = None
) -> Generator[None]:
    """Log into a file within the block, then restore the previous logging.

    A process has only one logging configuration. If several runs have open blocks, all lines go to
    the file of the newest block.

    Args:
        process: Name of the file and a field of every line, as in ``configure_logging``.
        log_dir: Created if missing.
        run_id: A field of every line.
        redactor: By default, a redactor of the secrets in this process's environment.
    """
    outputs = _open_outputs(process, log_dir, run_id, redactor)
    _OPEN_BLOCKS.enter(outputs)
    try:
        yield
    finally:
        _OPEN_BLOCKS.leave(outputs)
        outputs.close()


def _whole(logger: object, method: str, event: Event) -> tuple[tuple[Event], dict[str, Any]]:
    """Return the event unchanged, because the output formats it."""
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
        """Write one event. Never raises: a full disk must not end a run."""
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
        """Close the file and discard later lines."""
        with self._lock:
            self._file.close()

    debug = info = warning = warn = error = critical = exception = fatal = msg


def json_line(event: Mapping[str, Any]) -> str:
    """Encode the event as JSON.

    Values without a JSON form, bytes included, are written as ``repr``.
    """
    # msgspec would encode bytes as Base64, in which the redactor cannot find a secret.
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
            min(record.levelno // 10 * 10, logging.CRITICAL),  # structlog accepts only whole tens
            record.getMessage(),
            logger=record.name,
            exc_info=record.exc_info,
        )


_STDERR: Final = 2  # the descriptor, because a notebook's ``sys.stderr`` has none


def prepare(name: str, run_dir: str, config: RunConfig | None = None) -> None:
    """Log into the run directory, and dump the stacks of all threads on SIGUSR1.

    Ctrl-C needs no handling, because Ray shields its workers from it. In a process that has the
    whole recipe, pass it as ``config``, so that the log redacts the recipe's secrets too.
    """
    redactor = Redactor.from_environment(config=config)
    logs = configure_logging(name, Path(run_dir) / "logs", redactor=redactor)
    atexit.register(logs.close)
    dump_stacks_on_signal()


def dump_stacks_on_signal() -> None:
    """Dump the stacks of all threads to stderr on SIGUSR1 instead of ending the process."""
    faulthandler.register(signal.SIGUSR1, file=_STDERR)


@contextmanager
def pause_collections() -> Generator[None]:
    """Disable garbage collection in the block, which imports large libraries.

    An import creates a million objects that are not garbage. Collections would search them again
    and again. Later collections also skip all objects that exist at the end of the block;
    ``gc.unfreeze`` returns them to the collector.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def new_incarnation(name: str) -> str:
    """Return a unique name for a new incarnation."""
    return f"{name}-{os.getpid()}-{os.urandom(4).hex()}"
