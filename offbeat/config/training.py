"""Sections about learning: trainer, algorithm, weight sync."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from offbeat.config.base import Config
from offbeat.config.presets import PresetName, with_preset

Decay = Annotated[float, Field(ge=0, lt=1)]
Ratio = Annotated[float, Field(ge=0)]


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
    """Trainer ranks, and how a step is divided among and within them."""

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

    sequence_parallel: bool = False
    """megatron: tensor-parallel ranks share the tokens between their matrices, too.

    Experts with tensor
    parallelism need it."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """AdamW and its schedule."""

    max_tokens_per_microbatch: Annotated[int, Field(ge=1)] = 8192
    """Tokens, padding included, in one forward-backward on one rank."""

    shared_prompt: bool = True
    """Pack the samples of a group behind one copy of their prompt, if that is proved exact for the model
    (docs/model-proofs.md); off, or if it is not: one padded row for each sample."""

    activation_checkpointing: bool = False
    """Keep only the input of each decoder layer for backward, and compute the layer again there.

    Much
    less memory for up to a third more work, and the same gradient to the last bit."""

    min_tokens_per_chunk: Annotated[int, Field(ge=1)] | None = None
    """Tokens to wait for before a chunk is sent, unless the step ends. None.

    Fills every rank once.
    """

    start_deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time the trainer gets to start."""

    step_deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy call of a train step."""

    step_retries: Annotated[int, Field(ge=0)] = 1
    """Times a step is aborted and tried again after a rank reported a failure."""

    restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times the ranks are replaced and restored from a checkpoint, over the run.

    One more ends it.
    """

    max_steps_not_applied: Annotated[int, Field(ge=1)] = 3
    """Steps in a row that end the run if none was applied.

    Loss or gradient not finite, or nothing to train on.
    """

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each rank."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each rank."""


class LossConfig(Config):
    """The policy-gradient loss and its off-policy corrections.

    Docs/algorithms.md has the formulas.
    """

    name: Literal["clipped_pg", "gspo", "cispo", "sft"] = "clipped_pg"
    """clipped_pg: PPO's surrogate without a value head, a ratio a token; gspo.

    The same with one ratio a
    sequence; cispo: a bounded importance weight that never takes a gradient away; sft: imitate every
    sample, whatever its reward."""

    old_logprobs: Literal["generation", "policy", "current"] = "generation"
    """Denominator of the ratio.

    The engine's logprobs, or the trainer's own at the weights the step begins
    with. policy recomputes those in a pass before the step; current reads them off the training pass
    itself, which costs nothing and makes the ratio exactly 1."""

    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The ratio is clipped below at 1 - clip_low."""

    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """The ratio is clipped above at 1 + clip_high."""

    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """A token of negative advantage pulls no further once its ratio is above this.

    3 is a usual choice.
    """

    tis_cap: Annotated[float, Field(gt=0)] | None = None
    """Cap of the truncated importance weight exp(old - generation).

    Needs ``old_logprobs`` other than
    generation, as the two bands below."""

    icepop_band: tuple[Ratio, Ratio] | None = None
    """A token's weight is exp(old - generation) inside this band, as in [0.5, 5], and 0 outside it."""

    sequence_band: tuple[Ratio, Ratio] | None = None
    """A sequence is dropped from the step if its exp(old - generation) leaves this band."""

    sequence_statistic: Literal["geometric", "product"] = "geometric"
    """What stands for a sequence in ``sequence_band``.

    The geometric mean of its tokens or their product.
    """

    sequence_weights: bool = False
    """A sequence that ``sequence_band`` keeps weighs its exp(old - generation) instead of 1. Needs
    ``sequence_statistic`` product: the geometric mean is no importance weight."""

    count_dropped: bool = True
    """What a band dropped still counts in what the loss is divided by; off.

    The loss is the mean over what
    was kept, KL penalty included."""

    normalize: Literal["tokens", "sequences", "constant"] = "tokens"
    """Divide the summed loss by the step's valid tokens; or average each sequence first.

    Or divide by
    ``constant_tokens`` for each sequence, so that a step's weight does not depend on its lengths."""

    constant_tokens: Annotated[int, Field(ge=1)] | None = None
    """normalize=constant: what each sequence counts for. None.

    Generator.sampling.max_new_tokens.
    """

    step_std: bool = False
    """Divide the step's advantages by their standard deviation over its samples."""

    kl_coef: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL penalty to the frozen initial model. 0 loads no reference."""

    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""


class AlgorithmConfig(Config):
    """Algorithm, from rewards to a gradient."""

    preset: PresetName | None = None
    """A published algorithm by its name: it fills in the keys of this section that are not given.

    A recipe
    or override that names another preset starts the section afresh."""

    advantage: Literal["grpo", "grpo_no_std", "dr_grpo", "rloo", "pass_at_k"] = "grpo"
    """Comparison of a sample's reward with its group's."""

    pass_k: Annotated[int, Field(ge=1)] = 2
    """advantage=pass_at_k: how many samples may try, the best of which counts."""

    loss: LossConfig = LossConfig()
    """The policy-gradient loss."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_the_preset(cls, given: object) -> object:
        return with_preset(given)


class SyncConfig(Config):
    """Delivery of new weights to the generators."""

    mode: Literal["keep", "drain", "abort_stale"] = "keep"
    """keep: running samples go on with new weights; drain: wait for them first; abort_stale.

    As keep,
    but cancel those that will be too old by the time it is their turn."""

    interval: Annotated[int, Field(ge=1)] = 1
    """Optimizer steps between two syncs."""

    transport: Literal["object_store", "gloo"] = "object_store"
    """How the bytes travel. object_store: through Ray, in shared memory on one machine; gloo.

    The trainer
    broadcasts to all engines at once, over TCP."""

    chunk_mb: Annotated[float, Field(gt=0)] = 64.0
    """Size of one transfer chunk in MiB; one tensor larger than this is a chunk of its own."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time an engine gets to take the weights before it is left behind as STALE."""

    slowest_mb_s: Annotated[float, Field(gt=0)] = 100.0
    """gloo: MiB/s below which a link counts as broken. A chunk may take its size over this, and
    ``slack_s``."""

    slack_s: Annotated[float, Field(gt=0)] = 5.0
    """gloo: time that any wait for a peer may take, whatever the size."""

    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Type in which floating-point weights travel and are served; None.

    As the trainer holds them.
    """

    keep_float32: tuple[str, ...] = ("e_score_correction_bias",)
    """Ends of the names of tensors that ``wire_dtype`` does not round to 16 bits."""

    canary_interval: Annotated[int, Field(ge=0)] = 4
    """Releases from one canary to the next.

    Next-token distributions of the trainer that an engine has to
    reproduce before it serves the release. A trainer's first release has one. 1: each; 0: none."""

    max_logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Nats per token by which the logprobs of engine and trainer may differ on samples drawn under the
    weights being trained; more ends the run. None: a warning from 0.02, with 16-bit weights from 0.1."""
