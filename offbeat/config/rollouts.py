"""Sections about making samples: prompts, environment, engine, buffer, staleness."""

from typing import Annotated, Any, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, RecipePath


class DataConfig(Config):
    """Source of prompts."""

    path: RecipePath | None = None
    """JSON Lines file, one prompt a row; relative to the recipe. None.

    The environment makes its own.
    """

    shuffle: bool = True
    """Visit the rows of each epoch in an order drawn from ``seed``."""

    epochs: Annotated[int, Field(ge=1)] | None = None
    """Passes over the rows before the source is at its end. None: endless."""


class EnvironmentConfig(Config):
    """Environment that turns a prompt and a model into rewarded samples."""

    name: Literal["arithmetic", "gsm8k", "function", "custom", "stub"] = "arithmetic"
    """arithmetic: built-in addition; gsm8k: questions with one number as answer, from a file.

    Function: a Python function as reward; custom: ``target`` is an Environment class.
    """

    target: str | None = None
    """``module:name`` of the reward function or Environment class, importable from the working directory."""

    options: Options = {}
    """Keyword arguments of the environment."""

    reward_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest one call of user reward code may take before its process is killed."""

    reward_start_s: Annotated[float, Field(gt=0)] = 120.0
    """Longest a reward process may take to start and import ``target``; past it the run ends."""

    reward_workers: Annotated[int, Field(ge=1)] = 1
    """Killable child processes that run user reward code, for each environment worker."""

    reward_memory_mb: Annotated[int, Field(ge=64)] = 2048
    """Address space a reward process may use before the operating system refuses it more."""

    max_turns: Annotated[int, Field(ge=1)] = 1
    """Model calls in one episode at most."""

    workers: Annotated[int, Field(ge=1)] = 1
    """Environment worker actors; each runs many episodes at once."""


class InOrderConfig(Config):
    """Train exactly the prompts of each batch, in order; reproducible."""

    name: Literal["in_order"]
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 0
    """Most weight versions between a sample's oldest token and training on it. 0 is synchronous."""

    max_lookahead: Annotated[int, Field(ge=0)] | None = None
    """Batches generated ahead of the one in training. None: ``max_staleness``."""


class ReadyFirstConfig(Config):
    """Trains ready groups in arrival order, paced so that nothing is ever discarded."""

    name: Literal["ready_first"]
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Most weight versions between a sample's oldest token and training on it. 0 is synchronous."""


class WeightFifoConfig(Config):
    """Train in order of weight version: no group is overtaken by one of newer weights."""

    name: Literal["weight_fifo"]
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Most weight versions between a sample's oldest token and training on it. 0 is synchronous."""


class WindowedConfig(Config):
    """Train any ready group within the window, generate more than is needed, discard what is late."""

    name: Literal["windowed"]
    """Name of the policy."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Most weight versions between a sample's oldest token and training on it: the window."""

    over_sampling_ratio: Annotated[float, Field(ge=1)] = 1.0
    """Groups admitted at once, as a multiple of those the window can train."""

    freshest_first: bool = False
    """Train the newest weight versions first; off: arrival order."""

    on_evicted: Literal["readmit", "drop"] = "readmit"
    """A group that grew too old, ready or in flight: roll its prompt out again, or drop it as
    ``stale``. Rollouts longer than the window cost time when they are rolled out again."""


class CustomSamplerConfig(Config):
    """A staleness policy of your own.

    A class with the methods of ``offbeat.sampler.policy.Sampler``.
    """

    name: Literal["custom"]
    """Name of the policy."""

    target: str
    """``module:Class``, importable from the working directory; called with ``groups_per_step``,
    ``max_staleness`` and ``options`` as keyword arguments."""

    max_staleness: Annotated[int, Field(ge=0)] = 1
    """Most weight versions between a sample's oldest token and training on it; enforced at use."""

    options: Options = {}
    """Further keyword arguments of the class."""


SamplerConfig = Annotated[
    InOrderConfig | ReadyFirstConfig | WeightFifoConfig | WindowedConfig | CustomSamplerConfig,
    Field(discriminator="name"),
]


class FilterConfig(Config):
    """Finished groups that are not worth a place in a batch: dropped by reason, and replaced."""

    zero_variance: bool = False
    """Drop groups whose samples all got the same reward.

    They have no gradient (dynamic sampling).
    """

    max_truncated_fraction: Annotated[float, Field(ge=0, le=1)] | None = None
    """Drop groups of which more than this share of samples ran out of tokens. None: keep them."""

    max_per_step: Annotated[int, Field(ge=1)] | None = None
    """Groups filtered for one step before the next ones are kept whatever they are; which these are
    depends on arrival. None: ten times ``groups_per_step``."""


