"""Evaluation pump: scores held-out prompts at one weight version.

A pinned engine takes no part in weight syncs, so no number mixes two versions. It catches up
afterwards. With one engine only, no newer weights are served meanwhile: training continues as far
as ``max_staleness`` allows, then waits, at most until the evaluation's deadline.
"""

import asyncio
import statistics
from collections.abc import Sequence
from typing import NoReturn

import structlog

from offbeat.config.limits import min_valid_samples
from offbeat.config.sampling_identity import sampling_identity
from offbeat.controller.engine_record import EngineRecord
from offbeat.controller.pending_waits import Pump
from offbeat.controller.ports import Prompts, Rollouts, TelemetryPort
from offbeat.controller.receipts import refusal
from offbeat.controller.rollouts import group_seed
from offbeat.controller.state import RunState
from offbeat.messages.failures import (
    ActorLost,
    Component,
    DeadlineExceeded,
    OffbeatError,
    RolloutFailed,
)
from offbeat.messages.groups import Receipt, RolloutTask

log = structlog.stdlib.get_logger()


class EvaluationFailed(OffbeatError):
    """A version could not be scored; training is not affected."""

    def __init__(self, version: int, detail: str) -> None:
        super().__init__(version, detail)
        self.version, self.detail = version, detail

    def __str__(self) -> str:
        return f"version {self.version} could not be scored: {self.detail}"


class Evaluation:
    """Runs at most one evaluation at a time; a version requested meanwhile is scored after it.

    consumes   versions that the train pump asks it to score, held-out prompts
    produces   the metrics ``eval/*``
    waits for  a version to score, an engine that serves it, pinned to it until the end
    woken by   the train pump every ``eval.interval`` steps, the sync pump
    """

    def __init__(
        self,
        state: RunState,
        prompts: Prompts | None,
        workers: Rollouts,
        telemetry: TelemetryPort,
    ) -> None:
        self._state, self._prompts = state, prompts
        self._workers, self._telemetry = workers, telemetry
        self._sampling = sampling_identity(state.config)
        self._engine: str | None = None  # pinned

    def is_due(self, version: int) -> bool:
        interval = self._state.config.eval.interval
        return self._prompts is not None and bool(interval) and version % interval == 0

    def ask(self, version: int) -> None:
        """Request the score of this version, or of a newer one if no engine serves it any more."""
        self._state.evaluation.asked = version

    async def finished(self) -> None:
        """Wait until nothing is left to score; an evaluation ends by its deadline."""
        pending = self._state.evaluation
        await self._state.waits.until(
            Pump.TRAIN, "the evaluation", lambda: pending.asked is None and not pending.is_busy
        )

    async def run(self) -> NoReturn:
        """Score the requested versions, one after another."""
        state, pending = self._state, self._state.evaluation
        while True:
            await state.waits.until(
                Pump.EVALUATION, "a version to score", lambda: pending.asked is not None
            )
            pending.is_busy, asked, pending.asked = True, pending.asked or 0, None
            limit_s = state.config.eval.deadline_s
            try:
                async with asyncio.timeout(limit_s):
                    engine = await self._pinned(asked)
                    await self._score(engine)
            except (EvaluationFailed, TimeoutError) as failure:
                error = str(failure) or f"eval.deadline_s={limit_s:g} is over"
                log.warning("eval.given_up", version=asked, error=error)
                pending.failed_count += 1
                pending.failure = error
            finally:
                self._unpin()
                pending.is_busy = False

    async def _pinned(self, asked: int) -> EngineRecord:
        """Pin an engine that serves the requested version or a newer one, and return it."""
        state, fleet = self._state, self._state.fleet

        await state.waits.until(
            Pump.EVALUATION,
            f"an engine with version {asked}",
            lambda: fleet.can_pin(max(asked, fleet.serving_version)),
        )
        self._engine = fleet.pin(max(asked, fleet.serving_version))
        if self._engine is None:
            raise LookupError(f"no engine serves version {asked}, and one did when it was chosen")
        return fleet.engines[self._engine]

    def _unpin(self) -> None:
        if self._engine is not None:
            self._state.fleet.unpin(self._engine)
            self._engine = None

    async def _score(self, engine: EngineRecord) -> None:
        version = engine.version
        async with asyncio.TaskGroup() as rollouts:
            tasks = [rollouts.create_task(self._one(task, version)) for task in self._tasks(engine)]
            if tasks:
                await asyncio.wait(tasks)
        answers = [task.result() for task in tasks]
        receipts = [answer for answer in answers if isinstance(answer, Receipt)]
        if failed := [answer for answer in answers if not isinstance(answer, Receipt)]:
            raise failed[0]
        if receipts:
            self._report(version, receipts)

    def _tasks(self, engine: EngineRecord) -> list[RolloutTask]:
        config, prompts = self._state.config, self._prompts
        found = [] if prompts is None else [prompts.prompt(n) for n in range(config.eval.prompts)]
        return [
            RolloutTask(
                prompt=prompt,
                attempt=1,
                samples=config.eval.samples,
                engine=engine.name,
                seed=group_seed(config.seed + 1, prompt.prompt_index),
                deadline_s=config.rollout.deadline_s,
                evaluation=True,
                sampling=self._sampling,
                min_valid_samples=min(min_valid_samples(config), config.eval.samples),
            )
            for prompt in found
            if prompt is not None
        ]

    async def _one(self, task: RolloutTask, version: int) -> Receipt | EvaluationFailed:
        try:
            receipt, _ = await self._state.waits.call(
                f"evaluation of prompt {task.prompt_index}",
                on=f"a worker and {task.engine}",
                component=Component.WORKER,
                deadline_s=task.deadline_s,
                reply=self._workers.rollout(self._state.fence, task),
            )
        except (ActorLost, DeadlineExceeded, RolloutFailed) as failure:
            return EvaluationFailed(version, str(failure))
        versions = {number for spans in receipt.version_spans for number, _ in spans}
        if versions != {version}:
            of = ", ".join(map(str, sorted(versions)))
            return EvaluationFailed(
                version, f"prompt {task.prompt_index} has tokens of versions {of}"
            )
        if refused := refusal(receipt, task, oldest_version=version, trainer_version=version):
            return EvaluationFailed(version, f"prompt {task.prompt_index}: {refused}")
        return receipt

    def _report(self, version: int, receipts: Sequence[Receipt]) -> None:
        rewards = [reward for receipt in receipts for reward in receipt.valid_rewards]
        lengths = [
            tokens for receipt in receipts for tokens in receipt.of_valid(receipt.valid_tokens)
        ]
        metrics = {
            "eval/reward": statistics.fmean(rewards),
            "eval/samples": float(len(rewards)),
            "eval/masked_samples": float(sum(receipt.masked_samples for receipt in receipts)),
            "eval/response_tokens_mean": statistics.fmean(lengths),
            "eval/version": float(version),
        }
        state = self._state
        self._telemetry.emit(state.step, state.ledger.trainer_version, metrics)
        log.info("eval.done", version=version, reward=metrics["eval/reward"])
