"""Commands in processes that have the heavy modules already: forks of one that imports them once.

For tests of what a command says and writes. What a process loads, and how it starts, is another matter.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from offbeat.launch.process_environment import ENVIRONMENT, PRIVATE
from tests.support.loaded_modules import ROOT

OFFBEAT = "offbeat.launch.commands.main"
_IMPORTED = (
    "pandas",  # wandb imports it where it is installed
    "wandb",
    "transformers.models.auto.modeling_auto",
    "torch._subclasses.fake_tensor",
    "offbeat.launch.commands.main",
    "offbeat.launch.commands.recipes",
    "offbeat.launch.checks.model_proof",
    "offbeat.launch.checks.report",
    "offbeat.launch.checks.torch_ranks",
    "offbeat.launch.launch",
    "offbeat.local.run",
)
_IMPORTED_BY_RUNS = (
    "ray",
    "offbeat.launch.driver",
    "offbeat.trainers.torch.torch_trainer",
    "offbeat.generators.embedded.start",
    "offbeat.rollouts.worker",
)


@dataclass(frozen=True, slots=True)
class StartedCommand:
    """A command in a process that leads a session of its own."""

    pid: int
    ended: Path
    """Gets the exit code."""

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None: it goes on."""
        return int(self.ended.read_text()) if self.ended.exists() else None


class WarmCommands:
    """A process with the heavy modules, and its forks: one for each command. It lives as long as this one.

    ``program``: what Python has to be told to run this module; it chooses where ``offbeat`` comes from.
    """

    def __init__(
        self,
        program: Sequence[str] = ("-m", __name__),
        cwd: Path = ROOT,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *program],
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.communicate)  # it ends with its input

    def run(
        self,
        cwd: Path,
        *arguments: object,
        environment: Mapping[str, str] = MappingProxyType({}),
        program: str = OFFBEAT,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as ``python -m offbeat`` with these arguments would.

        ``program``: another module, whose ``main`` is called.
        """
        given = [*map(str, arguments)]
        with tempfile.TemporaryDirectory() as folder:
            texts = [f"{folder}/out", f"{folder}/err"]
            code = self._ask(given, cwd, environment, texts, program=program)
            out, err = (Path(text).read_text() for text in texts)
        return subprocess.CompletedProcess(given, code, out, err)

    def start(
        self, cwd: Path, arguments: Sequence[str], environment: Mapping[str, str], *texts: Path
    ) -> StartedCommand:
        """Begin a command as ``python -m offbeat`` would, in exactly this environment.

        ``texts``: new files for what it prints and for its errors.
        """
        ended = texts[0].with_suffix(".ended")
        ended.unlink(missing_ok=True)
        written = [*map(str, texts)]
        return StartedCommand(self._ask([*arguments], cwd, environment, written, ended), ended)

    def _ask(
        self,
        arguments: list[str],
        cwd: Path,
        environment: Mapping[str, str],
        texts: list[str],
        ended: Path | None = None,
        program: str = OFFBEAT,
    ) -> int:
        """Have a process forked; return its exit code, or its id if somebody waits for ``ended``."""
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        until = None if ended is None else str(ended)
        how = [arguments, str(cwd), dict(environment), texts, until, program]
        asked.write(json.dumps(how) + "\n")
        asked.flush()
        return int(answers.readline())


@functools.cache
def warm_commands() -> WarmCommands:
    """Return the commands of this package, with the modules of trainers, engines and Ray for runs."""
    return WarmCommands(["-m", __name__, *_IMPORTED_BY_RUNS])


def _serve() -> None:
    """Fork a process for each line of the input, and answer with its exit code or its id."""
    # transformers and Ray read them when they are imported
    for name, value in (ENVIRONMENT | PRIVATE).items():
        os.environ.setdefault(name, value)
    for name in (*_IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    gc.freeze()
    keepers = list[int]()
    for line in sys.stdin:
        arguments, cwd, environment, texts, ended, *program = json.loads(line)
        keepers = [pid for pid in keepers if not os.waitpid(pid, os.WNOHANG)[0]]
        if ended is None:
            child = os.fork()
            if not child:
                os.environ.update(environment)
                _become(arguments, cwd, texts, *program)
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        else:
            told, tell = os.pipe()
            keepers.append(os.fork())
            if not keepers[-1]:
                _keep(arguments, cwd, environment, texts, ended, tell)
            os.close(tell)
            with os.fdopen(told) as reply:
                answer = int(reply.read())
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


def _keep(
    arguments: list[str],
    cwd: str,
    environment: Mapping[str, str],
    texts: list[str],
    ended: str,
    tell: int,
) -> None:
    """Run the command in a child of this process, which ends after it and leaves its exit code."""
    child = os.fork()
    if not child:
        os.close(tell)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        sys.path.insert(0, cwd)
        _become(arguments, cwd, texts)
    os.write(tell, str(child).encode())
    os.close(tell)
    _, status = os.waitpid(child, 0)
    written = Path(f"{ended}.part")
    written.write_text(str(os.waitstatus_to_exitcode(status)))
    written.rename(ended)
    os._exit(0)


def _become(arguments: list[str], cwd: str, texts: list[str], program: str = OFFBEAT) -> None:
    """Run the command in this process, which ends with it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, text in enumerate(texts, start=1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    os.chdir(cwd)
    sys.argv = ["offbeat", *arguments]
    main = importlib.import_module(program).main
    code = 0
    try:
        code = main() or 0
    except SystemExit as end:
        code = int(end.code or 0)
    atexit._run_exitfuncs()  # noqa: SLF001 - to take torch apart as well would take a second
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
