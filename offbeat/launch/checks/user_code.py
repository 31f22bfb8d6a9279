"""Checks of the user's own code: its source is read, never run."""

import ast
import difflib
import inspect
import os
import textwrap
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from offbeat.config.by_value import given as given_value
from offbeat.config.by_value import is_by_value, is_given, unverifiable
from offbeat.config.crosschecks import call_keys_set
from offbeat.config.environment_traits import AsyncForm, known_environments
from offbeat.config.graders import GRADERS
from offbeat.config.run import RunConfig
from offbeat.config.secrets import REDACTED, redacted_keys
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.config.user_code import GIVE_AGAIN, MAIN_GUARD
from offbeat.doors import find_module, is_installed
from offbeat.environments.inputs import ADVANTAGE
from offbeat.messages.finding import Finding, error, ok, warning

_EXTRAS: Final = {
    "agents": "openai-agents",
    "httpx": "agents",
    "math_verify": "math",
    "openai": "agents",
    "reasoning_gym": "reasoning-gym",
    "smolagents": "smolagents",
}
"""Extra of this package that brings a package which user code imports."""

_LOSS, _ADVANTAGE = "loss", "advantage"
"""Stand for ``environment.name`` where the function is a loss, or an advantage."""

_ARGUMENTS_BY_ENVIRONMENT: Final = {
    "function": "a reward gets a row and a response",
    _LOSS: "a loss gets tokens and options",
    _ADVANTAGE: "an advantage gets the rewards of a group",
}
"""Positional arguments of a function that the user writes, by ``environment.name``."""

_GIVEN_COUNT: Final = 2
_RESPONSES: Final = {"completion", "response"}  # the second argument of a reward
_BATCHED: Final = {"prompts", "completions"}  # arguments of a reward function of TRL
_OF_VERL: Final = "solution_str"  # argument of a reward function of verl
_VERL_FORM: Final = (
    "a reward gets a row and a response. Wrap it: def reward(row, response): return compute_score("
    'row["data_source"], response, row["reward_model"]["ground_truth"])'
)
_TRL_FORM: Final = ", one at a time; this is the form of TRL, for a batch"
_CHANGE_BY_ENVIRONMENT: Final = {
    "function": "Write it as def reward(row, response), and return one number.",
    _LOSS: "Write it as def loss(tokens, options), and return the loss of each token.",
    _ADVANTAGE: "Write it as def advantage(rewards), and return one number per sample.",
}
"""Fix of a function of another form, by ``environment.name``."""

_RESULT_BY_ENVIRONMENT: Final = {"function": "number", _LOSS: "tensor", _ADVANTAGE: "numbers"}
_SOURCE_BY_ENVIRONMENT: Final = {
    "function": "use row[{!r}] if it is of the row, or add it to its options",
    _LOSS: "read options[{!r}]",
    _ADVANTAGE: "give it a default",
}
"""Where a function finds a value that it takes as a further argument, by ``environment.name``."""
_STARTS: Final = {
    "run_recipe",
    *(f"offbeat.{name}" for name in ("preview", "resume", "run_recipe", "start", "train")),
}
"""Calls that start a run."""
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_EMPTY: Final = inspect.Parameter.empty


class _Arguments(NamedTuple):
    """Arguments that a function takes."""

    positional: Sequence[str]
    required: Sequence[str]  # without a default, also of those by keyword only
    by_keyword: Collection[str]  # all that may be given by keyword
    takes_any_count: bool
    takes_any_keyword: bool


