"""Defines section ``generator`` of a recipe."""

from typing import Annotated, Literal

from pydantic import Field

from offbeat.config.base import Config
from offbeat.config.sections.sampling import SamplingConfig
from offbeat.config.sections.vllm import VllmConfig


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
