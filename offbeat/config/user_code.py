"""Imports code that a user names, and locates its failures.

Defines how a run calls the functions that a user writes, and which functions it refuses.
"""

import difflib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from offbeat.config.by_value import given, is_by_value
from offbeat.doors import import_object
from offbeat.messages.failures import OffbeatError
from offbeat.messages.redaction import cut_tail
from offbeat.messages.text import printable

_RESPONSES: Final = {"completion", "response"}  # the second argument of a reward
_OF_VERL: Final = "solution_str"  # argument of a reward function of verl
_VERL_FORM: Final = (
    "a reward gets a row and a response. Wrap it: def reward(row, response): return compute_score("
    'row["data_source"], response, row["reward_model"]["ground_truth"])'
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The way in which a run calls a function of the user."""

    arguments: str = ""
    """A sentence on its positional arguments, without a full stop; empty if they are unknown."""

    count: int = 0
    """Number of its positional arguments."""

    change: str = ""
    """Advice for a function of a different form."""

    source: str = "add it to its options"
    """Advice on where the function finds a value that it expects as a further argument."""

    result: str = ""
    """Result of a call. A class is then refused, because calling it returns an instance. Empty: a
    class is accepted.
    """

    is_async: bool | None = None
    """Whether it must be async or must not be. None: either."""

    parameters: str = ""
    """Its parameters, as in a signature."""


REWARD: Final = CallForm(
    "a reward gets a row and a response",
    count=2,
    change="Write it as def reward(row, response), and return one number.",
    source="use row[{!r}] if the row has this key, or set it in the options of the reward",
    result="number",
)
LOSS: Final = CallForm(
    "a loss gets tokens and options",
    count=2,
    change="Write it as def loss(tokens, options), and return the loss of each token.",
    source="read options[{!r}]",
    result="tensor",
    is_async=False,
)
ADVANTAGE: Final = CallForm(
    "an advantage gets the rewards of a group",
    count=1,
    change="Write it as def advantage(rewards), and return one number per sample.",
    source="give it a default",
    result="numbers",
    is_async=False,
)


def find_form_problem(
    function: Callable[..., Any], form: CallForm, options: Collection[str]
) -> tuple[str, str] | None:
    """Return why a run cannot call a function with these options, and the fix, or None if it can.

    A function without a known signature, for example in C, is not refused.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if form.result and isinstance(function, type):
        is_plain = function.__new__ is object.__new__ and not hasattr(function, "__await__")
        problem = f"{name} is a class: calling it returns no {form.result}"
        return (problem, f"Give an instance, as {name}(...), or a function.") if is_plain else None
    code = getattr(function, "__code__", None)
    here = f"{name}()" if code is None else f"{name}() in line {code.co_firstlineno}"
    problem = _find_async_problem(function, form, name, here)
    try:
        # Use the wrapper's signature, not the signature of the function inside.
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):
        signature = None
    if not problem and signature is not None:
        problem = _find_call_problem(here, signature, form, options)
    return (problem, form.change or f"Change {name}.") if problem else None


def _find_async_problem(function: object, form: CallForm, name: str, here: str) -> str:
    is_async = inspect.iscoroutinefunction(function)
    if form.is_async and not is_async:
        return f"{here} is not async: write async def {name}({form.parameters})"
    if is_async and form.is_async is False:
        return f"{here} is async: write def {name}"
    return ""


def _find_call_problem(
    here: str, signature: inspect.Signature, form: CallForm, options: Collection[str]
) -> str:
    parameters = signature.parameters.values()
    kinds = inspect.Parameter
    positional = [
        each.name
        for each in parameters
        if each.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    ]
    by_keyword = {
        each.name
        for each in parameters
        if each.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    }
    of_any_count = {
        each.kind for each in parameters if each.kind in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    }
    named = {*positional, *by_keyword}
    if form == REWARD and (problem := _find_reward_problem(here, signature)):
        return problem
    if form.count and len(positional) < form.count and kinds.VAR_POSITIONAL not in of_any_count:
        count = len(positional)
        return f"{here} takes {count} positional argument{'s' * (count != 1)}; {form.arguments}"
    given = {*positional[: form.count], *options}
    required = [
        each.name
        for each in parameters
        if each.default is kinds.empty and each.name in named and each.name not in given
    ]
    if form.count and required:
        return f"{here} needs {required[0]!r}: {form.source.format(required[0])}; {form.arguments}"
    unknown = [key for key in options if key not in by_keyword]
    if unknown and kinds.VAR_KEYWORD not in of_any_count:
        return f"{here} takes no {unknown[0]!r}, which options name"
    return ""


