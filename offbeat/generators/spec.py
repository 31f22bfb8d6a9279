"""Constructor arguments of an engine."""

from dataclasses import dataclass

from offbeat.config.generator_kinds import GeneratorConfig
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.run_files.sharing import Sharing


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """Complete specification of an engine. Picklable, so that a restart builds the same engine."""

    name: str
    model: ModelConfig
    generator: GeneratorConfig
    stub: StubConfig
    seed: int
    run_dir: str
    sharing: Sharing | None = None  # None: only one machine
    quantize: str | None = None  # format of the matrices in releases
    keeps_base: bool = False  # whether it keeps the served release as the base of deltas
