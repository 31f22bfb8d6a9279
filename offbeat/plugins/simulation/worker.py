"""Fake environment workers: let an engine decode, reward the samples, send receipt and payload."""

import math
from functools import partial
from typing import Final

import msgspec

from offbeat.config.limits import max_reward_calls
from offbeat.messages.failures import (
    ENVIRONMENT_UNAVAILABLE,
    Component,
    FailureKind,
    OffbeatError,
    RolloutFailed,
)
from offbeat.messages.groups import Receipt, RolloutTask
from offbeat.plugins.simulation.actor import Actor
from offbeat.plugins.simulation.context import SimulationContext
from offbeat.plugins.simulation.disk import SimulatedPayload
from offbeat.plugins.simulation.engine import Decoding, FakeEngine
from offbeat.plugins.simulation.faults import FaultMoment
from offbeat.plugins.simulation.groups import (
    Content,
    data_problem,
    drawn_samples,
    failure_of,
    poisoned,
    receipt_of,
    with_failed_samples,
)
from offbeat.plugins.simulation.network import DEATH_NOTICED_S, Report, SimulatedCall
from offbeat.plugins.simulation.records import (
    Generated,
    PoisonTaken,
    RewardsCalled,
    Scored,
    WorkerDied,
    WorkerStarted,
)

_DEADLY_AFTER_S: Final = 0.1  # from arrival to the death of the engine
_ENDLESS_S: Final = 1e5  # longer than any episode
REWARD_S: Final = 0.02
TURN_S: Final = 0.05
"""Time that the environment needs between two turns of a group. The engine has no part of the group
meanwhile."""


class FakeWorker(Actor):
    """Fake of one environment worker. It drops the work of a replaced controller."""

    def __init__(
        self, name: str, context: SimulationContext, engines: dict[str, FakeEngine]
    ) -> None:
        self._engines = engines
        stub = context.config.stub
        self._mu, self._sigma = math.log(stub.median_rollout_s), stub.tail_sigma
        self.spooled_share = 0.0  # share of the finished groups that are written to disk
        self.sample_failures = 0.0  # share of the tries of a sample that fail
        self.several_turns = False  # whether samples may have several turns, and branches
        super().__init__(name, context)

    def born(self) -> None:
        self._open: dict[SimulatedCall, _Rollout] = {}
        self._reward_calls = 0
        self.context.record(WorkerStarted, self.name, self.process.name)

    def call_rewards(self, task: RolloutTask) -> None:
        """Make the calls that score a group. They are drawn only if the run has a budget."""
        context = self.context
        if context.config.rollout.reward_call_budget is None:
            return
        config = context.config
        most = max_reward_calls(config) * task.samples // config.samples_per_group
        self._reward_calls += context.rng.randint(min(task.samples, most), most)
        context.record(RewardsCalled, *self._report(), evaluation=task.evaluation)

    def _report(self) -> Report:
        return self.process.name, self._reward_calls

    def ended(self) -> None:
        self.context.record(WorkerDied, self.name, self.process.name)
        for call in list(self._open):
            self.drop(call)

    def superseded(self, incarnation: int) -> None:
        for call in [each for each in self._open if each.fence.incarnation < incarnation]:
            self.drop(call)

    def serve(self, call: SimulatedCall) -> None:
        if call.cancelled:
            return
        call.report_of = self._report
        try:
            self.check_fence(call)
            if call.method == "rollout":
                self._roll_out(call, call.args[0])
                return
        except OffbeatError as failure:
            call.fail(failure)
            return
        call.answer(None)

    def _roll_out(self, call: SimulatedCall, task: RolloutTask) -> None:
        engine = self._engines[task.engine]
        if not refused(call, task, engine, engine.incarnation):
            _Rollout(self, call, task, engine)
            self._strike_with(task, engine)

    def _strike_with(self, task: RolloutTask, engine: FakeEngine) -> None:
        """Make a poison prompt kill its engine. A prompt that hangs has no end (see ``opened``)."""
        kind = "" if task.evaluation else self.context.poison.get(task.prompt_index, "")
        if not kind:
            return
        self.context.record(PoisonTaken, task.prompt_index, task.attempt, task.engine)
        if kind == "prompt_kills":
            engine.later(_DEADLY_AFTER_S, engine.die)

    def drop(self, call: SimulatedCall) -> None:
        """Drop a call that is no longer awaited."""
        rollout = self._open.pop(call, None)
        call.on_cancel = None
        if rollout is not None:
            rollout.deadline.cancel()
            if rollout.decoding is not None:
                rollout.engine.drop(rollout.decoding)

    def opened(self, call: SimulatedCall, rollout: "_Rollout") -> float:
        """Return the seconds that the engine decodes."""
        self._open[call] = rollout
        call.on_cancel = partial(self.drop, call)
        task = rollout.content.task
        if not task.evaluation and task.prompt_index in self.context.poison:
            return _ENDLESS_S
        return math.exp(self.context.rng.gauss(self._mu, self._sigma))

    def is_held(self, call: SimulatedCall) -> bool:
        """Return whether the turns of its group have not ended, and the call was not dropped."""
        return call in self._open

    def close_call(self, call: SimulatedCall) -> None:
        """Forget a call after its turns have ended."""
        del self._open[call]
        call.on_cancel = None  # call and rollout would keep each other until the episode ends


