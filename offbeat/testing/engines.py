"""Prove a kind of engine by releases of one model and requests to it: no run, no Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.messages.failures import FixableError


class EngineRefused(FixableError):
    """An engine that breaks a promise on which runs rely."""

    form = "{}: {}. {}"


PROOF_CALL_S: Final = 60.0
"""Seconds in which an engine that is proved answers each call."""


def prove_engine(
    plugin: EnginePlugin,
    model: Path,
    generator: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = PROOF_CALL_S,
) -> None:
    """Prove that engines serve exactly the weights of the release whose version they stamp.

    Loads releases of the model and of changed weights, a damaged one and one whose canary is of other
    weights. Each token's logprob is compared with a plain forward pass under the weights of its version.
    Seeds, stop tokens, cancelled requests and requests that are open while a release fails are tried too;
    then the end ids of the model, with a second engine whose copy of the model names many.

    A step that never returns is reported after the deadline. It keeps its thread, and so its process:
    nothing in a process can end it. A server that blocks its event loop blocks the proof as well.

    Args:
        plugin: The object of the entry point.
        model: Directory of a small model, in float32.
        generator: Keys of section ``generator``.
        deadline_s: Seconds in which the engine answers each call.

    Raises:
        EngineRefused: An engine breaks its contract.
    """
    from offbeat.testing.engine_proof import prove  # imports torch

    prove(plugin, model, generator or {}, deadline_s)
