"""Evaluation pump: scores sets of held-out prompts, all with the same weight version.

An evaluation is recorded as one record, after its last sample. If an evaluation was due but not
recorded, the next controller of the run repeats it, with the version that engines serve by then.

A pinned engine is skipped by weight syncs, so each metric belongs to one version. The engine
catches up afterwards. If there is only one engine, no newer weights are served meanwhile. Training
continues until ``max_staleness`` stops it. Then it waits, at most until the evaluation's deadline.
If engines share the trainer's weights, no step is finished during an evaluation, whatever the
engine count.
"""

import asyncio
import json
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NoReturn

import msgspec
import structlog

from offbeat.config.limits import min_valid_samples, shares_weights
from offbeat.config.mixture import evaluation_sets, sampling_identity
from offbeat.config.run import RunConfig
from offbeat.config.sections.generator import StubGeneratorConfig
from offbeat.controller.pending_waits import Pump
from offbeat.controller.ports import EvaluationLog, Prompts, Rollouts, TelemetryPort
from offbeat.controller.receipts import refusal
from offbeat.controller.reward_budget import RewardBudget
from offbeat.controller.rollouts import group_seed
from offbeat.controller.state import LatestScores, RunState
from offbeat.environments.media_prompts import find_media
from offbeat.messages.evaluations import EvaluatedVersion, ScoredSample
from offbeat.messages.failures import (
    ActorLost,
    Component,
    DeadlineExceeded,
    OffbeatError,
    RolloutFailed,
)
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.messages.text import bound_text
from offbeat.telemetry.evaluation_files import evaluation_metrics
from offbeat.telemetry.records import EVALUATION

log = structlog.stdlib.get_logger()
_STUB_SEQUENCES: Final = 256  # a stub decodes any number at once; this is the default of the others


PREVIEW_BYTES: Final = 64 * 2**20
"""Maximum bytes of media previews that one evaluation keeps. Later prompts get no preview."""


class EvaluationFailed(OffbeatError):
    """A version could not be scored. Training is not affected.

    Fix: none: training continues without this score; ``eval.deadline_s`` limits its time.
    """

    version: int
    detail: str

    def __str__(self) -> str:
        return f"version {self.version} could not be scored: {self.detail}"


