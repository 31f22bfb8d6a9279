"""Checks that tensor ranks can divide a model, and that a rank can hold its part.

It imports torch, which needs seconds, so only recipes with a model import it.
"""

from collections.abc import Iterator
from typing import Final

from offbeat.config.limits import find_encoder
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import TorchTrainerConfig
from offbeat.launch.checks.model_proof import build_unfilled_model
from offbeat.launch.checks.torch_ranks import compare_largest_rank
from offbeat.messages.finding import Finding, error
from offbeat.plugins.tensor_ranks.tensor_parallel import tensor_plan
from offbeat.trainers.errors import UntrainableModel

_SUBJECT: Final = "tensor ranks"


def check_tensor_ranks(
    config: RunConfig, trainer: TorchTrainerConfig, gpu: int | None = None
) -> Iterator[Finding]:
    """Check the plan against ``trainer.tensor_parallel``, and a rank's memory against ``gpu``.

    ``check_encoder`` does so for a model with separate ranks for its tower.

    Args:
        config: The recipe.
        trainer: Its trainer.
        gpu: Memory of a rank's GPU in bytes. None: unknown, or the ranks are on the CPU.
    """
    if find_encoder(trainer) is not None or (model := build_unfilled_model(config)) is None:
        return
    try:
        tensor_plan(model, trainer.tensor_parallel)
    except UntrainableModel as refused:
        yield error("model", f"{refused.subject} {refused.problem}", f"{refused.fix}.")
        return
    yield from compare_largest_rank(config, trainer, model, _SUBJECT, gpu)
