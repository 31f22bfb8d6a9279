"""Checks of the user's code: a child process imports it and calls a reward.

Also tries the options of a sampler and a loss from outside this package before a run does. Their
code is called in a child process, because user code may do anything.
"""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.config.by_value import is_by_value, unverifiable
from offbeat.config.graders import GRADERS
from offbeat.config.limits import trainer_device
from offbeat.config.problems import shorten
from offbeat.config.run import RunConfig
from offbeat.config.secrets import REDACTED, find_redacted_keys, without_secrets
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.config.user_code import ADVANTAGE as ADVANTAGE_FORM
from offbeat.config.user_code import LOSS, REWARD, TargetNotFound, load_target
from offbeat.doors import is_installed
from offbeat.environments.child_setup import describe_target
from offbeat.environments.factory import make_reward_target
from offbeat.environments.frames import Ready, RewardTarget
from offbeat.environments.inputs import ADVANTAGE
from offbeat.environments.inputs import LOSS as LOSS_KEY
from offbeat.environments.inputs import SAMPLER as SAMPLER_KEY
from offbeat.environments.killable import Child, RewardFailed
from offbeat.launch.bounded_call import StartedCall
from offbeat.launch.checks.code_trial import LossTrial, SamplerTrial, Trial, TrialAnswer
from offbeat.messages.failures import DeadlineExceeded
from offbeat.messages.finding import Finding, error, ok, warning

_RESPONSE: Final = ""
"""The response with which a reward is tried. It is empty, as a model's answer may be."""

_OF_ANY_RESPONSE: Final = ("reward_wrong_type", "reward_not_finite")
"""Reasons for failures that do not depend on the response."""


def check_targets(
    config: RunConfig, working_dir: Path, row: dict[str, Any] | None = None
) -> Iterator[Finding]:
    """Check that the user's code of an environment can be imported and called.

    Args:
        config: A recipe of one environment.
        working_dir: Where the user's modules are.
        row: A row of the prompts, for which each reward is called once. If None, no reward is
            called.
    """
    environment = config.environment
    options = [each.options for each in environment.rewards.values()] or [environment.options]
    for (key, target), given in zip(environment.targets.items(), options, strict=False):
        if target in GRADERS:
            yield _check_installed(target)
            continue
        child = make_reward_target(environment, target, working_dir, options=given)
        ready = yield from _import(key.removesuffix(".target"), key, child)
        if ready is not None and child.form == REWARD and row is not None:
            yield from _call(key, child, row)
        if ready is not None and not environment.rewards:
            yield from _one_turn(config, ready)
            yield from _one_call_at_a_time(config, ready)