class _Rollout:
    """One group in transit through an engine."""

    def __init__(
        self, worker: FakeWorker, call: SimulatedCall, task: RolloutTask, engine: FakeEngine
    ) -> None:
        self.worker, self.call, self.engine = worker, call, engine
        self.incarnation = engine.incarnation
        self.content = Content(task, worker.context.config, several_turns=worker.several_turns)
        self.turn, self.spans = 0, [list[tuple[int, int]]() for _ in range(task.samples)]
        self.seconds = worker.opened(call, self) / self.content.most_turns
        self.decoding: Decoding | None = None  # None: between two turns
        self.begin_turn()
        self.deadline = worker.later(task.deadline_s, self.late)

    def begin_turn(self) -> None:
        """Let the engine decode one turn of every sample that has another turn."""
        lengths = tuple([tokens for _, tokens in self.content.tokens_of_turn(self.turn)])
        self.decoding = self.engine.decode(lengths, self.seconds, self.decoded)

    def go_on(self) -> None:
        """Begin a turn after the first one. Runs in the worker."""
        worker, call = self.worker, self.call
        if not worker.is_held(call):
            return
        if refused(call, self.content.task, self.engine, self.incarnation):
            worker.drop(call)
        else:
            self.begin_turn()

    def late(self) -> None:
        """Handle the deadline: report whether the rollout waits for its engine.

        Runs in the worker.
        """
        call, task = self.call, self.content.task
        if call.answered or call.cancelled:
            return
        waits_for_engine = self.worker.is_held(call) and self.decoding is not None
        self.worker.drop(call)
        source = Component.ENGINE if waits_for_engine else Component.ENVIRONMENT
        call.fail(failure_of(task, "deadline", task.engine, source))

    def decoded(self, decoding: Decoding, complete: bool) -> None:  # noqa: FBT001 - of an engine
        """Handle the end of decoding, or of the engine.

        Runs in the engine's process, or outside.
        """
        worker, call, content = self.worker, self.call, self.content
        decoding.entry = None  # it refers to the decoding
        if not worker.is_held(call):
            return
        self.decoding = None
        task = content.task
        if complete:
            self._take(decoding)
            if self.turn < content.most_turns:
                worker.later(TURN_S, self.go_on)
                return
            worker.close_call(call)
            worker.call_rewards(task)
            spans = tuple(map(tuple, self.spans))
            receipt = receipt_of(content, self.engine, spans)
            worker.later(REWARD_S, self.rewarded, receipt)
        else:
            worker.close_call(call)
            failure, noticed_at = lost(task, "engine_lost"), self.engine.process.noticed_at
            worker.context.loop.at(noticed_at, worker.process, call.fail, failure)

    def _take(self, decoding: Decoding) -> None:
        """Add the tokens of a turn to its samples."""
        of_turn = zip(
            self.content.tokens_of_turn(self.turn), self.engine.spans(decoding), strict=True
        )
        for (sample, _), spans in of_turn:
            held = self.spans[sample]
            for version, tokens in spans:
                if held and held[-1][0] == version:
                    held[-1] = version, held[-1][1] + tokens
                else:
                    held.append((version, tokens))
        self.turn += 1

    def rewarded(self, receipt: Receipt) -> None:
        """Send receipt and payload after the rewards. Runs in the worker's process."""
        call, context, task = self.call, self.worker.context, self.content.task
        kind = context.faults.at(FaultMoment.ROLLOUT, self.worker.name)
        if kind == "rollout_hangs" or call.cancelled:
            return
        self.deadline.cancel()
        if context.loop.time() < context.out_of_service_until:
            call.fail(failure_of(task, ENVIRONMENT_UNAVAILABLE, "refused"))
            return
        if kind == "reward_raises":
            problem = data_problem(self.content)
            call.fail(failure_of(task, problem, "ValueError", kind=FailureKind.DATA))
            return
        oldest, newest = receipt.oldest_version, receipt.newest_version
        if share := self.worker.sample_failures:
            drawn = with_failed_samples(receipt, task, context.config, share)
            if isinstance(drawn, RolloutFailed):
                call.fail(drawn)
                return
            receipt = drawn
        self._send(receipt, kind, oldest, newest)

    def _send(self, receipt: Receipt, kind: str, oldest: int, newest: int) -> None:
        """Record the generated group and answer the call with it. ``kind``: its fault, if any."""
        call, context, task = self.call, self.worker.context, self.content.task
        samples = drawn_samples(receipt)
        masked = tuple([sample for sample, gone in enumerate(samples.masked) if gone])
        if kind:
            receipt = poisoned(receipt, kind)
        spans = receipt.version_spans
        made_by = receipt.engine, receipt.engine_incarnation
        if task.evaluation:
            context.record(
                Scored, task.prompt_index, task.attempt, *made_by, spans, kind, task.eval_set
            )
        memory = context.machines.memory_of(self.worker.name)
        payload = SimulatedPayload(
            task.prompt_index,
            task.attempt,
            call.fence.incarnation,
            task.seed,
            oldest,
            newest,
            kind,
            memory,
            masked,
            samples.branches,
            samples.media_bytes,
        )
        share = self.worker.spooled_share
        spooled = bool(share) and not task.evaluation and context.rng.random() < share
        if spooled:
            receipt = msgspec.structs.replace(receipt, spooled=context.disk.spool(payload))
        if not task.evaluation:
            context.record(
                Generated,
                task.prompt_index,
                task.attempt,
                *made_by,
                spans,
                samples,
                kind,
                memory.machine,
                spooled,
            )
        call.answer((receipt, payload))


def refused(call: SimulatedCall, task: RolloutTask, engine: FakeEngine, incarnation: str) -> bool:
    """Fail a call whose engine cannot decode, or is no longer this incarnation."""
    if not engine.process.alive or engine.incarnation != incarnation:
        after_s = max(DEATH_NOTICED_S, engine.process.noticed_at - engine.context.loop.time())
        call.fail(lost(task, "engine_lost"), after_s)
    elif engine.version is None:
        call.fail(lost(task, "engine_unavailable"))
    elif engine.refuses:
        call.fail(lost(task, "engine_answer"))
    else:
        return False
    return True


def lost(task: RolloutTask, reason: str) -> RolloutFailed:
    """Return the failure of a group after the loss of its engine. Another engine may succeed."""
    return failure_of(task, reason, task.engine, Component.ENGINE)
