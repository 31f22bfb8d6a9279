"""Checks the weights beyond the digests of their bytes. Pure.

A digest proves that the engines have the bytes that the trainer packed. It proves neither that the
trainer's steps change these bytes, nor that engine and trainer compute the same policy from them.
"""

from collections.abc import Iterable, Mapping
from typing import Final

import structlog

from offbeat.algorithms.staleness_buckets import ON_POLICY_GAP, ON_POLICY_TOKENS
from offbeat.config.sections.sync import SyncConfig
from offbeat.controller.errors import EveryCanaryFailed, LogprobGapTooLarge
from offbeat.messages.failures import CanaryFailed
from offbeat.messages.weights import WeightRelease
from offbeat.weight_sync.dtypes import ITEMSIZE, narrowest_bytes, wire_dtypes

log = structlog.stdlib.get_logger()
WARN_FROM_UNCHANGED: Final = 3  # releases in a row: one or two updates may round away in 16 bits
STRIKES_OF_A_CANARY: Final = 2  # the sync, and one more
FEWEST_ON_POLICY: Final = (
    32  # tokens; with fewer, a mean depends more on single tokens than on the engine
)
WARN_FROM_UNSEEN: Final = 100  # steps in a row
WARN_GAP_FLOAT32: Final = 0.02  # nats per token
WARN_GAP_16_BIT: Final = 0.1  # nats per token
WARN_GAP_8_BIT: Final = 0.4  # nats per token; float8 blocks alone cause 0.16 in SmolLM2-135M


class UnchangedReleases:
    """Counts releases with the same content as the release before, although steps were applied.

    In 16 bits a small learning rate may not reach the served copy for a step or two. The float32
    masters keep such updates. So unchanged releases are counted and cause a warning, but no error.
    """

    def __init__(self) -> None:
        self.count = 0  # over this incarnation of the controller
        self._in_row = 0
        self._warn_at = WARN_FROM_UNCHANGED  # in a row; doubles with each warning

    def released(self, before: WeightRelease | None, release: WeightRelease) -> None:
        """Record a release and its predecessor, which is None at the start and after a rewind."""
        same = before is not None and before.version < release.version
        if before is None or not same or before.digest != release.digest:
            self._in_row, self._warn_at = 0, WARN_FROM_UNCHANGED
            return
        self.count += 1
        self._in_row += 1
        if self._in_row == self._warn_at:
            self._warn_at *= 2
            log.warning(
                "sync.unchanged_releases",
                version=release.version,
                in_row=self._in_row,
                fix=(
                    "if train/grad_norm is 0, nothing is learned: see "
                    "train/zero_variance_groups. Else raise trainer.optimizer.learning_rate, "
                    "or serve float32 weights: model.dtype, sync.wire_dtype"
                ),
            )


class CanaryWatch:
    """Counts failed canaries to decide on another sync, a replaced engine or the end of the run.

    An engine that fails is synced once more. If it fails again, it is replaced, which heals a
    broken engine. If every engine has failed in this way and none has passed since, the trainer and
    the engines compute different policies, and no sample can be trusted.
    """

    def __init__(self, engines: Iterable[str]) -> None:
        self._strikes = dict.fromkeys(engines, 0)  # failures in a row, of the present process
        self._replaced = dict.fromkeys(engines, 0)  # since any engine passed a canary
        self._last: CanaryFailed | None = None

    def failed(self, failure: CanaryFailed) -> None:
        """Record that an engine loaded a release, but does not reproduce the trainer's values."""
        self._strikes[failure.engine] += 1
        self._last = failure

    def passed(self, engine: str) -> None:
        """Record that an engine reproduces the trainer's values."""
        self._strikes[engine] = 0
        self._replaced = dict.fromkeys(self._replaced, 0)

    def must_be_replaced(self, engine: str) -> bool:
        """Return whether the engine failed again after a second sync."""
        return self._strikes[engine] >= STRIKES_OF_A_CANARY

    def replaced(self, engine: str) -> None:
        """Record that the process of this engine is marked dead, for any reason.

        Raises:
            EveryCanaryFailed: Canaries are the reason, for this engine and for all others.
        """
        was_canary, self._strikes[engine] = self.must_be_replaced(engine), 0
        if was_canary:
            self._replaced[engine] += 1
            self._check()

    def retired(self, engine: str) -> None:
        """Record that the run continues without this engine.

        Raises:
            EveryCanaryFailed: All remaining engines have failed.
        """
        del self._strikes[engine], self._replaced[engine]
        self._check()

    def _check(self) -> None:
        if self._last is None or not self._replaced:
            return
        # A single engine may be broken by itself: its next process will show.
        if all(self._replaced.values()) and sum(self._replaced.values()) > 1:
            raise EveryCanaryFailed(len(self._replaced), str(self._last)) from self._last


class LogprobGapGuard:
    """Compares the logprobs of engine and trainer on samples drawn under the weights being trained.

    On these samples engine and trainer should agree up to rounding. A gap from a wrong scale, a
    missing adapter or an old tensor is far larger, and biases every step. If most samples are
    trained one or more versions later, there are few samples of the current weights. So their
    tokens are collected over several steps until the mean is reliable.
    """

    def __init__(self, sync: SyncConfig, model_dtype: str) -> None:
        self._bound = sync.max_logprob_gap
        self._warn_from = _warn_from(narrowest_bytes(*wire_dtypes(model_dtype, sync)))
        self._is_warned = False
        self._sum, self._tokens = 0.0, 0.0  # since the last verdict
        self._steps_unseen = 0  # steps in a row without a verdict

    def check(self, step: int, metrics: Mapping[str, float]) -> None:
        """Check the metrics of one step. The step has been applied already.

        Raises:
            LogprobGapTooLarge: The gap exceeds ``sync.max_logprob_gap``.
        """
        tokens = metrics.get(ON_POLICY_TOKENS)
        if tokens is None:  # a trainer without log-probabilities
            return
        self._sum += tokens * metrics.get(ON_POLICY_GAP, 0.0)
        self._tokens += tokens
        if self._tokens < FEWEST_ON_POLICY:
            self._unseen(step)
            return
        gap = self._sum / self._tokens
        self._sum, self._tokens, self._steps_unseen = 0.0, 0.0, 0
        if self._bound is not None and gap > self._bound:
            raise LogprobGapTooLarge(step, gap, self._bound)
        is_large = gap >= self._warn_from
        if is_large and not self._is_warned:
            log.warning(
                "sync.logprob_gap",
                step=step,
                gap=gap,
                warn_from=self._warn_from,
                fix="compare dtype, attention and sampling settings of engine and trainer; "
                "sync.max_logprob_gap ends the run",
            )
        self._is_warned = is_large

    def _unseen(self, step: int) -> None:
        self._steps_unseen += 1
        if self._steps_unseen % WARN_FROM_UNSEEN == 0:
            log.warning(
                "sync.logprob_gap_unseen",
                step=step,
                steps=self._steps_unseen,
                max_logprob_gap=self._bound,
                fix="every sample is older than the weights it is trained on, so the gap is not "
                "measured: lower sync.canary_interval, or try a run with sampler.max_staleness=0",
            )


def _warn_from(narrowest: int) -> float:
    """Return the smallest gap to warn about. It depends on the narrowest type of the weights."""
    if narrowest == 1:
        return WARN_GAP_8_BIT
    return WARN_GAP_16_BIT if narrowest < ITEMSIZE["float32"] else WARN_GAP_FLOAT32
