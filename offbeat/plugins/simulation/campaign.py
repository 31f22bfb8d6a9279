"""Campaigns: many episodes on all cores, with counts of violations, faults and failpoints."""

import gc
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.pool import Pool
from typing import Final

import msgspec
import structlog

from offbeat.config.run import RunConfig
from offbeat.plugins.simulation.audit_aggregates import audit_aggregates
from offbeat.plugins.simulation.auditor import audit
from offbeat.plugins.simulation.episode import EpisodeResult, run_episode
from offbeat.plugins.simulation.quiet_log import SILENT
from offbeat.plugins.simulation.schedule import PlannedFault

CHUNK: Final = 20
"""Episodes per job of a worker."""

REPLAYED_EVERY: Final = 100
"""Interval of episodes that are played twice. Both plays must be equal, bit for bit.

The sums that the journal writes next to its snapshots are recounted in these episodes too.
"""

_LAST_EVENTS: Final = 5


class FailedEpisode(msgspec.Struct, frozen=True):
    """An episode that violated an invariant."""

    seed: int
    violations: list[str]  # the first one shows the cause
    last_events: list[str]
    fired: list[str]


@dataclass
class CampaignTotals:
    """Totals over several episodes."""

    events: list[int] = field(default_factory=list[int])  # callbacks per episode
    outcomes: Counter[str] = field(default_factory=Counter[str])
    fired: Counter[str] = field(default_factory=Counter[str])  # by fault kind
    # Episodes that reached each failpoint, and faults by failpoint
    reached: Counter[str] = field(default_factory=Counter[str])
    struck: Counter[str] = field(default_factory=Counter[str])
    findings: list[FailedEpisode] = field(default_factory=list[FailedEpisode])
    cpu_s: float = 0.0

    @property
    def episodes(self) -> int:
        return len(self.events)

    def add(self, other: "CampaignTotals") -> None:
        self.events += other.events
        self.findings += other.findings
        self.cpu_s += other.cpu_s
        self.outcomes += other.outcomes
        self.fired += other.fired
        self.reached += other.reached
        self.struck += other.struck


class EpisodeBatch(msgspec.Struct, frozen=True):
    """Episodes for one worker process."""

    base: bytes  # the run as JSON
    seeds: list[int]
    profile: str
    planned_faults: list[PlannedFault] | None


def run_campaign(
    base: RunConfig,
    seeds: Sequence[int],
    profile: str,
    *,
    planned_faults: list[PlannedFault] | None = None,
    workers: int | None = None,
) -> Iterator[CampaignTotals]:
    """Play and audit every seed. Yield the totals so far, repeatedly, and at the end.

    Args:
        base: Run that episodes are drawn from.
        seeds: Seeds of the episodes.
        profile: Name of the set of faults to draw.
        planned_faults: Play these faults in every episode instead.
        workers: Number of processes. None: one per core. 1: play in this process. The processes end
            with the iterator.
    """
    total = CampaignTotals()
    encoded = base.model_dump_json().encode()
    jobs = [
        EpisodeBatch(encoded, list(seeds[start : start + CHUNK]), profile, planned_faults)
        for start in range(0, len(seeds), CHUNK)
    ]
    for tally in _tallies(jobs, workers or os.cpu_count() or 1):
        total.add(tally)
        yield total


def _tallies(jobs: list[EpisodeBatch], workers: int) -> Iterator[CampaignTotals]:
    if workers == 1 or len(jobs) == 1:
        yield from map(run_job, jobs)
        return
    with _pool(workers) as pool:
        yield from pool.imap(run_job, jobs)


def _pool(workers: int) -> Pool:
    """Start processes that ignore Ctrl-C, which the terminal sends to them too."""
    # Child processes inherit the mask. Starting multiprocessing's own process would lift it.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return multiprocessing.get_context("spawn").Pool(workers, _start_worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    structlog.configure(wrapper_class=SILENT, cache_logger_on_first_use=True)
    gc.freeze()


def run_job(job: EpisodeBatch) -> CampaignTotals:
    """Play and audit some episodes, one after another."""
    base, tally = RunConfig.model_validate_json(job.base), CampaignTotals()
    began_s = time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()  # a collection finds nothing during an episode, and costs a third of the time
    try:
        for seed in job.seeds:
            _play(tally, base, job, seed)
            gc.collect(0)
    finally:
        if was_enabled:
            gc.enable()
    tally.cpu_s = time.process_time() - began_s
    return tally


def _play(tally: CampaignTotals, base: RunConfig, job: EpisodeBatch, seed: int) -> None:
    result = run_episode(seed, base, profile=job.profile, planned_faults=job.planned_faults)
    tally.events.append(result.events)
    tally.outcomes[result.outcome] += 1
    tally.fired.update(result.fired)
    tally.reached.update(result.failpoints)
    tally.struck.update(result.struck)
    violations = violations_of(result)
    if seed % REPLAYED_EVERY == 0:
        again = run_episode(seed, base, profile=job.profile, planned_faults=job.planned_faults)
        if again.digest != result.digest:
            violations.append(f"replay differs: {result.digest} and {again.digest} from one seed")
        violations += map(str, audit_aggregates(result.journal))
    if violations:
        events = last_events(result, _LAST_EVENTS)
        tally.findings.append(FailedEpisode(seed, violations, events, result.fired))


def violations_of(result: EpisodeResult) -> list[str]:
    """Return the auditor's violations of an episode, plus the ones that follow from its end."""
    plan = result.plan
    found = [
        str(violation)
        for violation in audit(result.journal, result.records, plan.config, prompts=plan.prompts)
    ]
    if result.outcome == "stuck":
        found.insert(0, f"I9 broken: {result.error}")
    return found


def last_events(result: EpisodeResult, count: int) -> list[str]:
    """Return the last journal events and actor records, one per line."""
    return [repr(each) for each in (*result.journal[-count:], *result.records[-count:])]
