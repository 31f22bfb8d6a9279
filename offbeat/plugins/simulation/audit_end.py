"""Checks of the end of an episode: I3, I6 and I8 at rest, I9, I14, I15, I16, I21."""

import builtins
import re
from typing import Final

from offbeat.config.run import RunConfig
from offbeat.config.sections.sampler import CustomSamplerConfig, WindowedConfig
from offbeat.plugins.simulation.audit_evaluations import EvaluationAudit
from offbeat.plugins.simulation.audit_groups import OUTSTANDING, AuditedGroups
from offbeat.plugins.simulation.audit_rewards import AuditedRewards
from offbeat.plugins.simulation.audit_steps import Steps
from offbeat.plugins.simulation.audit_workers import EngineRestarts
from offbeat.plugins.simulation.audit_world import AuditTable, Findings, World
from offbeat.plugins.simulation.records import ControllerEnd, Ended

OUTCOMES: Final = ("finished", "failed", "aborted")
STOPPED: Final = "stop"
"""Kind of the fault record for an operator's request to stop after the step."""

OWN_MISTAKES: Final = frozenset(
    {
        "CancelledError",
        "CannotRewind",
        "Deadlock",
        "ExceptionGroup",
        "IllegalMove",
        "OutOfBudget",
        "RunFailed",
        "SchemaError",
        "StaleHandle",
        "StepAlreadyOpen",
        "StepOutOfOrder",
        "TrainerAhead",
        "TrainerLost",
    }
)
"""Error classes that no fault explains, because the controller itself caused them."""

_QUIET: Final = re.compile(r"nothing moved for ([\d.e+]+) s")
_STEP: Final = re.compile(r"\bstep \d+\b")
_VERSION: Final = re.compile(r"\bversion \d+\b")


class End(AuditTable):
    """Last checks, after all events and records have been read."""

    def __init__(
        self,
        config: RunConfig,
        groups: AuditedGroups,
        steps: Steps,
        world: World,
        evaluations: EvaluationAudit,
        rewards: AuditedRewards,
        findings: Findings,
    ) -> None:
        super().__init__(findings)
        self._config, self._groups, self._steps = config, groups, steps
        self._world, self._evaluations = world, evaluations
        self._rewards = rewards
        self._restarts = EngineRestarts(config, world)

    def check(self) -> None:
        """Run all final checks."""
        ended = self._world.ended
        for end in self._world.controller_ends:
            self._findings.current = end
            self._check_error(end)
        if ended is None:
            self._findings.current = None
            self._add("I9", "the episode has no end")
            return
        self._findings.current = ended
        self._check_outcome(ended)
        finished = ended.outcome == "finished"
        self._steps.check_end(finished=finished)
        self._steps.samples.check_reported()
        if finished:
            self._check_sums()
            made = len(self._steps.stack)
            self._evaluations.finished(made, ended.evaluations_failed)

    def _check_error(self, end: ControllerEnd) -> None:
        add, cause = self._add, end.cause
        if end.outcome != "failed":
            return
        if not cause or cause in OWN_MISTAKES or hasattr(builtins, cause):
            add("I9", f"the run failed by its own mistake: {cause or 'no cause'}: {end.error}")
        elif cause == "RunStalled" and not self._excused_stall(end):
            add("I9", f"the run stalled although no fault delayed it: {end.error}")
        elif cause == "EmptyBatch" and not self._groups.given_up:
            add("I9", f"no group was left to train although no prompt was given up: {end.error}")
        elif cause == "EngineBudgetSpent" and not self._restarts.explain_the_end:
            add(
                "I21",
                f"the faults explain {self._restarts.at_most} restarts of engines: {end.error}",
            )
        elif cause == "RewardCallBudgetSpent" and not self._rewards.is_spent:
            add("I9", f"the calls that are left cover a group: {end.error}")
        if not (_STEP.search(end.error) and _VERSION.search(end.error) and cause in end.error):
            add("I16", f"the error does not name step, version and cause {cause!r}: {end.error!r}")

    def _excused_stall(self, end: ControllerEnd) -> bool:
        """Return whether the stall lasted its configured time, and a fault fired within twice that.

        A shorter silence is a deadlock: no component could ever act again.
        """
        last, patience_s = self._world.last_fault_at, self._config.supervision.stall_timeout_s
        quiet = _QUIET.search(end.error)
        waited = quiet is not None and float(quiet[1]) >= patience_s
        return waited and last is not None and end.at - last <= 2 * patience_s

    def _check_outcome(self, ended: Ended) -> None:
        add = self._add
        if ended.outcome not in OUTCOMES:
            add("I9", f"the episode ended {ended.outcome!r}")
        if ended.running:
            add("I8", f"{ended.running} rollouts still run after the end")
        # A controller that adopts a step, or loses the trainer right after it, has no metrics of
        # the step.
        excused = max(0, len(self._world.controller_ends) - 1) + self._steps.rewinds
        if ended.telemetry_lost > excused:
            add("I14", f"the metrics of {ended.telemetry_lost} steps are lost")
        if ended.unclosed:
            add("I15", f"never closed: {', '.join(ended.unclosed)}")

    def _check_sums(self) -> None:
        """Check that a finished run has trained all groups that it admitted."""
        add, groups, steps = self._add, self._groups, self._steps
        config, made = self._config, len(self._steps.stack)
        stopped, counts = STOPPED in self._world.faults, groups.counts
        stopped |= config.rollout.on_reward_budget_spent == "stop" and self._rewards.is_spent
        kept = steps.last_checkpoint == made or "checkpoint_fails" in self._world.faults
        if config.checkpoint.interval and not kept:
            add("I12", f"it finished at version {made} and kept version {steps.last_checkpoint}")
        if groups.failed > config.rollout.drop_budget:
            add(
                "I3",
                f"{groups.failed} prompts were given up; rollout.drop_budget is "
                f"{config.rollout.drop_budget}",
            )
        budget = config.rollout.infrastructure_drop_budget
        budget = config.rollout.drop_budget if budget is None else budget
        if groups.failed_infrastructure > budget:
            add(
                "I3",
                f"{groups.failed_infrastructure} prompts were given up for want of infrastructure; "
                f"{budget} may be",
            )
        left = {place: counts[place] for place in OUTSTANDING}
        if any(left.values()) and not (stopped or self._over_samples()):
            add("I3", f"the run finished with groups neither trained nor dropped: {left}")
        endless = groups.prompts is None and config.data.epochs is None
        if made > config.steps:
            add("I3", f"{made} steps were trained; {config.steps} were asked for")
        elif endless and steps.short:
            add("I3", f"{steps.short[1]}, and the data has no end")
        elif stopped:
            return
        elif made < config.steps and (endless or not groups.source_is_empty):
            left_over = "no end" if endless else f"{groups.prompts} prompts, {groups.drawn} drawn"
            add("I3", f"it finished after {made} of {config.steps} steps; the data has {left_over}")

    def _over_samples(self) -> bool:
        """Return whether the recipe's policy admits more groups than it can train."""
        sampler = self._config.sampler
        if isinstance(sampler, WindowedConfig):
            return sampler.over_sampling_ratio > 1
        return isinstance(sampler, CustomSamplerConfig)