class BufferConfig(Config):
    """Limits of outstanding groups. Rollouts wait for room; nothing is dropped."""

    capacity_groups: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups admitted and not yet trained. None: what the sampler can use."""

    capacity_mb: Annotated[float, Field(gt=0)] = 1024.0
    """Payload held and promised, in MiB. A group in flight counts at its largest possible size."""


class RolloutConfig(Config):
    """Dispatch of prompt groups, and the handling of failed ones."""

    max_in_flight: Annotated[int, Field(ge=1)] | None = None
    """Prompt groups generating at once. None: what the sampler admits."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest healthy rollout of one prompt group.

    One that waits for its engine then counts against
    the engine (``generator.request_strikes``), one that waits for its environment does not."""

    infrastructure_retries: Annotated[int, Field(ge=0)] = 8
    """Further attempts of a group whose engine or worker was lost or late."""

    consecutive_failures: Annotated[int, Field(ge=1)] = 64
    """Infrastructure failures in a row, over all groups, that end the run.

    Those of groups that were in
    flight together count as one: a process that dies takes all of its groups with it."""

    outage_failures: Annotated[int, Field(ge=1)] = 4
    """Failures of the environment in a row, over all groups, that are taken for an outage of it.

    From then on one group at a time is tried, with growing waits, until a rollout is answered. A trial
    costs its prompt no retry."""

    data_retries: Annotated[int, Field(ge=0)] = 1
    """Further attempts of a group whose environment or reward failed."""

    drop_budget: Annotated[int, Field(ge=0)] = 0
    """Groups that may be dropped over the run for data failures; one more ends it."""

    infrastructure_drop_budget: Annotated[int, Field(ge=0)] | None = None
    """Groups that may be dropped over the run after ``infrastructure_retries``, because each attempt
    hung or lost its engine or worker; one more ends it. None: as many as ``drop_budget``, counted
    apart."""

    on_dropped_prompt: Literal["replace", "shrink"] = "replace"
    """replace: draw a fresh prompt so that the batch stays whole; shrink.

    Train the smaller batch.
    """

    min_step_batch_fraction: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Smallest batch that ``on_dropped_prompt.

    Shrink`` may leave, as a share of ``groups_per_step``;
    further dropped prompts of the step are replaced."""

    log: bool = True
    """Keep every finished group in ``rollouts/*.parquet``."""

    backoff_s: Annotated[float, Field(gt=0)] = 0.25
    """First wait after a failed rollout; doubles with each failure of the group, with jitter."""

    backoff_max_s: Annotated[float, Field(gt=0)] = 10.0
    """Longest such wait."""


class SamplingConfig(Config):
    """Settings by which tokens are drawn."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Logits are divided by it before the softmax; the loss uses the same temperature."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus mass to draw from. Logprobs are of the untruncated distribution."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Tokens a model call may generate."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, besides the model's end-of-sequence token."""


class VllmConfig(Config):
    """The vLLM engines, with ``generator.backend: vllm``."""

    tensor_parallel: Annotated[int, Field(ge=1)] = 1
    """Devices each layer of an engine is split over."""

    pipeline_parallel: Annotated[int, Field(ge=1)] = 1
    """Stages the layers of an engine are split into."""

    expert_parallel: bool = False
    """Split experts, not each expert's matrices, over the devices of an engine."""

    pause: Literal["keep", "wait", "abort"] = "keep"
    """What a weight sync does to running samples. keep: they go on afterwards; wait.

    They end first,
    on the old weights; abort: they start anew on the new ones."""

    kv: Literal["recompute", "keep"] = "recompute"
    """Keys and values at a weight sync. recompute: made anew by the new weights, as a fresh prompt
    would be; keep: those of the old weights stay, which costs nothing and shifts the logprobs."""

    call_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time each call of a weight sync into the engine may take; then the engine is STALE."""

    heartbeat_deadline_s: Annotated[float, Field(gt=0)] = 60.0
    """Time the engine's process may take to answer between two decode steps before it counts as hung."""

    engine_args: dict[str, Any] = {}
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their Python names."""


class GeneratorConfig(Config):
    """The engines that sample."""

    backend: Literal["embedded", "vllm", "stub"] = "embedded"
    """embedded: any Hugging Face causal LM in this package's engine; vllm: extra ``vllm``; stub.

    A latency model.
    """

    engines: Annotated[int, Field(ge=1)] = 1
    """Engine actors."""

    device: str = "cpu"
    """torch device of each engine."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each engine."""

    max_sequences: Annotated[int, Field(ge=1)] = 256
    """Samples an engine decodes at once."""

    max_model_len: Annotated[int, Field(ge=2)] = 512
    """Longest prompt plus response, in tokens."""

    deterministic: bool = False
    """Decode one group at a time with per-sample seeds, so that results do not depend on arrival."""

    start_deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Time an engine gets to start, first time and after a restart."""

    restart_budget: Annotated[int, Field(ge=0)] = 16
    """Restarts of engines over the run. An engine that needs one more is retired: the run goes on
    without it, or ends where that would leave fewer than ``min_engines``."""

    retire_after: Annotated[int, Field(ge=1)] = 4
    """Restarts of one engine, with no request answered in between, after which it is retired rather
    than restarted again; not where that would leave fewer than ``min_engines``."""

    min_engines: Annotated[int, Field(ge=1)] = 1
    """Engines without which the run does not go on: no more are retired than leave so many."""

    request_strikes: Annotated[int, Field(ge=1)] = 3
    """Requests in a row that fail on an engine whose probes answer, before its process is replaced."""

    probe_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Time between two probes of an engine that is well. Fleets of more than 400 engines are probed
    less often: 200 probes a second over all of them."""

    probe_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Time an engine may take to answer a probe. One that misses it is given no work meanwhile."""

    probe_strikes: Annotated[int, Field(ge=1)] = 2
    """Probes in a row that an engine may leave unanswered before its process is replaced."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each engine actor. 0 lets any machine schedule it."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each engine actor."""

    sampling: SamplingConfig = SamplingConfig()
    """How tokens are drawn."""

    vllm: VllmConfig = VllmConfig()
    """The vLLM engines, with ``backend: vllm``."""
