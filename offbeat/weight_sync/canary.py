"""Canaries: check that an engine computes the same as the trainer from the same weights.

Digests prove that every byte arrived. They do not prove that the module computes with these bytes.
A head tied to an embedding may keep its old values. An adapter may never be applied. A loader may
load a layer into the wrong place. So the trainer computes a few next-token distributions with the
weights that it publishes. An engine must compute the same distributions before it serves these
weights. Pure: no torch.

Legend: P prompts, K tokens kept from each distribution.
"""

import functools
import hashlib
import math
import random
from collections.abc import Sequence
from typing import Final

from offbeat.messages.failures import CanaryFailed
from offbeat.messages.weights import Canary, CanaryAnswer
from offbeat.weight_sync.dtypes import ITEMSIZE, narrowest_bytes

PROMPTS: Final = 4
PROMPT_TOKENS: Final = 8
# Tokens kept of each distribution. An engine's greedy token is among the first few.
KEPT: Final = 64
TOLERANCE_FLOAT32: Final = 0.02  # nats
# Nats of one token's logprob, if kernels round bfloat16 differently
TOLERANCE_16_BIT: Final = 0.25
# Nats, if kernels also round activations to float8. SmolLM2-135M moved by up to 1.14 on 48 prompts.
TOLERANCE_8_BIT: Final = 1.5
FLOOR_FACTOR: Final = 5.0
"""Tolerance of an engine for later releases, as a multiple of its first gap.

It applies only if it exceeds the canary's tolerance. A 550B mixture of experts had a gap of 0.06
nats with the weights of its files, and gaps of 0.15 to 0.30 nats after syncs.
"""
MOST_FACTOR: Final = 2.0
"""Maximum of that tolerance in canary tolerances, so that a wrong engine is still noticed."""
# Nats by which each token of an invented distribution is below its best one
_DROPS: Final = tuple(0.1 * rank for rank in range(KEPT))


def prompts(vocabulary: int, count: int = PROMPTS) -> tuple[tuple[int, ...], ...]:
    """Return the fixed prompts: tokens spread over the vocabulary, equal in all runs of a model."""
    rng = random.Random(vocabulary)
    return tuple(
        tuple(rng.randrange(vocabulary) for _ in range(PROMPT_TOKENS)) for _ in range(count)
    )


def tolerance(*dtypes: str | None, rounds_activations: bool = False) -> float:
    """Return how many nats trainer and engine may differ by if their weights are equal.

    Args:
        dtypes: Dtypes that the weights pass through. With float8 the trainer computes with the
            rounded values, so only the rounding of 16-bit arithmetic remains.
        rounds_activations: Whether the engine's kernels round activations to float8.
    """
    narrowest = narrowest_bytes(*dtypes)
    if narrowest == 1 and rounds_activations:
        return TOLERANCE_8_BIT
    return TOLERANCE_16_BIT if narrowest < ITEMSIZE["float32"] else TOLERANCE_FLOAT32


def gap(canary: Canary, place: int, answer: CanaryAnswer) -> float:
    """Return the nats between an engine's answer and the trainer's distribution, infinite for NaN.

    If the two distributions differ by a distance ``e``, a token's logprob changes by up to ``e``.
    So the trainer's best token and the engine's can be up to ``2 e`` apart. If the trainer did not
    keep the engine's token, it counts as the last kept token.
    """
    tokens, logprobs = canary.tokens[place], canary.logprobs[place]
    logprob = logprobs[tokens.index(answer.token) if answer.token in tokens else -1]
    distance = max(abs(answer.logprob - logprob), (logprobs[0] - logprob) / 2)
    return distance if math.isfinite(distance) and math.isfinite(answer.logprob) else math.inf


class CanaryChecks:
    """Canary checks of one engine process, calibrated by its first check.

    At the first check, trainer and engine are known to have the same weights, so the gap comes from
    rounding in the kernels.
    """

    def __init__(self, engine: str) -> None:
        self._engine = engine
        self._floor: float | None = None  # gap of the first release, in nats

    def check(
        self, canary: Canary, answers: Sequence[CanaryAnswer], *, epoch: int, version: int
    ) -> float:
        """Return the largest gap over the prompts, in nats.

        Raises:
            CanaryFailed: It exceeds the tolerance: the engine computes with different weights.
        """
        tolerance = canary.tolerance
        if not canary.is_fixed:
            floor = min(FLOOR_FACTOR * (self._floor or 0.0), MOST_FACTOR * tolerance)
            tolerance = max(tolerance, floor)
        found = check(
            canary,
            answers,
            engine=self._engine,
            epoch=epoch,
            version=version,
            tolerance=tolerance,
        )
        if self._floor is None:
            self._floor = found
        return found


def check(
    canary: Canary,
    answers: Sequence[CanaryAnswer],
    *,
    engine: str,
    epoch: int,
    version: int,
    tolerance: float | None = None,
) -> float:
    """Return the largest gap over the prompts in nats. ``tolerance`` replaces the canary's.

    Raises:
        CanaryFailed: It exceeds the tolerance: the engine computes with different weights.
    """
    allowed = canary.tolerance if tolerance is None else tolerance
    gaps = [gap(canary, place, answer) for place, answer in enumerate(answers)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    if gaps[worst] > allowed:
        token, logprob = answers[worst]
        kept = dict(zip(canary.tokens[worst], canary.logprobs[worst], strict=True))
        trainer = kept.get(token, canary.logprobs[worst][-1])
        raise CanaryFailed(engine, epoch, version, token, logprob, trainer, gaps[worst], allowed)
    return gaps[worst]


@functools.lru_cache(maxsize=8)
def invent_canary(digest: str) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[float, ...], ...]]:
    """Derive tokens and logprobs [P, K] from a digest, for stubs and fakes without a model."""
    tokens, logprobs = list[tuple[int, ...]](), list[tuple[float, ...]]()
    for place in range(PROMPTS):
        drawn = hashlib.blake2b(f"{digest}/{place}".encode(), digest_size=12).digest()
        first, apart, depth = (int.from_bytes(drawn[at : at + 4]) for at in (0, 4, 8))
        start, stride = first % 1000, 1 + apart % 15
        tokens.append(tuple(range(start, start + KEPT * stride, stride)))
        best = -0.1 - 1.9 * depth / 2**32
        logprobs.append(tuple(map(best.__sub__, _DROPS)))
    return tuple(tokens), tuple(logprobs)


def invent_answers(digest: str) -> list[CanaryAnswer]:
    """Return the canary answers of a stub engine for weights with this digest."""
    tokens, logprobs = invent_canary(digest)
    return [CanaryAnswer(ids[0], values[0]) for ids, values in zip(tokens, logprobs, strict=True)]
