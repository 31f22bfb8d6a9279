"""Finds learning-rate schedules and roundings that cannot work, and suggests a fix."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from offbeat.config.clash import Clash
from offbeat.config.limits import encoder_of, trainer_ranks
from offbeat.config.run import RunConfig
from offbeat.config.schedule_in_steps import schedule_in_steps
from offbeat.config.sections.optimizer import OptimizerConfig


def rounding_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield what rounding at random does not go with."""
    trainer = config.trainer
    if trainer.backend == "stub" or trainer.optimizer.rounding == "nearest":
        return
    key, ranks = "trainer.optimizer.rounding", trainer_ranks(config)
    has_encoder = encoder_of(trainer) is not None
    one_rank = "train on one rank, with trainer.data_parallel and trainer.tensor_parallel of 1"
    if has_encoder:
        one_rank = "train on one rank, without trainer.encoder"
    if trainer.backend != "torch":
        yield Clash(
            (key, "trainer.backend"),
            f"{key}=stochastic is of trainer.backend=torch; {trainer.backend} rounds weights by itself",
            f"Set {key} to nearest, or trainer.backend to torch.",
        )
    if ranks > 1:
        yield Clash(
            (key, "trainer.encoder" if has_encoder else "trainer.data_parallel"),
            f"{key}=stochastic does not go with {ranks} trainer ranks: each gathers float32 weights and "
            "rounds them to the nearest",
            f"Set {key} to nearest, also of a run that is resumed, or {one_rank}.",
        )
    if config.model.dtype != "bfloat16":
        yield Clash(
            (key, "model.dtype"),
            f"{key}=stochastic does nothing with model.dtype={config.model.dtype}: its weights are the "
            "optimizer's own",
            f"Set model.dtype to bfloat16, or {key} to nearest.",
        )


_OPTIMIZER = "trainer.optimizer"


def schedule_clashes(config: RunConfig) -> Iterator[Clash]:
    """Yield a minimum above the peak, and keys that the schedule does not read or lacks."""
    if config.trainer.backend == "stub":
        return
    given = config.trainer.optimizer
    yield from _counted_once(given)
    optimizer = schedule_in_steps(config, given)
    least, decay = optimizer.min_learning_rate, optimizer.decay_steps
    if least > optimizer.learning_rate:
        yield Clash(
            (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.learning_rate"),
            f"{_OPTIMIZER}.min_learning_rate={least:g} is above the peak, "
            f"{_OPTIMIZER}.learning_rate={optimizer.learning_rate:g}: the rate would rise",
            f"Set {_OPTIMIZER}.min_learning_rate to less.",
        )
    if least and optimizer.schedule == "constant":
        yield Clash(
            (f"{_OPTIMIZER}.min_learning_rate", f"{_OPTIMIZER}.schedule"),
            f"{_OPTIMIZER}.min_learning_rate={least:g} is not used: "
            f"{_OPTIMIZER}.schedule=constant never falls",
            f"Set {_OPTIMIZER}.schedule to cosine, linear or wsd, or leave it out.",
        )
    decays, warms = _phase("decay", given, optimizer), _phase("warmup", given, optimizer)
    if decay is None and optimizer.schedule == "wsd":
        yield Clash(
            (f"{_OPTIMIZER}.decay_steps", f"{_OPTIMIZER}.schedule"),
            f"{_OPTIMIZER}.schedule=wsd needs {_OPTIMIZER}.decay_steps or decay_samples",
            f"Set {_OPTIMIZER}.decay_steps to the number of last steps that decay; a tenth to a fifth "
            "of the run is usual.",
        )
    if decay is not None and optimizer.schedule != "wsd":
        yield Clash(
            (decays.key, f"{_OPTIMIZER}.schedule"),
            f"{decays} is not used: {_OPTIMIZER}.schedule={optimizer.schedule}",
            f"Set {_OPTIMIZER}.schedule to wsd, or leave {decays.key} out.",
        )
    elif decay is not None and decay + optimizer.warmup_steps > config.steps:
        per_unit = decays.per_step(config)
        most = max(1, config.steps - optimizer.warmup_steps) * per_unit
        yield Clash(
            (decays.key, warms.key, "steps"),
            f"{decays} and {warms} are more than steps={config.steps}: the peak is never reached",
            f"Set {decays.key} to {most} or less."
            if optimizer.warmup_steps < config.steps
            else f"Set {warms.key} to less than {config.steps * warms.per_step(config)}.",
        )


@dataclass(frozen=True, slots=True)
class _Phase:
    """The length of warm-up or decay, under the key that the recipe gives it by."""

    key: str
    given: int
    steps: int

    def __str__(self) -> str:
        in_steps = f" ({self.steps} steps)" if self._is_in_samples else ""
        return f"{self.key}={self.given}{in_steps}"

    def per_step(self, config: RunConfig) -> int:
        """Return how much of the key's unit a step is."""
        return config.groups_per_step * config.samples_per_group if self._is_in_samples else 1

    @property
    def _is_in_samples(self) -> bool:
        return self.key.endswith("_samples")


def _phase(
    what: Literal["decay", "warmup"], given: OptimizerConfig, in_steps: OptimizerConfig
) -> _Phase:
    steps = (in_steps.decay_steps if what == "decay" else in_steps.warmup_steps) or 0
    samples = given.decay_samples if what == "decay" else given.warmup_samples
    if samples is None:
        return _Phase(f"{_OPTIMIZER}.{what}_steps", steps, steps)
    return _Phase(f"{_OPTIMIZER}.{what}_samples", samples, steps)


def _counted_once(optimizer: OptimizerConfig) -> Iterator[Clash]:
    pairs = (
        ("warmup", optimizer.warmup_steps, optimizer.warmup_samples),
        ("decay", optimizer.decay_steps, optimizer.decay_samples),
    )
    for what, steps, samples in pairs:
        if steps and samples:
            yield Clash(
                (f"{_OPTIMIZER}.{what}_steps", f"{_OPTIMIZER}.{what}_samples"),
                f"{_OPTIMIZER}.{what}_steps={steps} and {_OPTIMIZER}.{what}_samples={samples} are two "
                "lengths of one phase",
                "Leave one of them out.",
            )
