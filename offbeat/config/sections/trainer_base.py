"""Defines the settings of section ``trainer`` that its backends have in common.

Plug-ins import this module, and a recipe's models load plug-ins. So this module must not load a
backend.
"""

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig
from offbeat.config.trainer_parts import with_parts


class AnyTrainerConfig(Config):
    """Settings that every trainer has."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Maximum tokens, including padding, per forward-backward pass on one rank. The gradient does
    not depend on it. Lower it if a rank runs out of memory."""

    min_tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Tokens to collect before a chunk goes to the trainer. null: enough for every rank. With fewer
    tokens, training starts earlier but packs worse."""

    start_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds for the trainer to start. null: 120 s plus 1 s per 200 MB of model files. Raise it
    for slow disks."""

    step_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for one trainer call, after which the trainer is replaced."""

    step_retries: Annotated[int, Field(ge=0)] = 1
    """Retries of a step after a rank reports a failure."""

    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the run may replace all ranks and restore them from a checkpoint. One more ends the
    run."""

    max_steps_not_applied: Annotated[int, Field(ge=1)] = 3
    """Consecutive steps without an update that end the run (loss or gradient not finite, or no
    data). The samples of these steps are lost."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves per rank. 0: place the rank on any machine, however busy."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves per rank. A fraction shares the GPU and its memory with an engine."""


class _BeforeParts(AnyTrainerConfig):
    """Settings of every trainer of a model that are listed before the sections of its parts."""

    device: str = "cpu"
    """torch device of each rank: cpu or cuda. cuda needs `trainer.gpus`."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per rank. With more threads than free cores, trainer and engines slow each other
    down."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks. The torch backend also shards weights and optimizer state over them
    (FSDP2)."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each matrix. Keep them on one machine. The torch backend needs a plan in the
    model's config (docs/trainer-ranks.md)."""

    shared_prompt: bool = True
    """Pack the samples of a group behind one copy of their prompt, if this is exact for the model
    (docs/model-proofs.md)."""

    activation_checkpointing: bool = False
    """Keep only the input of each layer and recompute the layer in the backward pass. This needs
    much less memory and up to a third more work. The gradient is the same, bit for bit."""

    moe: MoeConfig = MoeConfig()
    """Balancing of experts, for models that have experts (docs/moe.md)."""


if TYPE_CHECKING:  # lets a type checker show that the core reads no plug-in section
    _WithParts = _BeforeParts
else:
    _WithParts = with_parts(_BeforeParts)


class ModelTrainerConfig(_WithParts):
    """Settings of every trainer of a model; a plug-in derives the section of its backend from it."""

    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained, as in `[model.embed_tokens.*, lm_head.*]`. `*`
    also matches dots. Each pattern must match a parameter (docs/recipes.md). Frozen parameters need
    no gradient and no moments. megatron can freeze only a vision tower (docs/megatron.md)."""

    @property
    def stages(self) -> int:
        """Return the number of ranks that share the layers."""
        return 1

    @property
    def ranks_of_row(self) -> int:
        """Return the number of ranks that share each row of tokens."""
        return 1

    @property
    def ranks_of_expert(self) -> int:
        """Return the number of ranks that share the matrices of each expert."""
        return 1
