"""Constructor arguments of an engine."""

from dataclasses import dataclass

from offbeat.config.generator_kinds import GeneratorConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.sections.stub import StubConfig
from offbeat.run_files.sharing import Sharing


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Everything an engine is built from; picklable, so that a restart builds the same engine."""

    name: str
    model: ModelConfig
    generator: GeneratorConfig
    stub: StubConfig
    seed: int
    run_dir: str
    sharing: Sharing | None = None  # None: there is one machine
    quantize: str | None = None  # form of the matrices that releases hold
    keeps_base: bool = False  # whether it keeps the release that it serves, to apply deltas to it