class Evaluation:
    """Runs one evaluation at a time. A version requested meanwhile is scored afterwards.

    consumes   versions that the train pump asks it to score, held-out prompts
    produces   the metrics ``eval/*``, records of evaluations
    waits for  a version to score, an engine to pin that serves this version (or all engines,
               in a run that trains nothing)
    woken by   the train pump every ``eval.interval`` steps, the sync pump
    """

    def __init__(
        self,
        state: RunState,
        sets: Mapping[str, Prompts],
        workers: Rollouts,
        telemetry: TelemetryPort,
        record: EvaluationLog,
        *,
        on_all_engines: bool = False,
        spares_prompts: bool = False,
    ) -> None:
        """Create the pump without a requested evaluation.

        With ``on_all_engines``, nothing is trained, so every engine can be used. With
        ``spares_prompts``, an evaluation succeeds even if all samples of a prompt fail.
        """
        self._state, self._sets = state, sets
        self._workers, self._telemetry, self._record = workers, telemetry, record
        self._sampling, self._budget = sampling_identity(state.config), RewardBudget(state)
        self._least_valid = 0 if spares_prompts else min_valid_samples(state.config)
        self._on_all_engines, self._shares_weights = on_all_engines, shares_weights(state.config)
        state.evaluation.newest_due = state.ledger.trainer_version
        if (owed := self._due_at_start()) is not None:
            state.evaluation.requested_version = owed
        self._open = dict[str, int]()  # prompts at each engine that is pinned
        self._preview_bytes = 0  # kept in the evaluation at hand

    def is_due(self, version: int) -> bool:
        interval = self._state.config.eval.interval
        return bool(self._sets and interval) and version % interval == 0

    def _due_at_start(self) -> int | None:
        """Return the version that still needs an evaluation when this controller starts."""
        version = self._state.ledger.trainer_version
        interval = self._state.config.eval.interval
        last = version - version % interval if interval else 0
        wanted = self._state.config.eval.at_start if last == 0 else True
        return last if self._sets and wanted and not self._record.has(last) else None

    def request(self, version: int) -> None:
        """Request an evaluation of this version, or of a newer one if no engine serves it now."""
        pending = self._state.evaluation
        pending.requested_version, pending.newest_due = version, version

    def request_due(self) -> None:
        """Request the evaluation that is due at the version after a recovery or rewind.

        If a controller died before it knew that a step was applied, nobody has requested the
        evaluation of that version. If a rewind has undone a version, its evaluation is due again.
        """
        pending, version = self._state.evaluation, self._state.ledger.trainer_version
        pending.newest_due = min(pending.newest_due, version)
        if self.is_due(version) and pending.newest_due < version:
            self.request(version)

    async def finished(self) -> None:
        """Wait until nothing is left to score. No evaluation outlasts its deadline."""
        pending = self._state.evaluation
        await self._state.waits.until(
            Pump.TRAIN,
            "the evaluation",
            lambda: pending.requested_version is None and not pending.is_busy,
        )

    async def run(self) -> NoReturn:
        """Score the requested versions, one after another."""
        state, pending = self._state, self._state.evaluation
        if pending.requested_version is not None:
            # The deadline covers only scoring. Waiting for the first weights has different limits.
            fleet = state.fleet
            await state.waits.until(
                Pump.EVALUATION, "the first weights", lambda: fleet.can_pin(fleet.serving_version)
            )
        while True:
            await state.waits.until(
                Pump.EVALUATION, "a version to score", lambda: pending.requested_version is not None
            )
            version = pending.requested_version or 0
            pending.is_busy, pending.requested_version = True, None
            limit_s = state.config.eval.deadline_s
            try:
                async with asyncio.timeout(limit_s):
                    served = await self._pin(version)
                    if served is not None:
                        await self._score(version, served)
            except (EvaluationFailed, TimeoutError) as failure:
                error = str(failure) or f"eval.deadline_s={limit_s:g} is over"
                log.warning("eval.given_up", version=version, error=error)
                pending.failed_count += 1
                pending.failure = error
            finally:
                self._unpin()
                pending.is_busy = False

    async def _pin(self, version: int) -> int | None:
        """Pin an engine that serves the requested version or a newer one. Return its version.

        Return None if a rewind has undone the requested version. The version is requested again
        once it is trained again.
        """
        state, fleet = self._state, self._state.fleet

        def is_undone() -> bool:
            return version > state.ledger.trainer_version

        def can_pin(at: int) -> bool:
            if self._shares_weights and (state.ledger.intent or at != state.ledger.trainer_version):
                return False  # its engine would not decode before it has loaded a newer version
            return fleet.can_pin_all(at) if self._on_all_engines else fleet.can_pin(at)

        await state.waits.until(
            Pump.EVALUATION,
            f"{'all engines' if self._on_all_engines else 'an engine'} with version {version}",
            lambda: is_undone() or can_pin(max(version, fleet.serving_version)),
        )
        if is_undone():
            return None
        served = max(version, fleet.serving_version)
        while (engine := fleet.pin(served)) is not None:
            self._open[engine] = 0
            if not self._on_all_engines:
                break
        if not self._open:
            raise LookupError(
                f"no engine serves version {version} any more, although one did before"
            )
        return served

    def _unpin(self) -> None:
        for engine in self._open:
            self._state.fleet.unpin(engine)
        self._open.clear()

    async def _score(self, due: int, version: int) -> None:
        if not self._budget.covers_evaluation:
            detail = "the rest of rollout.reward_call_budget does not cover its calls: raise it"
            raise EvaluationFailed(version, detail)
        self._preview_bytes = 0
        room = asyncio.Semaphore(_in_flight(self._state.config) * len(self._open))
        async with asyncio.TaskGroup() as rollouts:
            tasks = [(task, rollouts.create_task(self._one(task, version, room)))
                     for task in self._tasks()]  # fmt: skip
        answers = [(task, running.result()) for task, running in tasks]
        for _, answer in answers:
            if not isinstance(answer, Receipt):
                raise answer
        receipts = ((task, answer) for task, answer in answers if isinstance(answer, Receipt))
        correct_from = self._state.config.eval.correct_from
        self._report(EvaluatedVersion(due, version, tuple(_samples(receipts, correct_from))))

    def _tasks(self) -> Iterator[RolloutTask]:
        """Yield the rollouts to run. Each engine is chosen when it has room."""
        config = self._state.config
        for name, one in evaluation_sets(config).items():
            samples, count = one.samples or 1, one.prompts or 0
            prompts = (self._sets[name].prompt(place) for place in range(count))
            for prompt in prompts:
                if prompt is None:
                    break
                yield RolloutTask(
                    prompt=prompt,
                    attempt=1,
                    samples=samples,
                    engine="",
                    seed=group_seed(config.seed + 1, prompt.prompt_index),
                    deadline_s=config.rollout.deadline_s,
                    evaluation=True,
                    sampling=self._sampling,
                    min_valid_samples=min(self._least_valid, samples),
                    eval_set=name,
                )

    async def _one(
        self, task: RolloutTask, version: int, room: asyncio.Semaphore
    ) -> Receipt | EvaluationFailed:
        """Sample a prompt on the pinned engine with the fewest open prompts."""
        place = f"prompt {task.prompt_index}{f' of {task.eval_set}' if task.eval_set else ''}"
        try:
            async with room:
                with self._freest() as engine:
                    task = msgspec.structs.replace(task, engine=engine)
                    receipt, _ = await self._state.waits.call(
                        f"evaluation of {place}",
                        target=f"a worker and {engine}",
                        component=Component.WORKER,
                        deadline_s=task.deadline_s,
                        reply=self._workers.rollout(self._state.fence, task),
                        engine=engine,
                    )
        except (ActorLost, DeadlineExceeded, RolloutFailed) as failure:
            return EvaluationFailed(version, str(failure))
        versions = {number for spans in receipt.version_spans for number, _ in spans}
        if versions != {version}:
            of = ", ".join(map(str, sorted(versions)))
            return EvaluationFailed(version, f"{place} has tokens of versions {of}")
        if refused := refusal(receipt, task, oldest_version=version, trainer_version=version):
            return EvaluationFailed(version, f"{place}: {refused}")
        return self._bound_previews(receipt)

    def _bound_previews(self, receipt: Receipt) -> Receipt:
        nbytes = sum(len(each.rgb) for each in receipt.previews)
        if self._preview_bytes + nbytes > PREVIEW_BYTES:
            return msgspec.structs.replace(receipt, previews=())
        self._preview_bytes += nbytes
        return receipt

    @contextmanager
    def _freest(self) -> Generator[str]:
        engine = min(self._open, key=self._open.__getitem__)
        self._open[engine] += 1
        try:
            yield engine
        finally:
            self._open[engine] -= 1

    def _report(self, evaluated: EvaluatedVersion) -> None:
        if not evaluated.samples:
            return
        metrics = evaluation_metrics(evaluated)
        self._telemetry.emit(evaluated.version, evaluated.version, metrics)
        self._record.take(evaluated)
        rewards = {name: value for name, value in metrics.items() if name.endswith("/reward")}
        by_set = {_set_of(name): value for name, value in rewards.items()}
        self._state.scores = LatestScores(evaluated.version, by_set)
        log.info("eval.done", version=evaluated.version, **rewards)


