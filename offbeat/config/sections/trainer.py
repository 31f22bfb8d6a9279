"""Defines section ``trainer`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, default_choice
from offbeat.config.sections.encoder import EncoderConfig
from offbeat.config.sections.lora import LoraConfig
from offbeat.config.sections.moe import MoeConfig
from offbeat.config.sections.optimizer import OptimizerConfig


class _Trainer(Config):
    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Tokens, padding included, in one forward-backward on one rank. More tokens use a GPU better and need more
    activation memory; lower it when a rank runs out of memory. The gradient does not depend on it."""

    min_tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Tokens to wait for before a chunk is sent to the trainer, unless the step ends. A small number starts to
    train earlier and packs worse, a large one packs better and starts later; None: enough to fill every rank."""

    start_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Time the trainer gets to start. Raise it for slow disks; a hung start is noticed later. None: 120 s, and 1 s
    for each 200 MB of the model's files."""

    step_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy call of a train step. Too short replaces a trainer that is only slow, too long lets a hung
    one hold the run up."""

    step_retries: Annotated[int, Field(ge=0)] = 1
    """Times a step is aborted and tried again after a rank reported a failure. Raise it where failures pass, as
    of a shared GPU; each retry computes the step again."""

    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the ranks are replaced and restored from a checkpoint, over the run; one more ends it. Raise it for
    long runs on machines that are taken away; a fault that returns then repeats more steps before the run ends."""

    max_steps_not_applied: Annotated[int, Field(ge=1)] = 3
    """Steps in a row that end the run if none was applied: loss or gradient not finite, or nothing to train on.
    1 ends at the first one; a larger number passes over rare bad batches, whose samples are lost: the next batch is
    trained in their place."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each rank. Reserving keeps other actors off these cores; 0 lets any machine take the
    rank, however busy."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each rank. A fraction shares a GPU with an engine, whose memory it then shares."""


class _ModelTrainer(_Trainer):
    device: str = "cpu"
    """torch device of each rank: cpu or cuda. cuda needs `trainer.gpus`."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each rank. More are faster while cores are free; beyond the cores, trainer and engines slow
    each other down."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks. More ranks make a step shorter while there are groups for all, and exchange gradients;
    the torch backend also cuts weights and optimizer over them."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that each matrix is divided over. More fit wider layers and exchange activations in every layer:
    keep them inside a machine. The torch backend divides models whose config has a plan for it
    (docs/trainer-ranks.md)."""

    shared_prompt: bool = True
    """Pack the samples of a group behind one copy of their prompt, if that is proved exact for the model
    (docs/model-proofs.md). Off, or where it is not, each sample has a row of its own, which computes the prompt
    again."""

    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer for backward, and compute the layer again there. Much less
    memory for up to a third more work, and the same gradient to the last bit."""

    moe: MoeConfig = MoeConfig()
    """Balance of experts, for models that have some (docs/moe.md)."""

    encoder: EncoderConfig | None = None
    """Ranks of their own for the vision tower (docs/encoder-ranks.md)."""

    freeze: tuple[str, ...] = ()
    """Patterns of names of parameters that are not trained, as in `[model.embed_tokens.*, lm_head.*]`; `*` matches
    dots, too. A frozen parameter keeps every bit and needs no gradient and no moments: less memory, and less that
    a step can change. Each pattern has to match a name of the model (docs/recipes.md); beside the megatron backend
    names of a vision tower alone (docs/megatron.md)."""


class TorchTrainerConfig(_ModelTrainer):
    """Any Hugging Face causal LM, cut over data-parallel (FSDP2) and tensor-parallel ranks (DTensor)."""

    backend: Literal["torch"] = "torch"
    """Training backend."""

    lora: LoraConfig | None = None
    """Train adapters, not the model: smaller releases and less memory (docs/lora.md)."""


class MegatronTrainerConfig(_ModelTrainer):
    """megatron-core (extra ``megatron``): models it has a mapping for, over several axes of parallelism."""

    backend: Literal["megatron"] = "megatron"
    """Training backend."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages that the layers are divided into. More fit deeper models and exchange little, but stages idle at
    both ends of a step: send several microbatches per stage."""

    layers_per_stage: (
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None
    ) = None
    """Layers of each pipeline stage, from the first to the last, as in `[11, 12, 12, 11]`; None: equal numbers.
    The first stage has the embedding as well and the last one the output head: fewer layers there even out
    memory and time."""

    context_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that each row of tokens is divided over. More fit longer rows and exchange keys and values in every
    layer; a microbatch of all of them together has this many times `trainer.max_tokens_per_microbatch`."""

    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks of a pipeline stage that experts are divided over: a divisor of tensor_parallel x context_parallel x
    data_parallel / expert_tensor_parallel. More fit more experts and exchange tokens in every layer of experts."""

    expert_tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Ranks that the matrices of each expert are divided over, whatever `trainer.tensor_parallel` is. 1 keeps
    experts whole and exchanges tokens alone; more fit experts too large for one rank, and exchange more."""

    sequence_parallel: bool = False
    """Tensor-parallel ranks share the tokens between their matrices, too: less activation memory at the same
    traffic. Experts with tensor parallelism need it."""


class StubTrainerConfig(_Trainer):
    """A cost model (section `stub`) instead of a model: dry runs, without torch."""

    backend: Literal["stub"] = "stub"
    """Training backend."""


TrainerConfig = Annotated[
    TorchTrainerConfig | MegatronTrainerConfig | StubTrainerConfig,
    Field(discriminator="backend"),
    default_choice("backend", "torch"),
]
