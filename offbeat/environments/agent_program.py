"""One episode of an agent that is a program: ``environment.command`` in place of a function.

The program is given the model in ``OPENAI_BASE_URL``, ``OPENAI_API_KEY`` and ``OPENAI_MODEL``, its
task as one JSON object on standard input, and writes its result, a JSON number or
``{"reward": number}``, to the file descriptor that ``OFFBEAT_RESULT_FD`` names. What it prints is
no result: a model's text could be in it.
"""

import os
from asyncio.subprocess import PIPE, create_subprocess_exec
from tempfile import TemporaryFile
from typing import Any, Final

import msgspec

from offbeat.environments.agent_client import AgentClient
from offbeat.environments.reward_value import BadReward
from offbeat.environments.unavailable import EnvironmentUnavailable

TARGET: Final = f"{__name__}:run_program"
"""The agent function that plays an episode of a program."""

RESULT_FD: Final = "OFFBEAT_RESULT_FD"
LARGEST_RESULT_BYTES: Final = 1 << 16

UNAVAILABLE_EXIT: Final = os.EX_TEMPFAIL
"""Exit code (75) by which a program says that what it depends on is out of service."""

_STDERR: Final = 2


async def run_program(task: dict[str, Any], client: AgentClient, *, command: list[str]) -> object:
    """Run the program to its end and return its result, or the reason why it has none.

    Raises:
        EnvironmentUnavailable: It ended with ``UNAVAILABLE_EXIT``.
        OSError: It cannot be started.
    """
    with TemporaryFile() as result:
        process = await create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=_STDERR,
            pass_fds=(result.fileno(),),
            env=_environment(client, result.fileno()),
        )
        await process.communicate(msgspec.json.encode(task))
        status = process.returncode
        if status == UNAVAILABLE_EXIT:
            raise EnvironmentUnavailable(f"{command[0]} ended with exit code {UNAVAILABLE_EXIT}")
        if status:
            how = f"signal {-status}" if status < 0 else f"exit code {status}"
            return BadReward("agent_exited", f"{command[0]} ended with {how}")
        result.seek(0)
        return _result_in(result.read(LARGEST_RESULT_BYTES + 1), command[0])


def _environment(client: AgentClient, result_fd: int) -> dict[str, str]:
    """Return what this process inherited, without its import path: a program has its own."""
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
            return msgspec.json.decode(written)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problem = f"{program} wrote a result that is not JSON: {error}"
    return BadReward("agent_no_result", problem)
