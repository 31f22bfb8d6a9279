"""Constructor arguments of the parts of a run, on any runtime."""

from collections.abc import Iterator, Mapping

from offbeat.config.limits import trainer_resources
from offbeat.config.mixture import environment_workers
from offbeat.config.run import RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.environments.tokenizer import chosen_class
from offbeat.generators.spec import EngineSpec
from offbeat.launch.run_parts import RunSpec
from offbeat.rollouts.worker import EnvironmentSpec
from offbeat.trainers.spec import TrainerSpec


def engine_specs(spec: RunSpec) -> Iterator[EngineSpec]:
    """Yield the specs of all engines; a run of demonstrations has none."""
    config = spec.config
    if config.generator.backend == "none":
        return
    for index in range(config.generator.engines):
        yield EngineSpec(
            name=f"generator-{index}",
            model=_served_model(config),
            generator=config.generator,
            stub=config.stub,
            seed=config.seed + index,
            run_dir=str(spec.run_dir),
            sharing=spec.sharing,
            quantize=config.sync.quantize,
            keeps_base=config.sync.delta,
        )


def _served_model(config: RunConfig) -> ModelConfig:
    """Return the model as engines load it: in the dtype that weights are sent in."""
    wire = config.sync.wire_dtype
    return config.model.model_copy(update={"dtype": wire}) if wire else config.model


def trainer_specs(spec: RunSpec) -> Iterator[TrainerSpec]:
    """Yield the specs of all trainer ranks; one stub represents all of them."""
    ranks = len(trainer_resources(spec.config))
    for rank in range(ranks):
        yield TrainerSpec(
            spec.config,
            str(spec.run_dir),
            rank,
            ranks,
            spec.sharing,
            working_dir=str(spec.working_dir),
            inputs=spec.inputs,
            values=spec.loss_values,
        )


def environment_specs(spec: RunSpec, engines: Mapping[str, str]) -> Iterator[EnvironmentSpec]:
    """Yield the specs of all environment workers.

    ``engines`` are the names of the engines' actors; empty if engines are in the same process.
    """
    for index in range(environment_workers(spec.config)):
        yield EnvironmentSpec(
            name=f"environment-{index}",
            config=spec.config,
            working_dir=str(spec.working_dir),
            run_dir=str(spec.run_dir),
            engines=engines,
            sharing=spec.sharing,
            inputs=spec.inputs,
            tokenizer=chosen_class(spec.config),
            values=spec.other_values,
        )
