"""Proves a kind of engine with releases of one model and with requests: no run, no Ray."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from offbeat.config.engine_plugin import EnginePlugin
from offbeat.messages.failures import FixableError


class EngineRefused(FixableError):
    """An engine that breaks a promise that runs rely on.

    Fix: correct the engine as the message says.
    """

    form = "{}: {}. {}"


PROOF_CALL_S: Final = 60.0
"""Seconds in which an engine must answer each call of the proof."""


def prove_engine(
    plugin: EnginePlugin,
    model: Path,
    generator: Mapping[str, Any] | None = None,
    *,
    deadline_s: float = PROOF_CALL_S,
) -> None:
    """Prove that engines serve exactly the weights of the version that they stamp.

    The proof loads releases of the model and of changed weights, a damaged release, and a release
    with the canary of different weights. Each token's logprob is compared with a plain forward pass
    under the weights of the token's version. The proof also tests seeds, stop tokens, cancelled
    requests and requests that are open while a release fails. Then end ids are tested with a second
    engine, which has a copy of the model with many end ids.

    A step that never returns is reported after the deadline. Its thread, and therefore the process,
    stays alive, because nothing in a process can end a thread. A server that blocks its event loop
    also blocks the proof.

    Args:
        plugin: The object of the entry point.
        model: Directory of a small model, in float32.
        generator: Keys of section ``generator``.
        deadline_s: Seconds in which the engine must answer each call.

    Raises:
        EngineRefused: An engine breaks its contract.
    """
    from offbeat.testing.engine_proof import prove  # imports torch

    prove(plugin, model, generator or {}, deadline_s)
