"""Commands in processes that have the heavy modules already: forks of one that imports them once.

For tests of what a command says and writes. What a process loads, and how it starts, is another matter.
"""

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from offbeat.launch.process_environment import ENVIRONMENT
from tests.support.loaded_modules import ROOT

_IMPORTED = (
    "pandas",  # wandb imports it where it is installed
    "wandb",
    "transformers.models.auto.modeling_auto",
    "torch._subclasses.fake_tensor",
    "offbeat.launch.commands.main",
    "offbeat.launch.commands.recipes",
    "offbeat.launch.checks.activations",
    "offbeat.launch.checks.report",
    "offbeat.launch.checks.torch_ranks",
    "offbeat.launch.launch",
    "offbeat.local.run",
)


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
        self, cwd: Path, *arguments: object, environment: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, as ``python -m offbeat`` with these arguments would."""
        given = [*map(str, arguments)]
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with tempfile.TemporaryDirectory() as folder:
            texts = [f"{folder}/out", f"{folder}/err"]
            asked.write(json.dumps([given, str(cwd), dict(environment), texts]) + "\n")
            asked.flush()
            code = int(answers.readline())
            out, err = (Path(text).read_text() for text in texts)
        return subprocess.CompletedProcess(given, code, out, err)


@functools.cache
def warm_commands() -> WarmCommands:
    """Return the commands of this package."""
    return WarmCommands()


def _serve() -> None:
    """Fork a process for each line of the input, and answer with its exit code."""
    for name, value in ENVIRONMENT.items():  # transformers reads them when it is imported
        os.environ.setdefault(name, value)
    for name in _IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    for line in sys.stdin:
        arguments, cwd, environment, texts = json.loads(line)
        child = os.fork()
        if not child:
            _become(arguments, cwd, environment, texts)
        _, status = os.waitpid(child, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


def _become(
    arguments: list[str], cwd: str, environment: Mapping[str, str], texts: list[str]
) -> None:
    """Run the command in this process, which ends with it."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number, text in enumerate(texts, start=1):
        os.dup2(os.open(text, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(cwd)
    os.environ.update(environment)
    sys.argv = ["offbeat", *arguments]
    main = importlib.import_module("offbeat.launch.commands.main").main
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    atexit._run_exitfuncs()  # noqa: SLF001 - to take torch apart as well would take a second
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _serve()