def _find_reward_problem(here: str, signature: inspect.Signature) -> str:
    """Return why a function cannot be a reward, by the form of its arguments and its result."""
    names = [*signature.parameters]
    if _OF_VERL in names:
        return f"{here} has the arguments of a reward of verl; {_VERL_FORM}"
    takes_more = any(each.kind is each.VAR_KEYWORD for each in signature.parameters.values())
    is_batch = takes_more or _returns_list(signature)
    if names[:1] == ["completions"] or (names[:2] == ["prompts", "completions"] and is_batch):
        wrapped = _wrap_trl(here.partition("(")[0], signature.parameters.values())
        return f"{here} rewards a batch, as in TRL; {wrapped}"
    if _returns_list(signature):
        return f"{here} returns a list, but a reward returns one number for one response"
    if names and names[0] in _RESPONSES and len(names) > 1:
        return f"the first argument of {here} is called {names[0]}, but it gets the row"
    return ""


def _wrap_trl(name: str, parameters: Iterable[inspect.Parameter]) -> str:
    """Return how a reward calls a reward function of TRL, which gets its arguments by name."""
    given = {"prompts": '[row["prompt"]]', "completions": "[response]"}
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    needed = [each.name for each in parameters if each.kind in kinds and each.default is each.empty]
    arguments = ", ".join(f"{each}={given.get(each, f'[row[{each!r}]]')}" for each in needed)
    return (
        "a reward gets one row and one response, and returns one number. Wrap it: "
        f"def reward(row, response): return {name}({arguments})[0]. For completions that are messages, "
        'write [[{"role": "assistant", "content": response}]]'
    )


def _returns_list(signature: inspect.Signature) -> bool:
    """Return whether a function says that it returns a list."""
    returned = signature.return_annotation
    name = returned if isinstance(returned, str) else getattr(returned, "__name__", "")
    return name.partition("[")[0].rpartition(".")[2] in {"list", "List"}


_TRACEBACK_CHARACTERS: Final = 8192
_importing: Final = list[str]()  # modules of targets that are being imported
RESULT_FD: Final = "OFFBEAT_RESULT_FD"
"""Environment variable of an agent's program: the file descriptor for its result."""

GIVE_AGAIN: Final = (
    "It was given by value in Python: pass it again, as reward=... of the call, or put it into a "
    "module and name it module:name in a new run"
)

NAME_FIX: Final = "Name it module:name, the module being importable from the working directory"

_EXTRAS: Final = {
    "agents": "openai-agents",
    "httpx": "agents",
    "math_verify": "math",
    "openai": "agents",
    "reasoning_gym": "reasoning-gym",
    "smolagents": "smolagents",
}
"""Extra of this package that installs a package which user code imports."""

MAIN_GUARD: Final = "Put the start of the run under if __name__ == '__main__'"


class TargetNotFound(OffbeatError):
    """``module:name`` could not be imported.

    Fix: start where the module is, or install it.
    """

    target: str
    working_dir: str
    problem: str
    fix: str = NAME_FIX

    def __str__(self) -> str:
        return (
            f"target {self.target!r} cannot be imported from {self.working_dir}: {self.problem}. "
            f"{self.fix}"
        )


class StartedByTarget(OffbeatError):
    """A module that a run imports, or an agent's program, would start another run.

    Fix: put the start under ``if __name__ == '__main__'``.
    """

    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.problem}. {self.fix}"


