"""Finds parallel sizes of a trainer that do not go together, and says what to set instead.

What depends on the model is checked against its config: ``offbeat/trainers/megatron/layout_rules.py``,
``offbeat/trainers/torch/tensor_parallel.py``.
"""

from collections.abc import Iterator

from offbeat.config.clash import Clash
from offbeat.config.limits import moe_of
from offbeat.config.run import RunConfig
from offbeat.config.sections.trainer import MegatronTrainerConfig, TorchTrainerConfig


def layout_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield parallel sizes that cannot work together, or beside another setting."""
    trainer = config.trainer
    if isinstance(trainer, TorchTrainerConfig) and trainer.tensor_parallel > 1:
        yield from _torch_divides_plain_models(config, trainer)
    if isinstance(trainer, MegatronTrainerConfig):
        yield from _tensor_parallel_ranks_share_the_tokens(trainer)
        yield from _experts_fill_the_ranks_of_a_stage(trainer)
        yield from _every_stage_has_its_layers(trainer)


def _torch_divides_plain_models(config: RunConfig, trainer: TorchTrainerConfig) -> Iterator[Clash]:
    ranks = f"trainer.tensor_parallel={trainer.tensor_parallel} of trainer.backend=torch"
    if moe_of(config) is not None:
        yield Clash(
            ("trainer.tensor_parallel", "trainer.moe"),
            f"{ranks} does not go with trainer.moe: experts are not divided",
            "Set trainer.tensor_parallel to 1, or leave trainer.moe out.",
        )


def _tensor_parallel_ranks_share_the_tokens(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    if trainer.sequence_parallel and trainer.tensor_parallel == 1:
        yield Clash(
            ("trainer.sequence_parallel", "trainer.tensor_parallel"),
            "trainer.sequence_parallel does nothing with trainer.tensor_parallel=1: it is "
            "tensor-parallel ranks that share the tokens",
            "Set it to false, or trainer.tensor_parallel to 2 or more.",
        )


def _experts_fill_the_ranks_of_a_stage(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    tensor, context, data = (
        trainer.tensor_parallel,
        trainer.context_parallel,
        trainer.data_parallel,
    )
    expert, within = trainer.expert_parallel, trainer.expert_tensor_parallel
    if tensor * context * data % (expert * within):
        yield Clash(
            ("trainer.expert_parallel", "trainer.expert_tensor_parallel"),
            f"trainer.expert_parallel={expert} x trainer.expert_tensor_parallel={within} does not divide the "
            f"{tensor * context * data} ranks of a pipeline stage: tensor_parallel={tensor} x "
            f"context_parallel={context} x data_parallel={data}",
            f"Set their product to a divisor of {tensor * context * data}, or trainer.data_parallel to a number "
            "with which it is one.",
        )


def _every_stage_has_its_layers(trainer: MegatronTrainerConfig) -> Iterator[Clash]:
    stages = trainer.layers_per_stage
    if stages is not None and len(stages) != trainer.pipeline_parallel:
        yield Clash(
            ("trainer.layers_per_stage", "trainer.pipeline_parallel"),
            f"trainer.layers_per_stage has {len(stages)} numbers for trainer.pipeline_parallel="
            f"{trainer.pipeline_parallel} stages",
            f"Give one number for each stage, or set trainer.pipeline_parallel to {len(stages)}.",
        )
