"""A run of the real command in a process of its own, seen as its operator sees it: from outside."""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeVar

import psutil

from offbeat.controller.commands import Stop
from offbeat.launch.control import leave
from tests.support.warm_commands import warm_commands

T = TypeVar("T")
_LOOK_S = 0.05  # between two looks, each of which reads the whole process table
_WITHIN_S = 240.0  # a machine may be many times slower than the one that this was written on
_SILENT_S = 240.0  # a run that has written nothing for so long goes on no more


class NeverHappened(AssertionError):
    """A real process did not do in time what the test waits for."""


def until(
    what: str,
    looked_for: Callable[[], T | None],
    *,
    within_s: float,
    explain: Callable[[], str] = str,
) -> T:
    """The first true value of ``looked_for``. The one place where a test waits in real time."""
    give_up_at = time.monotonic() + within_s
    while True:
        if found := looked_for():
            return found
        if time.monotonic() > give_up_at:
            raise NeverHappened(f"not within {within_s:g} s: {what}\n{explain()}")
        time.sleep(_LOOK_S)


def offbeat(*args: object) -> tuple[int, str]:
    """Exit code and output of a command that goes to its end at once."""
    done = warm_commands().run(Path.cwd(), *args)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def _begin_cold(
    cwd: Path, arguments: Sequence[str], environment: Mapping[str, str], *texts: Path
) -> "subprocess.Popen[bytes]":
    """Begin ``python -m offbeat`` as the leader of a session of its own."""
    with texts[0].open("wb") as out, texts[1].open("wb") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "offbeat", *arguments],
            stdout=out,
            stderr=err,
            cwd=cwd,
            env=environment,
            start_new_session=True,
        )


