"""Sections about learning: trainer, algorithm, weight sync."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at 0 at the last step."""

    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear warm-up from 0."""

    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""

    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """AdamW's running-average coefficients."""

    eps: Annotated[float, Field(gt=0)] = 1e-8
    """AdamW's denominator term."""

    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Clip the global gradient norm to this. None: no clipping."""


class TrainerConfig(Config):
    """Who trains, and how a step is cut."""

    backend: Literal["torch", "megatron", "stub"] = "torch"
    """torch: any Hugging Face causal LM; megatron: extra ``megatron``; stub: a cost model."""

    device: str = "cpu"
    """torch device of each rank."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each rank."""

    data_parallel: Annotated[int, Field(ge=1)] = 1
    """Data-parallel ranks."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Tensor-parallel ranks."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages."""

    expert_parallel: Annotated[int, Field(ge=1)] = 1
    """Expert-parallel ranks."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Tokens, padding included, in one forward-backward on one rank."""

    shared_prompt: bool = True
    """Pack the samples of a group behind one copy of their prompt; off: one padded row a sample."""

    min_tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Tokens to wait for before a chunk is sent, unless the step ends. None: fills every rank once."""

    start_deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time the trainer gets to start."""

    step_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy call of a train step."""

    step_retries: Annotated[int, Field(ge=0)] = 1
    """Times a step is aborted and tried again after a rank reported a failure."""

    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the ranks are replaced and restored from a checkpoint, over the run; one more ends it."""

    max_steps_not_applied: Annotated[int, Field(ge=1)] = 3
    """Steps in a row with a non-finite gradient that end the run."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each rank."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each rank."""


class LossConfig(Config):
    """The policy-gradient loss and its off-policy corrections."""

    name: Literal["clipped_pg"] = "clipped_pg"
    """Clipped policy gradient (PPO's surrogate without a value head)."""

    old_logprobs: Literal["generation", "policy"] = "generation"
    """Denominator of the ratio: the engine's logprobs, or the trainer's own, recomputed before the step."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(policy - generation). Needs ``old_logprobs: policy``."""

    normalize: Literal["tokens", "sequences"] = "tokens"
    """Divide the summed loss by valid tokens, or average each sequence first."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the frozen initial model. 0 loads no reference."""

    kl_kind: Literal["k1", "k3"] = "k3"
    """Estimator of that KL."""


class AlgorithmConfig(Config):
    """From rewards to a gradient."""

    advantage: Literal["grpo", "grpo_no_std", "dr_grpo", "rloo"] = "grpo"
    """How a sample's reward is compared with its group's."""

    loss: LossConfig = LossConfig()
    """The policy-gradient loss."""


class SyncConfig(Config):
    """How generators come to serve new weights."""

    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """keep: running samples go on with new weights; drain: wait for them first; abort_stale: as keep,
    but cancel those that will be too old by the time it is their turn."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two syncs."""

    transport: Literal["object_store"] = "object_store"
    """How the bytes travel."""

    chunk_mb: Annotated[float, Field(gt=0)] = 64.0
    """Size of one transfer chunk in MiB; one tensor larger than this is a chunk of its own."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time an engine gets to take the weights before it is left behind as STALE."""
