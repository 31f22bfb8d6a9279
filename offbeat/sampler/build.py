"""Builds the staleness policy from the recipe's sampler section.

``custom`` is a staleness policy that the user names.
"""

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, assert_never

from offbeat.config.sections.sampler import (
    CustomSamplerConfig,
    InOrderConfig,
    ReadyFirstConfig,
    SamplerConfig,
    WeightFifoConfig,
    WindowedConfig,
    count_trainable_groups,
)
from offbeat.config.user_code import NAME_FIX, TargetNotFound, describe, load_target
from offbeat.messages.failures import FixableError
from offbeat.sampler.checked_sampler import CheckedSampler
from offbeat.sampler.in_order import InOrder
from offbeat.sampler.policy import Sampler
from offbeat.sampler.ready_first import ReadyFirst, WeightFifo
from offbeat.sampler.windowed import Windowed

METHODS: Final = ("admit", "may_dispatch", "select", "stale", "in_flight_to_cancel")
"""Methods that a policy must have."""

BOUND: Final = "max_outstanding_groups"
"""Attribute that a policy must have."""

_MISSPELT: Final = 0.87
"""Similarity of two names above which one counts as misspelt: one wrong letter in six."""


class SamplerNotLoaded(FixableError):
    """``sampler.target`` does not name a usable policy.

    Fix: add or rename the named member (docs/samplers.md).
    """

    form = "sampler.target={}: {}. {}"


def load_custom(
    config: CustomSamplerConfig, groups_per_step: int, working_dir: Path
) -> CheckedSampler:
    """Create the policy that the recipe names, and wrap it in checks.

    Args:
        config: Section of the recipe. ``target`` is imported, looking in ``working_dir`` first, and
            called with ``groups_per_step``, ``max_staleness`` and the ``options`` as keyword
            arguments.
        groups_per_step: Groups per step of the run.
        working_dir: Where the user's modules are.

    Raises:
        SamplerNotLoaded: The policy cannot be used. The error names the problem and the fix.
    """
    try:
        make = load_target(config.target, working_dir)
    except TargetNotFound as error:
        fix = _NAME_FIX if error.fix == NAME_FIX else error.fix
        raise SamplerNotLoaded(config.target, error.problem, fix) from error
    arguments = {**config.options, **_given(config, groups_per_step)}
    try:
        policy = make(**arguments)
    except BaseException as error:  # the user's class may raise anything, SystemExit too
        problem = f"calling it with {', '.join(arguments)} raised {describe(error, working_dir)}"
        raise SamplerNotLoaded(config.target, problem, _CALL_FIX) from error
    _check_names(config, policy, groups_per_step)
    bound = policy.max_outstanding_groups
    if type(bound) is not int or bound < groups_per_step:
        problem = f"its {BOUND} is {bound!r}: with fewer than groups_per_step={groups_per_step} groups admitted no step is ever full"
        raise SamplerNotLoaded(config.target, problem, _BOUND_FIX)
    return CheckedSampler(policy, config.target, config.max_staleness, bound)


_NAME_FIX: Final = "Name it module:Class, the module being importable from the working directory"
_CALL_FIX: Final = (
    "Let it accept groups_per_step, max_staleness and the keys of "
    "sampler.options as keyword arguments"
)
_SHAPE_FIX: Final = "Give it the methods of offbeat.interfaces.Sampler"
_BOUND_FIX: Final = "Make it an integer of groups_per_step or more"


def _check_names(config: CustomSamplerConfig, policy: object, groups_per_step: int) -> None:
    """Refuse a policy that lacks a member of the protocol or misspells one.

    Raises:
        SamplerNotLoaded: A member is missing or misspelt. A misspelt method overrides nothing and
            is never called. So the run would use the method of the base class.
    """
    kind = type(policy).__name__
    a_kind = f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
    missing = [name for name in METHODS if not callable(getattr(policy, name, None))]
    if missing:
        problem = f"{a_kind} has no method {', '.join(missing)}"
        raise SamplerNotLoaded(config.target, problem, _SHAPE_FIX)
    for name, meant in _misspelt(policy):
        problem = f"{a_kind} has a {name}, which no run calls"
        fix = f"Rename it to {meant}, or to a name that does not resemble it"
        raise SamplerNotLoaded(config.target, problem, fix)
    if not hasattr(policy, BOUND):
        whole = count_trainable_groups(config.max_staleness, groups_per_step)
        fix = (
            "Set it to the largest number of groups that it admits before they are trained: "
            f"the bound allows (max_staleness + 1) * groups_per_step = {whole}"
        )
        raise SamplerNotLoaded(config.target, f"{a_kind} has no {BOUND}", fix)


def _misspelt(policy: object) -> Iterator[tuple[str, str]]:
    """Yield each public member with a name like a protocol member, and that protocol member."""
    public = {name for name in dir(policy) if not name.startswith("_")}
    for name in sorted(public - {*METHODS, BOUND}):
        is_method = callable(getattr(type(policy), name, None))
        names = METHODS if is_method else (BOUND,)
        for meant in difflib.get_close_matches(name, names, 1, _MISSPELT):
            yield name, meant


def _given(config: CustomSamplerConfig, groups_per_step: int) -> dict[str, int]:
    given = {"groups_per_step": groups_per_step, "max_staleness": config.max_staleness}
    if twice := sorted(given.keys() & config.options.keys()):
        problem = f"sampler.options has {', '.join(twice)}, which the run passes already"
        raise SamplerNotLoaded(config.target, problem, "Remove it from sampler.options")
    return given


def build_sampler(
    config: SamplerConfig, groups_per_step: int, working_dir: Path | None = None
) -> Sampler:
    """Return the policy that the recipe names.

    ``working_dir`` is searched first for a custom policy.

    Raises:
        SamplerNotLoaded: A custom policy cannot be imported or made.
    """
    staleness = config.max_staleness
    match config:
        case InOrderConfig():
            lookahead = staleness if config.max_lookahead is None else config.max_lookahead
            return InOrder(groups_per_step, staleness, lookahead)
        case ReadyFirstConfig():
            return ReadyFirst(groups_per_step, staleness)
        case WeightFifoConfig():
            return WeightFifo(groups_per_step, staleness)
        case WindowedConfig():
            ratio, freshest = config.over_sampling_ratio, config.freshest_first
            return Windowed(groups_per_step, staleness, ratio, freshest_first=freshest)
        case CustomSamplerConfig():
            return load_custom(config, groups_per_step, working_dir or Path.cwd())
        case _:
            assert_never(config)
