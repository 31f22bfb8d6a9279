"""Defines the kinds of section ``generator`` of a recipe that the core has, and ``generator.sampling``.

Plug-ins derive theirs from ``PluginGeneratorConfig``; ``offbeat.config.generator_kinds`` has all.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from offbeat.config.base import Config, InWords, OneIsAList
from offbeat.config.problems import Clash
from offbeat.messages.generation import LEAST_TEMPERATURE


class SamplingConfig(Config):
    """Settings of token sampling."""

    temperature: Annotated[float, Field(ge=LEAST_TEMPERATURE)] = 1.0
    """Divisor of the logits. The loss uses the same value."""

    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw only from the most probable tokens, up to this total probability. Logprobs refer to the
    full distribution. So with a value below 1, samples do not come from the policy that the loss
    assumes."""

    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw only from this many most probable tokens, and from tokens as probable as the last of
    them. 0: all tokens. Logprobs refer to the full distribution, with the same effect as for
    `top_p`."""

    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Draw only from tokens with at least this fraction of the top token's probability. Logprobs
    refer to the full distribution, as for `top_p`. `min_p` is applied first, then `top_k`, then
    `top_p`."""

    max_new_tokens: Annotated[int, Field(ge=1)] = 16
    """Maximum tokens of one model call. Longer responses are truncated."""

    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sample, in addition to the model's end token. Add the end-of-turn tokens of
    chat models."""

    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1), InWords("not empty")], ...], OneIsAList()
    ] = ()
    """A sample ends once its text contains one of these strings. All tokens up to the one that
    completes the string are kept and trained, and a reward sees the string. A single string needs
    no brackets."""


class _Generator(Config):
    has_engines: ClassVar[bool] = True
    takes_quantized: ClassVar[bool] = False
    has_layout: ClassVar[bool] = False

    engines: Annotated[int, Field(ge=1)] = 1
    """Number of engines. Each has a copy of the weights."""

    max_model_len: Annotated[int, Field(ge=2)] = 512
    """Maximum tokens of prompt and response together; longer responses are truncated. More tokens
    cost memory in engines, buffer and trainer."""

    start_deadline_s: Annotated[float, Field(gt=0)] | None = None
    """Seconds for an engine to start or restart. null: 120 s plus 1 s per 200 MB of model files.
    Raise it for compilation or slow disks."""

    restart_budget: Annotated[int, Field(ge=0)] = 16
    """Engine restarts in the run. An engine that needs one more is retired; if fewer than
    `min_engines` would remain, the run ends."""

    retire_after: Annotated[int, Field(ge=1)] = 4
    """Retire an engine after this many restarts without an answered request in between, if at least
    `min_engines` remain."""

    min_engines: Annotated[int, Field(ge=1)] = 1
    """End the run if fewer engines remain."""

    request_strikes: Annotated[int, Field(ge=1)] = 3
    """Replace an engine after this many consecutive failed requests, even if it answers probes."""

    probe_interval_s: Annotated[float, Field(gt=0)] = 2.0
    """Seconds between two probes of a healthy engine. With more than 400 engines the interval is
    longer, so that all engines together get 200 probes per second."""

    probe_deadline_s: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for an engine to answer a probe. A late engine gets no work until it answers."""

    probe_strikes: Annotated[int, Field(ge=1)] = 2
    """Replace an engine after this many consecutive unanswered probes."""

    cpus: Annotated[float, Field(ge=0)] = 0.0
    """CPUs that Ray reserves per engine. 0: place the engine on any machine, however busy."""

    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs that Ray reserves per engine. A fraction shares the GPU and its memory with another
    actor."""

    sampling: SamplingConfig = SamplingConfig()
    """Settings of token sampling."""

    @property
    def sampling_settings(self) -> Mapping[str, Any]:
        """Return the settings specific to this kind on which the tokens of a group depend."""
        return {}

    def find_clashes(self) -> Iterator[Clash]:
        if self.min_engines > self.engines:
            yield Clash(
                ("generator.min_engines", "generator.engines"),
                f"generator.min_engines={self.min_engines} is more than "
                f"generator.engines={self.engines}: the run would start with fewer engines than "
                "it needs to continue",
                f"Set generator.min_engines to {self.engines} or less, or generator.engines to "
                f"{self.min_engines} or more.",
            )
        new, whole = self.sampling.max_new_tokens, self.max_model_len
        if new >= whole:
            yield Clash(
                ("generator.sampling.max_new_tokens", "generator.max_model_len"),
                f"generator.sampling.max_new_tokens={new} leaves no room for a prompt in "
                f"generator.max_model_len={whole}",
                f"Set generator.max_model_len to more than {new}, or "
                f"generator.sampling.max_new_tokens to {whole - 1} or less.",
            )


class ModelGeneratorConfig(_Generator):
    """Engines that compute with a model."""

    device: str = "cpu"
    """torch device of each engine: cpu or cuda. cuda needs `generator.gpus`."""

    threads: Annotated[int, Field(ge=1)] = 1
    """CPU threads per engine. With more threads than free cores, engines and trainer slow each
    other down."""

    max_sequences: Annotated[int, Field(ge=1)] = 256
    """Maximum samples decoded at once per engine. A larger value raises throughput until compute or
    cache memory runs out."""


class EmbeddedGeneratorConfig(ModelGeneratorConfig):
    """Any Hugging Face causal LM, in offbeat's engine. Needs no extra. For small models and CPUs."""

    backend: Literal["embedded"] = "embedded"
    """Sampling backend."""

    deterministic: bool = False
    """Decode one group at a time, with a seed per sample, so that a run repeats bit for bit. Much
    slower; for debugging."""

    share_weights: bool = False
    """Decode with the trainer's weights: one copy in memory, nothing to send at a sync. Decoding
    pauses during optimizer steps. Needs `runtime.backend=local` and `sampler.max_staleness=0`."""


