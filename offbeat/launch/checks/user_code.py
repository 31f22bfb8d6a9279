"""Checks of the user's own code: its source is read, never run."""

import ast
import difflib
import importlib.util
import os
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Final, TypeGuard

from offbeat.config.crosschecks_rollouts import call_keys_set
from offbeat.config.graders import GRADERS
from offbeat.config.run import RunConfig
from offbeat.config.secrets import REDACTED, redacted_keys
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.config.user_code import MAIN_GUARD
from offbeat.environments.inputs import find_module, resolved_program
from offbeat.launch.checks.finding import Finding, error, ok, warning

_EXTRAS: Final = {
    "agents": "openai-agents",
    "httpx": "agents",
    "math_verify": "math",
    "openai": "agents",
    "reasoning_gym": "reasoning-gym",
    "smolagents": "smolagents",
}
"""Extra of this package that brings a package which user code imports."""

_ARGUMENTS_BY_ENVIRONMENT: Final = {
    "agent": "an agent gets a task and a client",
    "function": "a reward gets a row and a response",
}
"""Positional arguments, two of them, of a function that the user writes, by ``environment.name``."""

_GIVEN_COUNT: Final = 2
_BATCHED: Final = {"prompts", "completions"}  # arguments of a reward function of TRL
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def check_targets(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the module of the environment can be found and parsed, without running it."""
    environment = config.environment
    for key, (_, each) in zip(environment.targets, environment.rewards.items(), strict=False):
        if each.target in GRADERS:
            yield _installed("environment", each.target)
        else:
            section = key.removesuffix(".target")
            source, finding = _parsed(
                section, each.target, each.options, working_dir, environment.name
            )
            yield finding
            if source is not None:
                yield from _one_sample_per_call(section, source, each.target)
    if environment.target is None or environment.rewards:
        return
    if environment.target in GRADERS:
        yield _installed("environment", environment.target)
        return
    source, finding = _parsed(
        "environment", environment.target, environment.options, working_dir, environment.name
    )
    yield finding
    if source is not None:
        name = environment.target.partition(":")[2]
        if environment.max_turns == 1:
            yield from _one_turn(source, name)
        if environment.name == "function":
            yield from _one_sample_per_call("environment", source, environment.target)
        yield from _one_call_at_a_time(config, source, name)


def check_sampler(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the module of a custom sampler can be found and parsed, without running it."""
    sampler = config.sampler
    if isinstance(sampler, CustomSamplerConfig):
        yield _parsed("sampler", sampler.target, sampler.options, working_dir)[1]


def _parsed(
    section: str,
    target: str,
    options: Collection[str],
    working_dir: Path,
    environment: str = "",
) -> tuple[Path | None, Finding]:
    """Return the source of a target, None unless it can be used, and the finding about it.

    ``environment`` is the name of the environment that calls it, of which two give it arguments.
    """
    module, _, name = target.partition(":")
    source = find_module(module, working_dir)
    if source is None:
        seen = f"{section}.target={target}: no module {module} from {working_dir}"
        fix = "Start offbeat in the directory that holds it, or install it."
        return None, error(section, seen, fix)
    problem = _unusable(source, name, options, environment) or _starts_run(source)
    if problem:
        return None, error(section, f"{section}.target={target}: {problem}", f"Fix {source}.")
    if absent := _absent_import(source, working_dir):
        seen = f"{section}.target={target}: {source.name} imports {absent}, which is not installed"
        fix = f"Install it in the environment that runs offbeat{_by_extra(absent)}."
        return None, error(section, seen, fix)
    return source, ok(section, f"module {module} is found")


def _one_sample_per_call(section: str, source: Path, target: str) -> Iterator[Finding]:
    """Warn of a reward whose arguments are named as those of TRL, which are lists."""
    name = target.partition(":")[2]
    if source.suffix != ".py":
        return
    for node in ast.parse(source.read_bytes()).body:
        if _is_function(node, name) and _BATCHED & {
            each.arg for each in node.args.args[:_GIVEN_COUNT]
        }:
            yield warning(
                section,
                f"{name}() in line {node.lineno} is written for prompts and completions of a batch; it is "
                "called once per response, with its row and its text",
                f"Write def {name}(prompt, response), and return one number.",
            )


def _one_call_at_a_time(config: RunConfig, source: Path, name: str) -> Iterator[Finding]:
    """Warn of limits for the calls of an async reward where the function is not async."""
    unused = call_keys_set(config.environment)
    if not unused or source.suffix != ".py":
        return
    body = ast.parse(source.read_bytes()).body
    if any(isinstance(node, ast.FunctionDef) and _is_function(node, name) for node in body):
        yield warning(
            "environment",
            f"{name} is not async: its samples are scored one after the other, and "
            f"{', '.join(unused)} is not used",
            f"Write async def {name}, or leave the keys out.",
        )


def check_variables(config: RunConfig) -> Iterator[Finding]:
    """Warn of variables that user code is to inherit and that are not set here."""
    if unset := [name for name in config.environment.variables if name not in os.environ]:
        yield warning(
            "environment",
            f"environment.variables: {', '.join(unset)} not set on this machine",
            "Set them where the environment workers run, or take them out.",
        )


def check_command(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the program of an agent is found on this machine."""
    if not config.environment.command:
        return
    name = config.environment.command[0]
    if resolved_program(name, working_dir) is None:
        yield error(
            "environment",
            f"environment.command: {name} is no program, from {working_dir} or on the PATH",
            "Write its path from the directory in which offbeat is started, and make it executable.",
        )
    else:
        yield ok("environment", f"program {name} is found")


def _installed(section: str, name: str) -> Finding:
    """Check that the package of a grader can be imported."""
    grader = GRADERS[name]
    if grader.package and importlib.util.find_spec(grader.package) is None:
        return error(
            section,
            f"{section}.target={name} needs the package {grader.package}, which is not installed",
            f"Install it: pip install 'offbeat[{grader.extra}]'.",
        )
    return ok(section, f"{name} is installed")


def _one_turn(source: Path, name: str) -> Iterator[Finding]:
    """Warn of a class that is written as ``MultiTurn`` where every episode ends after one turn."""
    if source.suffix != ".py":
        return
    for node in ast.parse(source.read_bytes()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
            if "MultiTurn" in bases:
                yield warning(
                    "environment",
                    f"{name} is a MultiTurn environment and environment.max_turns is 1: each "
                    "episode ends after its first response",
                    "Set environment.max_turns to the number of model calls an episode may take.",
                )


def check_secrets(config: RunConfig) -> Iterator[Finding]:
    """Check that no value is the placeholder that a stored config has for a secret."""
    for key in redacted_keys(config.model_dump()):
        seen = f"{key} is {REDACTED}: the recipe was written by a run, which leaves secrets out"
        yield error("secrets", seen, f"Give it again: {key}=...")


def _unusable(source: Path, name: str, options: Collection[str], environment: str) -> str:
    """Return why ``name`` in this source cannot be called with ``options``; empty if it may be."""
    if source.suffix != ".py":
        return ""
    try:
        tree = ast.parse(source.read_bytes())
    except SyntaxError as broken:
        return f"{broken.msg}, in line {broken.lineno}"
    except (OSError, ValueError) as broken:
        return f"it cannot be read: {broken}"
    for node in tree.body:
        if _is_function(node, name):
            return _signature_problem(node, options, environment) or _unknown_option(node, options)
        if _is_constant(node, name):
            return f"{name} in line {node.lineno} is a constant, and cannot be called"
    return _missing_name_problem(tree, name)


def _starts_run(source: Path) -> str:
    """Return that an import of the source calls ``run_recipe``; empty if it does not."""
    for node in ast.parse(source.read_bytes()).body if source.suffix == ".py" else ():
        if isinstance(node, _Function | ast.ClassDef | ast.If):
            continue
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and "run_recipe" in _names(call.func):
                return f"line {call.lineno} starts a run when it is imported. {MAIN_GUARD}"
    return ""


def _missing_name_problem(tree: ast.Module, name: str) -> str:
    """Return that nothing in a module is called ``name``; ``""`` if something may be."""
    by_star = any(
        isinstance(node, ast.ImportFrom) and node.names[0].name == "*" for node in ast.walk(tree)
    )
    if by_star or any(name in _names(node) for node in ast.walk(tree)):
        return ""
    near = difflib.get_close_matches(name, (n for node in tree.body for n in _names(node)), n=1)
    return f"nothing in it is called {name!r}" + (f"; did you mean {near[0]!r}?" if near else "")


def _names(node: ast.AST) -> tuple[str, ...]:
    """Return the names that a node may bind, without those below it."""
    match node:
        case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return (name,)
        case ast.ClassDef(name=name) | ast.Constant(value=str(name)):
            return (name,)  # a constant as in globals()["reward"]
        case ast.keyword(arg=str(name)):
            return (name,)
        case ast.Attribute(attr=name):
            return (name,)  # as in sys.modules[__name__].reward = f
        case ast.alias(name=name, asname=other):
            return (other or name.partition(".")[0],)
        case _:
            return ()


def _by_extra(package: str) -> str:
    extra = _EXTRAS.get(package)
    return "" if extra is None else f": pip install 'offbeat[{extra}]'"


def _absent_import(source: Path, working_dir: Path) -> str:
    """Return a package that the source imports when it is loaded and that is not there, or ``""``.

    Imports under a condition, or in a function, may never happen.
    """
    if source.suffix != ".py":
        return ""
    for node in ast.parse(source.read_bytes()).body:
        modules = list[str | None]()
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules = [node.module]
        for module in modules:
            package = (module or "").partition(".")[0]
            if find_module(package, working_dir) is None:
                return package
    return ""


def _is_function(node: ast.stmt, name: str) -> TypeGuard[_Function]:
    """Return whether a statement may define a function of this name.

    A decorator allows any options.
    """
    return isinstance(node, _Function) and node.name == name and not node.decorator_list


def _is_constant(node: ast.stmt, name: str) -> bool:
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Constant)
        and any(isinstance(target, ast.Name) and target.id == name for target in node.targets)
    )


def _signature_problem(function: _Function, options: Collection[str], environment: str) -> str:
    """Return why a function cannot be called as ``f(task, client, **options)``, or with row and response."""
    if environment not in _ARGUMENTS_BY_ENVIRONMENT:
        return ""
    here, takes = f"{function.name}() in line {function.lineno}", function.args
    if environment == "agent" and not isinstance(function, ast.AsyncFunctionDef):
        return f"{here} is not async: write async def {function.name}(task, client)"
    positional = [*takes.posonlyargs, *takes.args]
    if len(positional) < _GIVEN_COUNT and takes.vararg is None:
        return f"{here} takes {len(positional)} arguments; {_ARGUMENTS_BY_ENVIRONMENT[environment]}"
    required = positional[_GIVEN_COUNT : len(positional) - len(takes.defaults)]
    required += [
        each
        for each, default in zip(takes.kwonlyargs, takes.kw_defaults, strict=True)
        if default is None
    ]
    missing = [each.arg for each in required if each.arg not in options]
    if not missing:
        return ""
    return f"{here} needs {missing[0]!r}: add it to its options; {_ARGUMENTS_BY_ENVIRONMENT[environment]}"


def _unknown_option(function: _Function, options: Iterable[str]) -> str:
    takes = function.args
    names = {each.arg for each in (*takes.args, *takes.kwonlyargs)}
    unknown = [key for key in options if key not in names]
    if takes.kwarg is not None or not unknown:
        return ""
    return (
        f"{function.name}() in line {function.lineno} takes no {unknown[0]!r}, which options name"
    )