class LiveRun:
    """One ``offbeat`` command and everything it starts.

    A context manager: whatever is left of it is killed at the end, so a failed test leaves nothing.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        run_dir: Path,
        cwd: Path,
        environment: Mapping[str, str] = MappingProxyType({}),
        is_alone: bool = False,
        is_warm: bool = False,
    ) -> None:
        """Start the command, as the leader of a process group of its own.

        ``environment`` is set for it beside what this process has. ``is_alone``: it may run without
        another process. ``is_warm``: its process is a fork of one that has imported the modules; else
        it is ``python -m offbeat``.
        """
        self._is_alone = is_alone
        self.run_dir = run_dir
        self._texts = {1: cwd / f"{run_dir.name}.out", 2: cwd / f"{run_dir.name}.err"}
        self._seen = set[psutil.Process]()
        self._shared_memory = set[str]()  # files
        where = [] if "--resume" in arguments else ["--run-dir", str(run_dir)]
        self.started_at = time.monotonic()
        begin = warm_commands().start if is_warm else _begin_cold
        variables = {**os.environ, **environment}
        texts = self._texts.values()
        for text in texts:
            text.write_bytes(b"")
        self._driver = begin(cwd, [*arguments, *where], variables, *texts)
        self._process = psutil.Process(self._driver.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_everything()

    def kill_everything(self) -> None:
        """SIGKILL for the driver and every process it has started: the machine is gone."""
        self._look()
        for process in (self._process, *self._seen):
            if process.is_running():
                process.kill()
        until("the command is over", lambda: self._driver.poll() is not None, within_s=60)

    @property
    def wall_s(self) -> float:
        return time.monotonic() - self.started_at

    @property
    def out(self) -> str:
        return self._texts[1].read_text()

    @property
    def err(self) -> str:
        return self._texts[2].read_text()

    # --- waiting ---------------------------------------------------------------------------------

    def until(
        self, what: str, looked_for: Callable[[], T | None], *, within_s: float = _WITHIN_S
    ) -> T:
        """``until``, for as long as the driver lives; keeps account of the processes of the run."""

        def look() -> T | None:
            self._look()
            found = looked_for()
            if not found and self._driver.poll() is not None:
                raise NeverHappened(f"the run ended before: {what}\n{self._story()}")
            return found

        return until(what, look, within_s=within_s, explain=self._story)

    def exit_code(self, *, within_s: float | None = None) -> int:
        """Wait for the end of the command and return its exit code.

        ``within_s`` None: however long it takes, as long as the run writes something now and then.
        """
        written, changed_at = -1, time.monotonic()

        def look() -> bool:
            nonlocal written, changed_at
            self._look()
            if (now := self._written()) != written:
                written, changed_at = now, time.monotonic()
            silent = within_s is None and time.monotonic() > changed_at + _SILENT_S
            return silent or self._driver.poll() is not None

        until("the command ends", look, within_s=within_s or math.inf, explain=self._story)
        if (code := self._driver.poll()) is None:
            raise NeverHappened(f"the run wrote nothing for {_SILENT_S:g} s\n{self._story()}")
        return code

    def _written(self) -> int:
        """Bytes of logs and journal."""
        written = 0
        for file in chain(self.run_dir.glob("logs/*"), self.run_dir.glob("journal/*")):
            with contextlib.suppress(FileNotFoundError):  # a segment that is needed no more
                written += file.stat().st_size
        return written

    @property
    def steps_so_far(self) -> int:
        """Steps that the trainer has applied."""
        log = self.run_dir / "logs" / "trained-rank0.jsonl"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def trained_steps(self, steps: int, *, within_s: float = _WITHIN_S) -> None:
        """Wait until the trainer has applied this many steps."""
        self.until(f"{steps} trained steps", lambda: self.steps_so_far >= steps, within_s=within_s)
        self._shared_memory |= set(chain.from_iterable(map(_shared_memory, self._seen)))

    def trains_on(self, steps: int = 4, *, within_s: float = _WITHIN_S) -> None:
        """Wait until the trainer has applied so many steps more than it has by now.

        With a staleness bound below that, these have groups that were rolled out from now on.
        """
        self.trained_steps(self.steps_so_far + steps, within_s=within_s)

    def logged(self, event: str, *, within_s: float = _WITHIN_S) -> str:
        """Wait for a line of this event in the controller's log."""
        log = self.run_dir / "logs" / "controller.log"

        def look() -> str | None:
            lines = log.read_text().splitlines() if log.exists() else []
            return next((line for line in lines if f'"{event}"' in line), None)

        return self.until(f"{event} in the controller's log", look, within_s=within_s)

    # --- processes -------------------------------------------------------------------------------

    def actor(self, cls: str) -> psutil.Process:
        """Wait for the living process of an actor class and return it."""
        return self.process(f"ray::{cls}")

    def process(self, title: str) -> psutil.Process:
        """Wait for a living process with this in its title, and return it."""
        return self.until(
            f"a process {title}", lambda: next((p for p in self._seen if title in _title(p)), None)
        )

    def processes(self) -> list[psutil.Process]:
        """Every living process that the command has started, the command's own first."""
        self._look()
        return [p for p in (self._process, *self._seen) if _title(p)]

    def holding(self, log: str) -> psutil.Process:
        """Wait for the living process that writes this log, and return it."""
        path = str(self.run_dir / "logs" / log)

        def look() -> psutil.Process | None:
            return next((p for p in self._seen if _title(p) and path in _open_files(p)), None)

        return self.until(f"a process that writes {log}", look)

    def stop(self) -> None:
        """Have the run end after the step in progress, as ``offbeat control RUN_DIR stop`` does."""
        leave(self.run_dir, Stop())

    def interrupt(self, number: signal.Signals, *, whole_group: bool = False) -> None:
        """Signal the driver alone, as ``kill`` does, or its whole group, as a terminal does."""
        self._look()
        (os.killpg if whole_group else os.kill)(self._driver.pid, number)

    def nothing_is_left(self, *, within_s: float = 30) -> None:
        """Wait until no process and no shared memory of the run is left."""
        assert self._seen or self._is_alone, "nothing of the run was ever seen"
        until("nothing is left of the run", lambda: not self._left(), within_s=within_s,
              explain=lambda: f"left: {self._left()}")  # fmt: skip

    def talks_to_people(self) -> None:
        """No traceback, nothing of Ray's own, few lines of error."""
        said = self.out + self.err
        noise = [word for word in ("Traceback", "(raylet)", "ray::", "(pid=") if word in said]
        assert not noise, said
        assert len(self.err.splitlines()) <= 4, self.err

    def _left(self) -> list[str]:
        processes = [f"{p.pid} {_title(p)}" for p in self._seen if _title(p)]
        return processes + [file for file in self._shared_memory if Path(file).exists()]

    def _look(self) -> None:
        """Children are found by parentage, so they have to be seen while that holds."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended; what was seen of it is known
            self._seen.update(self._process.children(recursive=True))

    def _story(self) -> str:
        return f"stdout: {self.out[-2000:]}\nstderr: {self.err[-4000:]}"


def _title(process: psutil.Process) -> str:
    """What a living process calls itself; empty for one that is over."""
    try:
        if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
            return " ".join(process.cmdline()).strip() or process.name()
    except psutil.NoSuchProcess:
        pass
    return ""


def _open_files(process: psutil.Process) -> set[str]:
    try:
        return {file.path for file in process.open_files()}
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return set()


def _shared_memory(process: psutil.Process) -> set[str]:
    try:
        maps = process.memory_maps()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return set()
    return {m.path for m in maps if m.path.startswith("/dev/shm/")}  # noqa: S108 - looked at only