def check_sampler(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the class of a custom sampler can be imported."""
    if isinstance(config.sampler, CustomSamplerConfig):
        child = _child(config, config.sampler.target, working_dir)
        yield from _import("sampler", SAMPLER_KEY, child)


def check_loss(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that the function of a custom loss can be imported and has the form of a loss."""
    loss = config.algorithm.loss
    if isinstance(loss, CustomLossConfig):
        child = _child(config, loss.target, working_dir, form=LOSS)
        yield from _import("algorithm.loss", LOSS_KEY, child)


def check_advantage(config: RunConfig, working_dir: Path) -> Iterator[Finding]:
    """Check that an advantage of the user can be imported and has the form of an advantage."""
    if target := config.algorithm.advantage_target:
        child = _child(config, target, working_dir, form=ADVANTAGE_FORM)
        yield from _import("algorithm", ADVANTAGE, child)


def _child(config: RunConfig, target: str, working_dir: Path, **changes: Any) -> RewardTarget:  # noqa: ANN401 - of the fields of a target
    """Return a target without limits. With it, a child imports code meant for other processes."""
    no_limits: dict[str, Any] = {"options": {}, "memory_mib": None, "form": None}
    return make_reward_target(config.environment, target, working_dir, **{**no_limits, **changes})


def _import(section: str, key: str, child: RewardTarget) -> Generator[Finding, None, Ready | None]:
    """Yield the finding about an import of the code. Return facts about it if it succeeded."""
    target = child.target
    named = key if is_by_value(target) else f"{key}={target}"
    try:
        ready = _describe_value(child) if is_by_value(target) else _run(child)
    except TargetNotFound as refused:
        yield error(section, f"{named}: {refused.problem}", f"{refused.fix}.")
        return None
    except RewardFailed as failed:
        problem, fix = failed.refusal or (failed.detail, "Import it in Python to see why")
        yield error(section, f"{named}: {problem}", f"{fix}.")
        return None
    if not is_by_value(target):
        yield ok(section, f"module {target.partition(':')[0]} is found")
    elif not_covered := unverifiable(target):
        seen = f"the digest of {_name(target)} does not cover {', '.join(not_covered)}"
        yield warning(section, seen, "A resume does not see changes there.")
    else:
        yield ok(section, f"{_name(target)} was given by value")
    return ready


def _name(target: str) -> str:
    name = target.partition(":")[2]
    return name.rpartition("-")[0] if is_by_value(target) else name


def _describe_value(child: RewardTarget) -> Ready:
    return describe_target(load_target(child.target, child.working_dir, child.form, child.options))


def _call(key: str, child: RewardTarget, row: dict[str, Any]) -> Iterator[Finding]:
    """Call a reward once. Report if it did not return a reward."""
    try:
        _run(child, row)
    except RewardFailed as failed:
        seen = f"{key}: for the first prompt and an empty response, {failed.detail}"
        if failed.reason in _OF_ANY_RESPONSE:
            yield error("environment", seen, REWARD.change)
        else:
            fix = "Return a number for it, unless a sample without a reward is as it should be."
            yield warning("environment", seen, fix)


def _run(child: RewardTarget, row: dict[str, Any] | None = None) -> Ready:
    """Import code in a child process, and call it once if there is a row.

    Raises:
        RewardFailed: The code cannot be imported, or the call did not return a reward.
    """

    async def run() -> Ready:
        started = await Child.start(child)
        try:
            if row is not None:
                await started.call(row, [_RESPONSE])
        finally:
            await started.close()
        return started.ready

    return StartedCall(lambda: asyncio.run(run()), "check of user code").result()


def _one_call_at_a_time(config: RunConfig, ready: Ready) -> Iterator[Finding]:
    """Warn of limits on the calls of an async reward if the function is not async."""
    unused = config.environment.reward_call_keys()
    if unused and not ready.concurrent:
        name = _name(str(config.environment.target))
        yield warning(
            "environment",
            f"{name} is not async: its samples are scored one after the other, and "
            f"{', '.join(unused)} is not used",
            f"Write async def {name}, or leave the keys out.",
        )


def _one_turn(config: RunConfig, ready: Ready) -> Iterator[Finding]:
    """Warn of a subclass of ``MultiTurn`` if every episode ends after one turn."""
    if config.environment.max_turns == 1 and "MultiTurn" in ready.bases:
        yield warning(
            "environment",
            f"{ready.bases[0]} is a MultiTurn environment, but environment.max_turns is 1: each "
            "episode ends after its first response",
            "Set environment.max_turns to the number of model calls an episode may take.",
        )


def check_variables(config: RunConfig) -> Iterator[Finding]:
    """Warn of variables that user code should inherit and that are not set here."""
    if unset := [name for name in config.environment.variables if name not in os.environ]:
        yield warning(
            "environment",
            f"environment.variables: {', '.join(unset)} not set on this machine",
            "Set them where the environment workers run, or remove them.",
        )


def _check_installed(name: str) -> Finding:
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
    """Check that no value is the placeholder that replaces a secret in a stored config."""
    for key in find_redacted_keys(config.model_dump()):
        seen = f"{key} is {REDACTED}: the recipe was written by a run, which leaves secrets out"
        yield error("secrets", seen, f"Give it again: {key}=...")


_PROGRAM: Final = "offbeat.launch.checks.code_trial"
_WITHIN_S: Final = 60.0
_SAMPLER, _LOSS = "sampler", "algorithm.loss"


def try_options(
    config: RunConfig,
    working_dir: Path,
    refused: Collection[str] = (),
    *,
    within_s: float = _WITHIN_S,
) -> Iterator[Finding]:
    """Create a custom sampler and prove a custom loss, with their options, as a run does.

    Args:
        config: A recipe.
        working_dir: Where the user's modules are.
        refused: Subjects of known errors. These sections are not tried.
        within_s: Time limit for each section in seconds.
    """
    sampler, loss = config.sampler, config.algorithm.loss
    if isinstance(sampler, CustomSamplerConfig) and _SAMPLER not in refused:
        trial = SamplerTrial(sampler.model_dump(), config.groups_per_step)
        yield from _try(_SAMPLER, sampler, trial, working_dir, within_s)
    trains = config.trainer.backend != "stub"
    if isinstance(loss, CustomLossConfig) and trains and _LOSS not in refused:
        proof = LossTrial(loss.model_dump(), trainer_device(config.trainer))
        yield from _try(_LOSS, loss, proof, working_dir, within_s)


def _try(
    section: str,
    code: CustomSamplerConfig | CustomLossConfig,
    of: SamplerTrial | LossTrial,
    working_dir: Path,
    within_s: float,
) -> Iterator[Finding]:
    """Yield the reason why a run would refuse the code, or nothing if a run accepts it."""
    if is_by_value(code.target):
        return  # another process does not have the object
    given = {
        f"{section}.options.{key}": shorten(value)
        for key, value in without_secrets(dict(code.options)).items()
    }
    named, change = f"{section}.target={code.target}", ""
    if given:
        named += f" with {', '.join(f'{key}={value}' for key, value in given.items())}"
        change = f", or change {' or '.join(given)}"
    try:
        answer = _run_trial(Trial(of, os.getpid(), str(working_dir)), within_s)
    except DeadlineExceeded:
        seen = f"{named}: it was not ready after {within_s:g} s, and a run waits for it"
        yield warning(section, seen, f"Let it load less{change}.")
    else:
        if answer.problem:
            yield error(section, f"{named}: {answer.problem}", f"{answer.fix}{change}.")


def _run_trial(trial: Trial, within_s: float) -> TrialAnswer:
    """Return the answer of a child process. Then end the child and all processes it started.

    Raises:
        DeadlineExceeded: No answer came in time.
    """
    import_path = os.pathsep.join(path for path in sys.path if path)
    with subprocess.Popen(  # noqa: S603 - this Python, and a module of this package
        [sys.executable, "-P", "-m", _PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        cwd=trial.working_dir,
        env=os.environ | {"PYTHONPATH": import_path},
    ) as child:
        try:
            told, _ = child.communicate(msgspec.json.encode(trial), within_s)
        except subprocess.TimeoutExpired:
            raise DeadlineExceeded("check", "try user code", within_s) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
    if told:
        return msgspec.json.decode(told, type=TrialAnswer)
    how = f"signal {-child.returncode}" if child.returncode < 0 else f"code {child.returncode}"
    return TrialAnswer(
        f"the process that tried it ended with {how}", "Call it in Python to see why"
    )