class PluginGeneratorConfig(ModelGeneratorConfig):
    """Base of the section of a plug-in's engines, which adds ``backend``.

    ``takes_quantized`` says whether engines compute with the quantized weights of
    ``sync.quantize``. ``has_layout`` says whether engines report which regions of the weights each
    worker loads. If they do, trainer ranks send only these regions. ``loads_file_names`` says
    whether engines load tensors by the names in the model's files, instead of the names in its
    module of transformers.
    """

    engine_name: ClassVar[str] = "the engine"
    """Name of the engines in messages."""

    deterministic: ClassVar[bool] = False  # their batches depend on timing
    loads_file_names: ClassVar[bool] = False

    if TYPE_CHECKING:
        backend: Any

    @property
    def rounds_activations(self) -> bool:
        """Return whether engines with quantized weights also round activations."""
        return False


class StubGeneratorConfig(_Generator):
    """A latency model (section `stub`) instead of a model: dry runs, without torch."""

    takes_quantized: ClassVar[bool] = True

    backend: Literal["stub"] = "stub"
    """Sampling backend."""

    deterministic: bool = False
    """Train whole batches alone, as a deterministic run of the embedded engine does."""


class NoGeneratorConfig(Config):
    """No engines: groups are the rows of a file (`environment.name=demonstrations`)."""

    backend: Literal["none"] = "none"
    """Sampling backend."""

    max_model_len: Annotated[int, Field(ge=2)] = 512
    """Longest prompt plus completion, in tokens. A longer row fails its group."""

    # Keys of other kinds, for code that reads a generator of any kind.
    has_engines: ClassVar[bool] = False
    takes_quantized: ClassVar[bool] = False
    has_layout: ClassVar[bool] = False
    sampling_settings: ClassVar[Mapping[str, Any]] = {}
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
        """Return settings under which a row has the model's unmodified probability."""
        return SamplingConfig(temperature=1.0, max_new_tokens=self.max_model_len - 1)


class StubConfig(Config):
    """The cost model of stub trainer and stub generators."""

    median_rollout_s: Annotated[float, Field(gt=0)] = 0.3
    """Median seconds of a group's rollout."""

    tail_sigma: Annotated[float, Field(ge=0)] = 0.8
    """Sigma of the log-normal distribution of rollout times. 0: all rollouts take the same time."""

    step_s: Annotated[float, Field(ge=0)] = 0.2
    """Seconds of computation per optimizer step."""

    sync_s: Annotated[float, Field(ge=0)] = 0.02
    """Seconds for an engine to load weights."""
