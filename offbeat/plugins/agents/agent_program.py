"""Plays one episode of an agent that is a program: ``environment.command`` instead of a function.

The program finds the model in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``. It
reads its task as one JSON object from standard input. It writes its result, a JSON number or
``{"reward": number}``, to the file descriptor that ``OFFBEAT_RESULT_FD`` names. Its standard output
is ignored, because it could contain a model's text. If it fails, the error quotes the end of its
standard error.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, create_subprocess_exec
from tempfile import TemporaryFile
from typing import Any, Final, Self

import msgspec

from offbeat.config.user_code import RESULT_FD
from offbeat.environments.environment_plugin import AgentClient
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.environments.reward_value import BadReward
from offbeat.messages.bad_json import decode_json
from offbeat.messages.redaction import LONGEST_SECRET, cut_tail, redact
from offbeat.messages.text import printable, printable_lines

TARGET: Final = f"{__name__}:run_program"
"""Agent function that plays an episode of a program."""

LARGEST_RESULT_BYTES: Final = 1 << 16

UNAVAILABLE_EXIT: Final = os.EX_TEMPFAIL
"""Exit code (75) with which a program reports that a dependency is out of service."""

_STDERR: Final = 2
_LONGEST_LINE_BYTES: Final = 1 << 16  # a longer line is copied before it ends
_PIPE_BYTES: Final = 1 << 20  # more than a pipe holds
_ERRORS_CHARACTERS: Final = 200
"""Characters at the end of a program's standard error that are quoted if it fails."""
_KEPT_BYTES: Final = 4 * (_ERRORS_CHARACTERS + 2 * LONGEST_SECRET)  # to redact before it is cut


async def run_program(task: dict[str, Any], client: AgentClient, *, command: list[str]) -> object:
    """Run the program to its end and return its result, or the reason why it has none.

    Raises:
        EnvironmentUnavailable: It ended with ``UNAVAILABLE_EXIT``.
        OSError: It cannot be started.
    """
    with TemporaryFile() as result, _StandardError() as errors:
        process = await create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=_STDERR,
            stderr=errors.write_fd,
            pass_fds=(result.fileno(),),
            env=_environment(client, result.fileno()),
        )
        await process.communicate(msgspec.json.encode(task))
        status = process.returncode
        if status == UNAVAILABLE_EXIT:
            ended = f"{command[0]} ended with exit code {UNAVAILABLE_EXIT}"
            raise EnvironmentUnavailable(ended + errors.last())
        if status:
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            return BadReward("agent_exited", f"{command[0]} ended with {how}{errors.last()}")
        result.seek(0)
        return _result_in(result.read(LARGEST_RESULT_BYTES + 1), command[0])


class _StandardError:
    """Standard error of a program: copied to this process's standard error, with its end kept.

    A process that outlives the program may continue to write to it.
    """

    def __init__(self) -> None:
        """Open a pipe. The running event loop reads it until its last writer has closed it."""
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._end = self._unshown = b""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._pass_on)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.write_fd)
        self._show(b"")

    def last(self) -> str:
        """Return the last output as text to append to a sentence, or "" without output."""
        self._pass_on()
        text = printable(cut_tail(self._end.decode(errors="ignore").strip(), _ERRORS_CHARACTERS))
        return f"; the end of its standard error: {text}" if text else ""

    def _pass_on(self) -> None:
        try:
            written = os.read(self._read_fd, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not written:
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
        self._show(written)
        self._end = (self._end + written)[-_KEPT_BYTES:]

    def _show(self, written: bytes) -> None:
        """Copy whole lines, without secrets and without control of the terminal. "" is the end."""
        lines, end, rest = (self._unshown + written).rpartition(b"\n")
        if len(rest) > _LONGEST_LINE_BYTES or not written:
            lines, end, rest = lines + end + rest, b"", b""
        self._unshown = rest
        text = (lines + end).decode(errors="replace").expandtabs().replace("\r", "\n")
        sys.stderr.write(printable_lines(redact(text)))
        sys.stderr.flush()


def _environment(client: AgentClient, result_fd: int) -> dict[str, str]:
    """Return the inherited variables without the import path, which the program must set itself."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return inherited | {
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "OPENAI_MODEL": client.model,
        RESULT_FD: str(result_fd),
    }


def _result_in(written: bytes, program: str) -> object:
    if len(written) > LARGEST_RESULT_BYTES:
        problem = f"{program} wrote a result of more than {LARGEST_RESULT_BYTES} bytes"
    elif not written.strip():
        problem = f"{program} wrote no result to the descriptor that {RESULT_FD} names"
    else:
        try:
            return decode_json(written, object)
        except msgspec.DecodeError as error:
            problem = f"{program} wrote a result that is not JSON: {error}"
    return BadReward("agent_no_result", problem)
