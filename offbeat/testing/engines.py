"""Prove a kind of engine by releases of one model and requests to it: no run, no Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.messages.failures import FixableError


class EngineRefused(FixableError):
    """An engine that breaks a promise on which runs rely."""

    form = "{}: {}. {}"


def prove_engine(
    plugin: EnginePlugin, model: Path, generator: Mapping[str, Any] | None = None
) -> None:
    """Prove that engines serve exactly the weights of the release whose version they stamp.

    Loads releases of the model and of changed weights, a damaged one and one whose canary is of other
    weights. Each token's logprob is compared with a plain forward pass under the weights of its version.

    Args:
        plugin: The object of the entry point.
        model: Directory of a small model, in float32.
        generator: Keys of section ``generator``.

    Raises:
        EngineRefused: An engine breaks its contract.
    """
    from offbeat.testing.engine_proof import prove  # imports torch

    prove(plugin, model, generator or {})
