"""Checks of the algorithm: what a preset leaves behind beside another loss, and imitation of own samples."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

from offbeat.config.presets import PRESETS
from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig
from offbeat.launch.checks.finding import Finding, warning

_SUBJECT: Final = "algorithm"
_LOSS: Final = "algorithm.loss"


def check_algorithm(config: RunConfig) -> Iterator[Finding]:
    """Warn of bounds of a preset that belong to another loss, and of ``sft`` on an engine's samples."""
    yield from _bounds_of_another_loss(config)
    yield from _imitates_itself(config)


def _bounds_of_another_loss(config: RunConfig) -> Iterator[Finding]:
    preset, loss = config.algorithm.preset, config.algorithm.loss
    if preset is None:
        return
    of_preset = cast("Mapping[str, Any]", PRESETS[preset]["loss"])
    if of_preset["name"] == loss.name:
        return
    fields = type(loss).model_fields
    common = PolicyGradientLossConfig.model_fields
    kept = {
        key: value
        for key, value in of_preset.items()
        if key in fields and key not in common and key != "name"
        if value == getattr(loss, key) != fields[key].default
    }
    if kept:
        keys = " and ".join(f"{_LOSS}.{key}={value:g}" for key, value in kept.items())
        yield warning(
            _SUBJECT,
            f"{keys} of algorithm.preset={preset} are bounds of its own loss, "
            f"{of_preset['name']}, and hold for {_LOSS}.name={loss.name}",
            f"Set {' and '.join(f'{_LOSS}.{key}' for key in kept)}, or take a preset of {loss.name}.",
        )


def _imitates_itself(config: RunConfig) -> Iterator[Finding]:
    generator = config.generator
    if (
        config.algorithm.loss.name == "sft"
        and generator.has_engines
        and generator.backend != "stub"
    ):
        yield warning(
            _SUBJECT,
            f"{_LOSS}.name=sft imitates every sample, whatever its reward, and "
            f"generator.backend={generator.backend} samples from the policy itself: it would imitate what it "
            "already does",
            "Set generator.backend to none and environment.name to demonstrations, or take a loss that reads "
            "rewards.",
        )
