"""Imports code that a user names, and locates its failures."""

import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from offbeat.config.by_value import given, is_by_value
from offbeat.doors import import_object
from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import printable

_TRACEBACK_CHARACTERS: Final = 8192
_importing: Final = list[str]()  # modules of targets
RESULT_FD: Final = "OFFBEAT_RESULT_FD"
"""Environment variable of an agent's program: the descriptor that its result goes to."""

GIVE_AGAIN: Final = (
    "It was given by value in Python: pass it again, as reward=... of the call, or put it into a "
    "module and name it module:name in a new run"
)

MAIN_GUARD: Final = "Put the start of the run under if __name__ == '__main__'"


class TargetNotFound(OffbeatError):
    """``module:name`` could not be imported."""

    target: str
    working_dir: str
    problem: str
    fix: str = "Name it module:name, the module being importable from the working directory"

    def __str__(self) -> str:
        return (
            f"target {self.target!r} cannot be imported from {self.working_dir}: {self.problem}. "
            f"{self.fix}"
        )


class StartedByTarget(OffbeatError):
    """A module that a run imports, or a program of its agent, would start another run."""

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


def check_starts_run() -> None:
    """Raise if this process may not start a run: user code of another run executes in it.

    Raises:
        StartedByTarget: A target is being imported, or the process is a program of an agent.
    """
    if _importing:
        raise StartedByTarget(f"{_importing[-1]}.py starts a run when it is imported", MAIN_GUARD)
    if RESULT_FD in os.environ:
        problem = f"{Path(sys.argv[0]).name} is the program of an agent and starts a run"
        raise StartedByTarget(problem, "Name another program in environment.command")


def load_target(target: str, working_dir: Path) -> Any:  # noqa: ANN401 - the user's object
    """Import ``module:name``, looking in ``working_dir`` first.

    Raises:
        TargetNotFound: For any failure, including errors of the module itself.
    """
    module_name, _, name = target.partition(":")
    if not module_name or not name:
        raise TargetNotFound(target, str(working_dir), "it is not of the form module:name")
    if is_by_value(target):
        try:
            return given(target)
        except KeyError:
            problem = "this process does not have it"
            raise TargetNotFound(target, str(working_dir), problem, GIVE_AGAIN) from None
    if str(working_dir) not in sys.path:
        sys.path.insert(0, str(working_dir))
    _importing.append(module_name)
    try:
        module: ModuleType = import_object(module_name)
    except StartedByTarget as error:
        raise TargetNotFound(target, str(working_dir), error.problem, error.fix) from error
    except BaseException as error:  # a module may raise anything while it is imported
        raise TargetNotFound(target, str(working_dir), describe(error, working_dir)) from error
    finally:
        _importing.pop()
    found: Any = vars(module).get(name)
    if not callable(found):
        kind = "" if found is None else f" that can be called, but a {type(found).__name__}"
        problem = f"module {module_name} has no {name!r}{kind}"
        raise TargetNotFound(target, str(working_dir), problem)
    return found


def describe(error: BaseException, user_dir: Path | None = None) -> str:
    """Describe an error in one line, behind the last line of user code.

    For example ``rewards.py:12 in reward: ValueError: no digits``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = [
        f for f in frames if user_dir is not None and Path(f.filename).is_relative_to(user_dir)
    ]
    at = (inside or frames or [None])[-1]
    where = f"{Path(at.filename).name}:{at.lineno} in {at.name}: " if at is not None else ""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - of an error class of the user's
        text = "its message cannot be printed"
    return where + printable(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def traceback_of(error: BaseException) -> str:
    """Return the end of an error's traceback, in at most ``_TRACEBACK_CHARACTERS``."""
    text = "".join(traceback.format_exception(error))[-_TRACEBACK_CHARACTERS:]
    return text.encode(errors="backslashreplace").decode()  # a lone surrogate is no UTF-8
