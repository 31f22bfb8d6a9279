"""What an engine may be after a sync: as before, of no version, or exact again."""

from releases import Weights
from shared_engine import FENCE, PROMPT, Engine, ask, refused, serve

FP32_NATS = 1e-4


async def still_serves(actor: Engine, served: Weights, version: int) -> None:
    """The weights of before, exactly."""
    state = await actor.state(FENCE)
    assert (state.version, state.digest) == (version, served.release.digest)
    await is_exact(actor, served, version)


async def is_stale(actor: Engine) -> None:
    """No version, and nothing is generated."""
    state = await actor.state(FENCE)
    assert (state.version, state.digest) == (None, None)
    assert await refused(actor)


async def heals(actor: Engine, epoch: int) -> None:
    """A full sync of a new epoch makes it exact."""
    await is_exact(actor, await serve(actor, epoch, 3), 3)


async def is_exact(actor: Engine, served: Weights, version: int) -> None:
    """Its tokens are of this version, their logprobs those of the trainer's own computation."""
    result = await ask(actor, f"exact {version}")
    assert served.worst_error(PROMPT, result) < FP32_NATS
    assert {v for spans in result.version_spans for v, _ in spans} == {version}
