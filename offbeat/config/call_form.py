"""Forms of the functions that a user writes: how a run calls them, and which ones it refuses."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final

_RESPONSES: Final = {"completion", "response"}  # the second argument of a reward
_OF_TRL: Final = {"prompts", "completions"}  # arguments of a reward function of TRL
_OF_VERL: Final = "solution_str"  # argument of a reward function of verl
_TRL_FORM: Final = ", one at a time; this is the form of TRL, for a batch"
_VERL_FORM: Final = (
    "a reward gets a row and a response. Wrap it: def reward(row, response): return compute_score("
    'row["data_source"], response, row["reward_model"]["ground_truth"])'
)


@dataclass(frozen=True, slots=True)
class CallForm:
    """The way in which a run calls a function of the user."""

    arguments: str = ""
    """A sentence on its positional arguments, without a full stop; empty: nothing is known of them."""

    count: int = 0
    """Number of its positional arguments."""

    change: str = ""
    """What to do about a function of another form."""

    source: str = "add it to its options"
    """Where the function finds a value that it takes as a further argument."""

    result: str = ""
    """What a call returns; a class is refused, whose call returns an instance. Empty: it may be one."""

    is_async: bool | None = None
    """Whether it has to be async, or must not be; None: it may be."""

    parameters: str = ""
    """Its parameters, as in a signature."""


REWARD: Final = CallForm(
    "a reward gets a row and a response",
    count=2,
    change="Write it as def reward(row, response), and return one number.",
    source="use row[{!r}] if it is of the row, or add it to its options",
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
    """Return why a run cannot call a function with these options, and the fix; None if it can.

    A function whose signature is not known, such as one in C, is not refused.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if form.result and isinstance(function, type):
        is_plain = function.__new__ is object.__new__ and not hasattr(function, "__await__")
        problem = f"{name} is a class: a call of it returns no {form.result}"
        return (problem, f"Give an instance, as {name}(...), or a function.") if is_plain else None
    code = getattr(function, "__code__", None)
    here = f"{name}()" if code is None else f"{name}() in line {code.co_firstlineno}"
    problem = _find_async_problem(function, form, name, here)
    try:
        # The signature of a wrapper is its own, not that of the function inside.
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
    is_reward = form == REWARD
    if is_reward and _OF_VERL in named:
        return f"{here} has the arguments of a reward of verl; {_VERL_FORM}"
    if form.count and len(positional) < form.count and kinds.VAR_POSITIONAL not in of_any_count:
        count = len(positional)
        hint = _TRL_FORM if is_reward and _OF_TRL & named else ""
        return (
            f"{here} takes {count} positional argument{'s' * (count != 1)}; {form.arguments}{hint}"
        )
    if is_reward and positional and positional[0] in _RESPONSES:
        return f"the first argument of {here} is called {positional[0]}, and it gets the row"
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
