"""Program of a child process that creates a sampler, or proves a loss, as a run does.

It reads a ``Trial`` from standard input and writes a ``TrialAnswer`` to standard output. Prints of
user code go to standard error.
"""

import os
import sys
from pathlib import Path
from typing import Any, Final

import msgspec

from offbeat.config.sections.loss import CustomLossConfig
from offbeat.config.sections.sampler import CustomSamplerConfig
from offbeat.messages.failures import FixableError
from offbeat.messages.parent_death import die_with_parent

_STDOUT: Final = 1
_STDERR: Final = 2


class SamplerTrial(msgspec.Struct, frozen=True, tag=True):
    """A sampler to create."""

    section: dict[str, Any]
    groups_per_step: int


class LossTrial(msgspec.Struct, frozen=True, tag=True):
    """A loss to prove."""

    section: dict[str, Any]
    device: str


class Trial(msgspec.Struct, frozen=True):
    """Code of the user or of another package to try, as a recipe names it."""

    of: SamplerTrial | LossTrial
    parent_pid: int
    working_dir: str


class TrialAnswer(msgspec.Struct, frozen=True):
    """Reason why a run would refuse the code, and the fix. Both are empty if it would accept it."""

    problem: str = ""
    fix: str = ""


def main() -> None:
    """Try one object and write the answer."""
    answers = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    die_with_parent(trial.parent_pid)
    try:
        _try(trial)
    except FixableError as refused:
        answer = TrialAnswer(refused.problem, refused.fix)
    else:
        answer = TrialAnswer()
    os.write(answers, msgspec.json.encode(answer))
    os._exit(0)  # threads of user code must not keep the process alive


def _try(trial: Trial) -> None:
    """Create or prove the object as a run does.

    Raises:
        LossRefused: A run would refuse the loss.
        SamplerNotLoaded: A run would refuse the sampler.
    """
    of, working_dir = trial.of, Path(trial.working_dir)
    if isinstance(of, SamplerTrial):
        from offbeat.sampler.build import build_sampler

        section = CustomSamplerConfig.model_validate(of.section)
        build_sampler(section, of.groups_per_step, working_dir)
        return
    import torch

    from offbeat.trainers.losses import load_custom_loss

    if of.device != "cpu" and not torch.cuda.is_available():
        return  # a loss may have kernels for GPUs only
    load_custom_loss(CustomLossConfig.model_validate(of.section), working_dir, of.device)


if __name__ == "__main__":
    main()
