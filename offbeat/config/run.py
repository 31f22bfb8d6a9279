"""The root of a recipe, and the checks across its sections."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config, RecipePath, RunName
from offbeat.config.rollouts import (
    BufferConfig,
    DataConfig,
    EnvironmentConfig,
    FilterConfig,
    GeneratorConfig,
    InOrderConfig,
    ReadyFirstConfig,
    RolloutConfig,
    SamplerConfig,
)
from offbeat.config.runtime import RuntimeConfig
from offbeat.config.training import AlgorithmConfig, SyncConfig, TrainerConfig
from offbeat.config.transfer_queue import TransferQueueConfig


class ModelConfig(Config):
    """The language model."""

    path: RecipePath
    """Hugging Face directory with config, weights and tokenizer; relative to the recipe."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights in trainer and generators."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""


class WandbConfig(Config):
    """Weights & Biases, one sink beside ``metrics.jsonl``."""

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    """auto: online with an API key in the environment, else offline."""

    project: str = "offbeat"
    """Project the run is shown in."""

    entity: str | None = None
    """Team or user; None: the default of the API key."""


class SupervisionConfig(Config):
    """Limits after which the run ends."""

    stall_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    """End the run when nothing moves for this long and no call is within its own deadline."""

    shutdown_timeout_s: Annotated[float, Field(gt=0)] = 10.0
    """Time each actor gets to close before it is killed."""

    signal_grace_s: Annotated[float, Field(gt=0)] = 10.0
    """Time a run gets to end in order after SIGINT or SIGTERM, a last checkpoint included.

    Keep it below
    the time after which the sender of the signal kills: often 30 s."""

    wall_clock_limit_s: Annotated[float, Field(gt=0)] | None = None
    """End after this time, counted from the start of the command, as ``offbeat control RUN stop`` does.
    Leave a step and a checkpoint of room before the limit of a scheduler. None: no limit."""

    controller_restart_budget: Annotated[int, Field(ge=0)] = 3
    """Times a controller that died is replaced, over the run; one more ends it."""

    snapshot_records: Annotated[int, Field(ge=1)] = 20_000
    """Journal records between two snapshots, four for each group beyond a thousand outstanding if that
    is more: what a new controller has to read behind the last one."""


class CheckpointConfig(Config):
    """Checkpoints: the model that is kept, and the state that a lost trainer goes back to."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between two checkpoints of the trainer's whole state; 0: none, a lost trainer starts
    over. What is trained since the last one is lost with the trainer, and trained again. A run
    that ends in order keeps one of its last step."""

    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk, newest first."""

    final: bool = True
    """Write the trained model to ``checkpoints/step_N`` at the end, as a Hugging Face directory."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time writing it may take."""


class EvalConfig(Config):
    """Scoring prompts at one weight version: held-out ones with ``path``."""

    interval: Annotated[int, Field(ge=0)] = 0
    """Steps between two evaluations; 0: none."""

    path: RecipePath | None = None
    """JSON Lines file with held-out prompts; relative to the recipe. None: the first ``prompts`` that
    the run trains on, each once: a score of what was learnt by heart too, not a held-out one."""

    prompts: Annotated[int, Field(ge=1)] = 64
    """Prompts of one evaluation, at most."""

    samples: Annotated[int, Field(ge=1)] = 1
    """Samples of each prompt."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Time one evaluation may hold its engine at the version it scores; then it is given up."""


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median time of one group."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of the log-normal around it: long tails."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Compute time of one optimizer step."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Time an engine takes to load weights."""


class RunConfig(Config):
    """Complete configuration of one training run."""

    name: RunName = "run"
    """Names the run in its directory and in W&B."""

    seed: int = 0
    """Seed from which everything random is derived."""

    steps: Annotated[int, Field(ge=1)]
    """Optimizer steps to take."""

    groups_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompt groups in one optimizer step, over all ranks."""

    samples_per_group: Annotated[int, Field(ge=1)] = 8
    """Samples of one prompt."""

    run_dir: str = "runs/{name}"
    """Directory of everything the run writes; ``{name}`` is filled in.

    Relative to the working directory.
    """

    model: ModelConfig
    """The language model."""

    data: DataConfig = DataConfig()
    """Source of prompts."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment that turns a prompt and a model into rewarded samples."""

    sampler: SamplerConfig = ReadyFirstConfig(name="ready_first")
    """The staleness policy."""

    buffer: BufferConfig = BufferConfig()
    """Limits of outstanding groups."""

    transfer_queue: TransferQueueConfig = TransferQueueConfig()
    """Storage of finished groups that wait to be trained."""

    rollout: RolloutConfig = RolloutConfig()
    """Dispatch and retries of groups."""

    generator: GeneratorConfig = GeneratorConfig()
    """The engines."""

    trainer: TrainerConfig = TrainerConfig()
    """The trainer."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Algorithm, from rewards to a gradient."""

    sync: SyncConfig = SyncConfig()
    """Weight sync."""

    filters: FilterConfig = FilterConfig()
    """Finished groups that are not trained."""

    eval: EvalConfig = EvalConfig()
    """Scoring held-out prompts."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints: the model that is kept, and the state that a lost trainer goes back to."""

    supervision: SupervisionConfig = SupervisionConfig()
    """Limits after which the run ends."""

    runtime: RuntimeConfig = RuntimeConfig()
    """Environment of the run's processes, on every machine."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""

    stub: StubConfig = StubConfig()
    """The cost model of stub backends."""


__all__ = ["InOrderConfig", "ReadyFirstConfig", "RunConfig"]