def _set_of(metric: str) -> str:
    """Return the set of a metric such as ``eval/math/reward``, or "" for the only set."""
    return metric.removeprefix(EVALUATION).removesuffix("reward").rstrip("/")


def _in_flight(config: RunConfig) -> int:
    """Return how many prompts to sample at once: twice as many as the engine decodes at once.

    With more prompts, some would use up their deadline waiting in the engine.
    """
    samples = max(each.samples or 1 for each in evaluation_sets(config).values())
    generator = config.generator
    stub = isinstance(generator, StubGeneratorConfig)
    return max(1, 2 * (_STUB_SEQUENCES if stub else generator.max_sequences) // samples)


def _samples(
    receipts: Iterable[tuple[RolloutTask, Receipt]], correct_from: float
) -> Iterator[ScoredSample]:
    for task, receipt in receipts:
        row = find_media().without_content(task.prompt.data)
        prompt = bound_text(json.dumps(row, ensure_ascii=False, default=str))
        for sample, is_valid in enumerate(receipt.valid):
            yield ScoredSample(
                set=task.eval_set,
                prompt_index=task.prompt_index,
                row=task.prompt.row,
                sample=sample,
                reward=receipt.rewards[sample],
                is_valid=is_valid,
                is_correct=is_valid and receipt.rewards[sample] >= correct_from,
                answer=receipt.answers[sample] if receipt.answers else None,
                finish_reason=receipt.finish_reasons[sample],
                response_tokens=receipt.valid_tokens[sample],
                turns=receipt.turns[sample] if receipt.turns else 1,
                response=receipt.texts[sample] if receipt.texts else None,
                prompt=prompt,
                environment_s=receipt.reward_s,
                previews=() if sample else receipt.previews,
                branches=receipt.branches[sample] if receipt.branches else 1,
            )
