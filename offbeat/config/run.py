"""Defines the root of a recipe."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field

from offbeat.config.base import Config, Options, RunName, SectionName, is_uri, with_fields
from offbeat.config.generator_kinds import GeneratorConfig
from offbeat.config.problems import Clash
from offbeat.config.sections.algorithm import AlgorithmConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig, MixedEnvironmentConfig
from offbeat.config.sections.eval import EvalConfig
from offbeat.config.sections.generator import EmbeddedGeneratorConfig, StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.rollout import RolloutConfig
from offbeat.config.sections.runtime import RuntimeConfig, SupervisionConfig
from offbeat.config.sections.sampler import FilterConfig, ReadyFirstConfig, SamplerConfig
from offbeat.config.sections.sync import ObjectStoreSyncConfig, SyncConfig
from offbeat.config.sections.trainer import TorchTrainerConfig, TrainerConfig
from offbeat.doors import find_plugins


class BufferConfig(Config):
    """Limits on outstanding groups. Rollouts wait for room; nothing is dropped."""

    capacity_groups: Annotated[int, Field(ge=1)] | None = None
    """Maximum prompt groups admitted but not yet trained. null: as many as the sampler can use.
    Engines idle while the buffer is full."""

    capacity_mib: Annotated[float, Field(gt=0)] = 1024.0
    """Maximum payload in MiB. A group in flight counts with its largest possible size. Ray spills
    to disk if shared memory is too small."""


class TransferQueueConfig(Config):
    """Storage of finished groups that wait to be trained."""

    spool: Literal["ready", "keep", "off"] = "ready"
    """Whether finished groups are also written to `RUN/spool`. ready: write them, so that they
    survive the loss of the controller, and remove each group after it was trained. keep: write them
    and remove none, for `offbeat retrain`; this needs 13 bytes per response token. off: keep groups
    only in memory."""


class CheckpointConfig(Config):
    """Checkpoints of the trainer's state, and the export of the model."""

    interval: Annotated[int, Field(ge=0)] = 100
    """Steps between two checkpoints of the trainer's state. A run that ends cleanly also saves its
    last step. 0: none; a lost trainer or a resumed run then starts over."""

    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept on disk. Each is a whole trainer state."""

    final: bool = True
    """Write the trained model to `checkpoints/step_N` at the end, as a Hugging Face directory."""

    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Seconds for writing a checkpoint."""


_VARIABLE: Final = re.compile(r"\$\{?[A-Za-z_]\w*\}?")


class RunConfig(Config):
    """Complete configuration of one training run."""

    name: RunName = "run"
    """Name of the run, used for its directory and in W&B."""

    seed: int = 0
    """Seed of all randomness. A run repeats bit for bit only with `generator.deterministic`."""

    steps: Annotated[int, Field(ge=1, le=10**9)]
    """Training steps. Each makes one weight version. Learning rate schedules end at the last step,
    so a run that you extend later has followed a shorter schedule."""

    groups_per_step: Annotated[int, Field(ge=1)] = 16
    """Prompt groups per step, over all ranks. More groups reduce gradient noise but lengthen the
    step. The buffer must hold them."""

    samples_per_group: Annotated[int, Field(ge=1)] = 8
    """Samples per prompt. More samples estimate the advantage better and find rare successes.
    Generation cost grows in proportion."""

    run_dir: str = "runs/{name}"
    """Directory for everything the run writes, relative to the working directory or from `~`.
    `{name}` is filled in."""

    model: ModelConfig
    """The language model."""

    data: DataConfig = DataConfig()
    """Source of prompts."""

    environment: EnvironmentConfig = EnvironmentConfig()
    """Environment that turns a prompt and a model into rewarded samples."""

    environments: dict[SectionName, MixedEnvironmentConfig] = {}
    """Several named environments, instead of `environment` and `data`. The run trains on all, in
    proportion to their weights."""

    sampler: SamplerConfig = ReadyFirstConfig()
    """The staleness policy."""

    buffer: BufferConfig = BufferConfig()
    """Limits on outstanding groups."""

    transfer_queue: TransferQueueConfig = TransferQueueConfig()
    """Storage of finished groups that wait to be trained."""

    rollout: RolloutConfig = RolloutConfig()
    """Dispatch and retries of groups."""

    generator: GeneratorConfig = EmbeddedGeneratorConfig()
    """The engines."""

    trainer: TrainerConfig = TorchTrainerConfig()
    """The trainer."""

    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Algorithm, from rewards to a gradient."""

    sync: SyncConfig = ObjectStoreSyncConfig()
    """Weight sync."""

    filters: FilterConfig = FilterConfig()
    """Finished groups that are not trained."""

    eval: EvalConfig = EvalConfig()
    """Scoring held-out prompts."""

    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints of the trainer's state, and the export of the model."""

    supervision: SupervisionConfig = SupervisionConfig()
    """Limits after which the run ends."""

    runtime: RuntimeConfig = RuntimeConfig()
    """Processes that execute the run, and their environment."""

    plugins: dict[SectionName, Options] = {}
    """Sections of trackers from other packages, by name. Naming a tracker here switches it on."""

    stub: StubConfig = StubConfig()
    """The cost model of stub backends."""

    def find_clashes(self) -> Iterator[Clash]:
        if variable := _VARIABLE.search(self.run_dir):
            yield Clash(
                ("run_dir",),
                f"run_dir={self.run_dir} has the variable {variable[0]}, which only a shell fills in",
                "Write its value, or pass run_dir on the command line in double quotes.",
            )
        elif set(self.run_dir.replace("{name}", "")) & set("{}"):
            yield Clash(
                ("run_dir",),
                f"run_dir={self.run_dir} has braces around something else than the name of the run",
                "Only {name} is filled in, as in runs/{name}.",
            )
        if is_uri(self.run_dir):
            yield Clash(
                ("run_dir",),
                f"run_dir={self.run_dir} is a URI: a run writes into a directory of the driver's machine",
                "Name a directory, as in runs/{name}; copy it afterwards, or mount the storage.",
            )


def _with_sections_of_plugins(core: type[RunConfig]) -> type[RunConfig]:
    """Return the model of a recipe with the sections of this package's plug-ins."""
    sections: dict[str, type[Config]] = {
        name: tracker.section for name, tracker in find_plugins("tracker").items()
    }
    fields: dict[str, Any] = {
        name: (section, Field(default=section(), description=section.__doc__))
        for name, section in sections.items()
    }
    return with_fields(core, fields)


if not TYPE_CHECKING:  # lets a type checker show that the core reads no plug-in section
    RunConfig = _with_sections_of_plugins(RunConfig)
