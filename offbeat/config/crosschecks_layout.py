"""Finds sizes of trainer and fleet that do not fit together, and suggests a fix.

What depends on the model is checked against its config: ``offbeat/trainers/megatron/layout_rules.py``,
``offbeat/trainers/torch/tensor_parallel.py``.
"""

from collections.abc import Iterator
from typing import Final

from offbeat.config.clash import Clash
from offbeat.config.limits import (
    encoder_ranks,
    moe_of,
    trainer_device,
    trainer_ranks,
    trainer_resources,
)
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


MOST_TRAINER_RANKS: Final = 1 << 17
"""More GPUs than any machine for training has; what is computed for each rank still takes seconds."""


def fleet_clashes(config: RunConfig) -> Iterator[Clash]:
    """More engines are required than the run has."""
    engines, fewest = config.generator.engines, config.generator.min_engines
    if fewest > engines:
        yield Clash(
            ("generator.min_engines", "generator.engines"),
            f"generator.min_engines={fewest} is more than generator.engines={engines}: the run has "
            "fewer engines than it may go on with",
            f"Set generator.min_engines to {engines} or less, or generator.engines to {fewest} or "
            "more.",
        )


def rank_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield more trainer ranks than there can be: a slip of the pen, which would be computed for long."""
    ranks, encoders = trainer_ranks(config), encoder_ranks(config.trainer)
    if ranks > MOST_TRAINER_RANKS:
        of_encoders = f", {encoders} of them of trainer.encoder," if encoders else ""
        yield Clash(
            ("trainer.data_parallel", *(["trainer.encoder"] if encoders else [])),
            f"the sizes of trainer make {ranks} trainer ranks{of_encoders} and at most "
            f"{MOST_TRAINER_RANKS} are possible",
            "Lower trainer.data_parallel or another size of trainer"
            f"{' or trainer.encoder' if encoders else ''}.",
        )


def rank_gpu_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield fractions of GPUs for several trainer ranks: Ray may put two ranks on one GPU, which NCCL refuses."""
    resources = trainer_resources(config) if trainer_device(config.trainer) != "cpu" else []
    least = min((each.gpus for each in resources), default=1.0)
    if len(resources) > 1 and 0 < least < 1:
        key = "trainer.gpus" if config.trainer.gpus == least else "trainer.encoder.gpus"
        yield Clash(
            (key, "trainer.device"),
            f"{key}={least:g} may put two of the {len(resources)} trainer ranks on one GPU, and NCCL connects "
            "ranks on GPUs of their own only",
            f"Set {key} to 1, or use one trainer rank.",
        )