def check_starts_run() -> None:
    """Raise if this process may not start a run because it executes user code of another run.

    Raises:
        StartedByTarget: A target is being imported, or the process is a program of an agent.
    """
    if _importing:
        raise StartedByTarget(f"{_importing[-1]}.py starts a run when it is imported", MAIN_GUARD)
    if RESULT_FD in os.environ:
        problem = f"{Path(sys.argv[0]).name} is the program of an agent and starts a run"
        raise StartedByTarget(problem, "Name another program in environment.command")


def load_target(
    target: str,
    working_dir: Path,
    form: CallForm | None = None,
    options: Collection[str] = (),
) -> Any:  # noqa: ANN401 - the user's object
    """Import ``module:name``, looking in ``working_dir`` first.

    Args:
        target: Name of the object, which may have been passed by value.
        working_dir: Where the user's modules are.
        form: How a run calls the object; None: do not check.
        options: Keyword arguments of each call.

    Raises:
        TargetNotFound: For any failure, including errors of the module itself, and for an object of
            a different form.
    """
    found = _load(target, working_dir)
    if not callable(found):
        problem = f"it has the type {type(found).__name__}, which cannot be called"
        raise TargetNotFound(target, str(working_dir), problem, "Give a function, or a class")
    if form is not None and (refusal := find_form_problem(found, form, options)):
        problem, fix = refusal
        raise TargetNotFound(target, str(working_dir), problem, fix.removesuffix("."))
    return found


def _load(target: str, working_dir: Path) -> object:
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
    except BaseException as error:  # importing a module may raise anything
        why = _explain_import(error, target, working_dir)
        raise TargetNotFound(target, str(working_dir), *why) from error
    finally:
        _importing.pop()
    found: Any = vars(module).get(name)
    if not callable(found):
        kind = "" if found is None else f" that can be called, but a {type(found).__name__}"
        named = [each for each, value in vars(module).items() if callable(value)]
        near = difflib.get_close_matches(name, named, n=1) if found is None else []
        hint = f"; did you mean {near[0]!r}?" if near else ""
        problem = f"module {module_name} has no {name!r}{kind}{hint}"
        raise TargetNotFound(target, str(working_dir), problem)
    return found


def _explain_import(error: BaseException, target: str, working_dir: Path) -> tuple[str, str]:
    """Return why a module cannot be imported, and the fix."""
    module, _, name = target.partition(":")
    match error:
        case StartedByTarget():
            return error.problem, error.fix
        case SyntaxError():
            file = Path(error.filename or module).name
            return f"{error.msg}, in line {error.lineno} of {file}", f"Fix {error.filename}"
        case ModuleNotFoundError(name=str() as absent) if f"{module}.".startswith(f"{absent}."):
            fix = (
                "Start offbeat in the directory that holds it (for a resume, where the run was started), "
                "or install it"
            )
            if module.endswith(".py"):
                dotted = module.removesuffix(".py").replace("/", ".")
                fix = f"Write the module without .py: {dotted}:{name}"
            return f"no module {module} from {working_dir}", fix
        case ModuleNotFoundError(name=str() as absent):
            package = absent.partition(".")[0]
            extra = f": pip install 'offbeat[{_EXTRAS[package]}]'" if package in _EXTRAS else ""
            frames = traceback.extract_tb(error.__traceback__)
            files = [each.filename for each in frames if not each.filename.startswith("<")]
            fix = f"Install it in the environment that runs offbeat{extra}"
            return f"{Path(files[-1]).name} imports {absent}, which is not installed", fix
        case _:
            return describe(error, working_dir), NAME_FIX


def describe(error: BaseException, user_dir: Path | None = None) -> str:
    """Describe an error in one line, after the last line of user code.

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


def format_traceback(error: BaseException) -> str:
    """Return the end of an error's traceback, in at most ``_TRACEBACK_CHARACTERS``."""
    text = cut_tail("".join(traceback.format_exception(error)), _TRACEBACK_CHARACTERS)
    return text.encode(errors="backslashreplace").decode()  # UTF-8 has no lone surrogates
