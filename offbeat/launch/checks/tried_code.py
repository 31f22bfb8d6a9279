"""Tries the options of a sampler and of a loss that are not of this package, before a run does.

Their code is called in a child process, as code of the user may do anything there.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from offbeat.config.by_value import is_by_value
from offbeat.config.limits import trainer_device
from offbeat.config.problems import shorten
from offbeat.config.run import RunConfig
from offbeat.config.secrets import without_secrets
from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.launch.checks.code_trial import LossTrial, SamplerTrial, Trial, TrialAnswer
from offbeat.messages.failures import DeadlineExceeded
from offbeat.messages.finding import Finding, error, warning

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
    """Make a custom sampler and prove a custom loss, with their options, as a run does.

    Args:
        config: A recipe.
        working_dir: Where the user's modules are.
        refused: Subjects of errors that are known: these sections are not tried.
        within_s: Seconds that each of them has.
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
    """Yield the reason why a run would refuse the code; nothing if a run accepts it."""
    if is_by_value(code.target):
        return  # another process does not have it
    given = {
        f"{section}.options.{key}": shorten(value)
        for key, value in without_secrets(dict(code.options)).items()
    }
    named, change = f"{section}.target={code.target}", ""
    if given:
        named += f" with {', '.join(f'{key}={value}' for key, value in given.items())}"
        change = f", or change {' or '.join(given)}"
    try:
        answer = _run(Trial(of, os.getpid(), str(working_dir)), within_s)
    except DeadlineExceeded:
        seen = f"{named}: it was not ready after {within_s:g} s, and a run waits for it"
        yield warning(section, seen, f"Let it load less{change}.")
    else:
        if answer.problem:
            yield error(section, f"{named}: {answer.problem}", f"{answer.fix}{change}.")


def _run(trial: Trial, within_s: float) -> TrialAnswer:
    """Return the answer of a child process, all of whose processes are ended.

    Raises:
        DeadlineExceeded: There is none in time.
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