def check_targets(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the modules of the environment can be found and parsed, without running them."""
    environment = config.environment
    options = [each.options for each in environment.rewards.values()] or [environment.options]
    for (key, target), given in zip(environment.targets.items(), options, strict=False):
        if target in GRADERS:
            yield _installed(target)
            continue
        section = key.removesuffix(".target")
        node, finding = _read(section, target, given, working_dir, environment.name)
        yield finding
        yield from _one_sample_per_call(config, section, node)
        if not environment.rewards:
            yield from _one_turn(config, node)
            yield from _one_call_at_a_time(config, node)


def check_sampler(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the module of a custom sampler can be found and parsed, without running it."""
    sampler = config.sampler
    if isinstance(sampler, CustomSamplerConfig):
        yield _read("sampler", sampler.target, sampler.options, working_dir)[1]


def check_loss(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the module of a custom loss can be found and parsed, without running it."""
    loss = config.algorithm.loss
    if isinstance(loss, CustomLossConfig):
        yield _read("algorithm.loss", loss.target, (), working_dir, _LOSS)[1]


def check_advantage(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the module of an advantage of the user can be found and parsed, without running it."""
    if target := config.algorithm.advantage_target:
        yield _read("algorithm", target, (), working_dir, _ADVANTAGE)[1]


def _read(
    section: str,
    target: str,
    options: Collection[str],
    working_dir: Path,
    environment: str = "",
) -> tuple[ast.stmt | None, Finding]:
    """Return the statement that defines a target, None if unknown, and the finding about it.

    ``environment`` is the name of the environment that calls it. Two environments pass arguments; a
    loss gets two as well.
    """
    key = _find_key(section, environment)
    module, _, name = target.partition(":")
    if is_by_value(target):
        return _read_value(section, target, options, environment)
    source = find_module(module, working_dir)
    if source is None:
        seen = f"{key}={target}: no module {module} from {working_dir}"
        fix = "Start offbeat in the directory that holds it, or install it."
        if module.endswith(".py"):
            dotted = module.removesuffix(".py").replace("/", ".")
            fix = f"Write the module without .py: {key}={dotted}:{name}"
        return None, error(section, seen, fix)
    node, problem, absent = None, "", ""
    if source.suffix == ".py":
        try:
            body = ast.parse(source.read_bytes()).body
        except SyntaxError as broken:
            problem = f"{broken.msg}, in line {broken.lineno}"
        except (OSError, ValueError) as broken:
            problem = f"it cannot be read: {broken}"
        else:
            node = next((each for each in body if _defines(each, name)), None)
            problem = _problem(body, node, name, options, environment) or _starts_run(body)
            absent = _absent_import(body, working_dir)
    if problem:
        return None, error(section, f"{key}={target}: {problem}", f"Fix {source}.")
    if absent:
        extra = f": pip install 'offbeat[{_EXTRAS[absent]}]'" if absent in _EXTRAS else ""
        seen = f"{key}={target}: {source.name} imports {absent}, which is not installed"
        return None, error(
            section, seen, f"Install it in the environment that runs offbeat{extra}."
        )
    return node, ok(section, f"module {module} is found")


def _find_key(section: str, environment: str) -> str:
    """Return the key of the recipe that names the target."""
    return ADVANTAGE if environment == _ADVANTAGE else f"{section}.target"


def _find_async_form(environment: str) -> AsyncForm | None:
    traits = known_environments().get(environment)
    return None if traits is None else traits.async_form


def _read_value(
    section: str, target: str, options: Collection[str], environment: str
) -> tuple[ast.stmt | None, Finding]:
    """Return the statement that defines an object that was given by value, and the finding."""
    key = _find_key(section, environment)
    if not is_given(target):
        seen = f"{key}={target}: this process does not have it"
        return None, error(section, seen, GIVE_AGAIN)
    value = given_value(target)
    if not callable(value):
        seen = f"{key} has the type {type(value).__name__}, which cannot be called"
        return None, error(section, seen, "Give a function, or a class.")
    node = _definition(value)
    name = getattr(value, "__name__", type(value).__name__)
    if environment in _RESULT_BY_ENVIRONMENT:
        problem = _value_problem(value, name, options, environment)
        node = node or _definition_of_call(value)
    else:
        problem = "" if node is None else _problem([node], node, name, options, environment)
    if problem:
        form = _find_async_form(environment)
        change = form.change if form else _CHANGE_BY_ENVIRONMENT.get(environment, f"Change {name}.")
        if isinstance(value, type):
            change = f"Give an instance, as {name}(...), or a function."
        return None, error(section, f"{key}: {problem}", change)
    if not_covered := unverifiable(target):
        return node, warning(
            section,
            f"the digest of {name} does not cover {', '.join(not_covered)}",
            "A resume does not see changes there.",
        )
    return node, ok(section, f"{name} was given by value")


def _value_problem(
    value: Callable[..., object], name: str, options: Collection[str], environment: str
) -> str:
    """Return why a reward or a loss that was given by value cannot be called; empty if it may be."""
    if isinstance(value, type):
        is_plain = value.__new__ is object.__new__ and not hasattr(value, "__await__")
        result = _RESULT_BY_ENVIRONMENT[environment]
        return f"{name} is a class: a call of it returns no {result}" if is_plain else ""
    try:
        # The signature of a wrapper is its own, not that of what it wraps.
        signature = inspect.signature(value, follow_wrapped=False)
    except (TypeError, ValueError):  # a function in C may have none
        return ""
    return _call_problem(f"{name}()", _arguments_of(signature), options, environment)


def _arguments_of(signature: inspect.Signature) -> _Arguments:
    kinds = inspect.Parameter
    every = signature.parameters.values()
    by_position = (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    by_keyword = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    of_any_count = (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
    return _Arguments(
        [each.name for each in every if each.kind in by_position],
        [each.name for each in every if each.default is _EMPTY and each.kind not in of_any_count],
        {each.name for each in every if each.kind in by_keyword},
        any(each.kind is kinds.VAR_POSITIONAL for each in every),
        any(each.kind is kinds.VAR_KEYWORD for each in every),
    )


def _arguments_in(source: ast.arguments) -> _Arguments:
    positional = [each.arg for each in (*source.posonlyargs, *source.args)]
    keywords = zip(source.kwonlyargs, source.kw_defaults, strict=True)
    return _Arguments(
        positional,
        [
            *positional[: len(positional) - len(source.defaults)],
            *(each.arg for each, default in keywords if default is None),
        ],
        {each.arg for each in (*source.args, *source.kwonlyargs)},
        source.vararg is not None,
        source.kwarg is not None,
    )


def _definition(value: object) -> ast.stmt | None:
    """Return the statement that defines a function or a class; None if its source is not known.

    None also for a method: its first argument is bound.
    """
    if inspect.ismethod(value):
        return None
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    return node if _defines(node, getattr(value, "__name__", "")) else None


def _definition_of_call(value: object) -> ast.stmt | None:
    """Return the statement that defines a method, or an object's ``__call__``, without ``self``."""
    method = (
        value if inspect.ismethod(value) else inspect.getattr_static(type(value), "__call__", None)
    )
    node = _definition(getattr(method, "__func__", method))
    if isinstance(node, _Function) and node.args.args:
        del node.args.args[0]
    return node


def _one_sample_per_call(
    config: RunConfig, section: str, node: ast.stmt | None
) -> Iterator[Finding]:
    """Warn of a reward whose arguments have the names of TRL's, which are lists.

    One that also returns a list cannot work.
    """
    if config.environment.name != "function" or not isinstance(node, _Function):
        return
    first = node.args.args[0].arg if node.args.args else ""
    if first in _RESPONSES:
        yield error(
            section,
            f"the first argument of {node.name}() in line {node.lineno} is called {first}, and it gets the row",
            _CHANGE_BY_ENVIRONMENT["function"],
        )
    if _BATCHED & {each.arg for each in node.args.args[:_GIVEN_COUNT]}:
        yield (error if _returns_lists(node) else warning)(
            section,
            f"{node.name}() in line {node.lineno} is written for prompts and completions of a batch; it is "
            "called once per response, with its row and its text",
            _CHANGE_BY_ENVIRONMENT["function"],
        )


def _returns_lists(function: _Function) -> bool:
    """Return whether the source shows that every return value of a function is a list."""
    inside = list(ast.walk(function))
    lists = {
        ast.unparse(target)
        for each in inside
        if isinstance(each, ast.Assign | ast.AnnAssign)
        and isinstance(each.value, ast.List | ast.ListComp)
        for target in (each.targets if isinstance(each, ast.Assign) else [each.target])
    }
    returned = [each.value for each in inside if isinstance(each, ast.Return)]
    return bool(returned) and all(
        isinstance(each, ast.List | ast.ListComp)
        or (isinstance(each, ast.Name) and each.id in lists)
        for each in returned
    )


def _one_call_at_a_time(config: RunConfig, node: ast.stmt | None) -> Iterator[Finding]:
    """Warn of limits for the calls of an async reward if the function is not async."""
    unused = call_keys_set(config.environment)
    if unused and isinstance(node, ast.FunctionDef):
        yield warning(
            "environment",
            f"{node.name} is not async: its samples are scored one after the other, and "
            f"{', '.join(unused)} is not used",
            f"Write async def {node.name}, or leave the keys out.",
        )


def _one_turn(config: RunConfig, node: ast.stmt | None) -> Iterator[Finding]:
    """Warn of a subclass of ``MultiTurn`` if every episode ends after one turn."""
    if config.environment.max_turns != 1 or not isinstance(node, ast.ClassDef):
        return
    if "MultiTurn" in {ast.unparse(base).rpartition(".")[2] for base in node.bases}:
        yield warning(
            "environment",
            f"{node.name} is a MultiTurn environment and environment.max_turns is 1: each "
            "episode ends after its first response",
            "Set environment.max_turns to the number of model calls an episode may take.",
        )


def check_variables(config: RunConfig) -> Iterator[Finding]:
    """Warn of variables that user code is to inherit and that are not set here."""
    if unset := [name for name in config.environment.variables if name not in os.environ]:
        yield warning(
            "environment",
            f"environment.variables: {', '.join(unset)} not set on this machine",
            "Set them where the environment workers run, or take them out.",
        )


def _installed(name: str) -> Finding:
    """Check that the package of a grader can be imported."""
    grader = GRADERS[name]
    if grader.package and not is_installed(grader.package):
        return error(
            "environment",
            f"environment.target={name} needs the package {grader.package}, which is not installed",
            f"Install it: pip install 'offbeat[{grader.extra}]'.",
        )
    return ok("environment", f"{name} is installed")


def check_secrets(config: RunConfig) -> Iterator[Finding]:
    """Check that no value is the placeholder that a stored config has for a secret."""
    for key in redacted_keys(config.model_dump()):
        seen = f"{key} is {REDACTED}: the recipe was written by a run, which leaves secrets out"
        yield error("secrets", seen, f"Give it again: {key}=...")


def _problem(
    body: Sequence[ast.stmt],
    node: ast.stmt | None,
    name: str,
    options: Collection[str],
    environment: str,
) -> str:
    """Return why ``name`` in this source cannot be called with ``options``; empty if it may be."""
    if isinstance(node, _Function):
        here = f"{node.name}() in line {node.lineno}"
        form = _find_async_form(environment)
        if form and not isinstance(node, ast.AsyncFunctionDef):
            return f"{here} is not async: write async def {node.name}({form.parameters})"
        if environment in (_LOSS, _ADVANTAGE) and isinstance(node, ast.AsyncFunctionDef):
            return f"{here} is async: write def {node.name}"
        return _call_problem(here, _arguments_in(node.args), options, environment)
    if isinstance(node, ast.Assign):
        return f"{name} in line {node.lineno} is a constant, and cannot be called"
    # A name may be bound by any statement, even as in globals()["reward"]; * stands for all.
    texts = (text for top in body for each in ast.walk(top) for _, text in ast.iter_fields(each))
    named = {text.partition(".")[0] for text in texts if isinstance(text, str)}
    if named & {name, "*"}:
        return ""
    defined = (each.name for each in body if isinstance(each, _Function | ast.ClassDef))
    near = difflib.get_close_matches(name, defined, n=1)
    return f"nothing in it is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _defines(node: ast.stmt, name: str) -> bool:
    """Return whether a statement defines ``name`` as a function, a class or a constant.

    A decorator may return any function.
    """
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
        return any(isinstance(each, ast.Name) and each.id == name for each in node.targets)
    if isinstance(node, _Function):
        return node.name == name and not node.decorator_list
    return isinstance(node, ast.ClassDef) and node.name == name


def _starts_run(body: Sequence[ast.stmt]) -> str:
    """Return that an import of the source starts a run; empty if it does not."""
    top = (node for node in body if not isinstance(node, _Function | ast.ClassDef | ast.If))
    for call in (each for node in top for each in ast.walk(node) if isinstance(each, ast.Call)):
        if ast.unparse(call.func) in _STARTS:
            return f"line {call.lineno} starts a run when it is imported. {MAIN_GUARD}"
    return ""


def _absent_import(body: Sequence[ast.stmt], working_dir: Path) -> str:
    """Return a package that the source imports when it is loaded and that is missing, or ``""``.

    Imports under a condition, or in a function, may never happen.
    """
    modules = list[str | None]()
    for node in body:
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules.append(node.module)
    packages = ((module or "").partition(".")[0] for module in modules)
    return next((each for each in packages if find_module(each, working_dir) is None), "")


def _call_problem(here: str, takes: _Arguments, options: Collection[str], environment: str) -> str:
    """Return why a function cannot be called with its two arguments, if it gets them, and ``options``."""
    if environment == "function" and _OF_VERL in {*takes.positional, *takes.by_keyword}:
        return f"{here} has the arguments of a reward of verl; {_VERL_FORM}"
    async_form = _find_async_form(environment)
    given = async_form.arguments if async_form else _ARGUMENTS_BY_ENVIRONMENT.get(environment)
    if given:
        count, given_count = len(takes.positional), _GIVEN_COUNT - (environment == _ADVANTAGE)
        if count < given_count and not takes.takes_any_count:
            problem = f"{here} takes {count} positional argument{'s' * (count != 1)}; {given}"
            named = {*takes.positional, *takes.by_keyword}
            return problem + (_TRL_FORM if _BATCHED & named else "")
        further = [each for each in takes.required if each not in takes.positional[:given_count]]
        if missing := [each for each in further if each not in options]:
            form = _SOURCE_BY_ENVIRONMENT.get(environment, "add it to its options")
            return f"{here} needs {missing[0]!r}: {form.format(missing[0])}; {given}"
    unknown = [key for key in options if key not in takes.by_keyword]
    if unknown and not takes.takes_any_keyword:
        return f"{here} takes no {unknown[0]!r}, which options name"
    return ""
