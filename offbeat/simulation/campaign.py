"""Many episodes over all cores: what broke, what was struck, what was never reached."""

import gc
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import Pool
from typing import Final

import msgspec
import structlog

from offbeat.config.run import RunConfig
from offbeat.simulation.auditor import audit
from offbeat.simulation.episode import EpisodeResult, run_episode
from offbeat.simulation.schedule import Strike

CHUNK: Final = 20
"""Episodes that a worker is given at once."""

REPLAYED_EVERY: Final = 100
"""Interval of episodes that are played twice: an episode has to come out the same, bit for bit."""

_LAST_EVENTS: Final = 5
_SILENT: Final = structlog.make_filtering_bound_logger(logging.CRITICAL)


class FailedEpisode(msgspec.Struct, frozen=True):
    """An episode that broke an invariant."""

    seed: int
    violations: list[str]  # the first one names the cause
    last_events: list[str]
    fired: list[str]


class CampaignTotals(msgspec.Struct):
    """Totals over several episodes."""

    episodes: int = 0
    events: list[int] = []  # callbacks run, by episode; msgspec copies it for each instance
    outcomes: dict[str, int] = {}
    fired: dict[str, int] = {}  # by fault kind
    reached: dict[str, int] = {}  # episodes that reached a failpoint
    struck: dict[str, int] = {}  # faults at a failpoint
    findings: list[FailedEpisode] = []
    cpu_s: float = 0.0

    def add(self, other: "CampaignTotals") -> None:
        self.episodes += other.episodes
        self.events += other.events
        self.findings += other.findings
        self.cpu_s += other.cpu_s
        for mine, more in (
            (self.outcomes, other.outcomes),
            (self.fired, other.fired),
            (self.reached, other.reached),
            (self.struck, other.struck),
        ):
            for name, count in more.items():
                mine[name] = mine.get(name, 0) + count


class EpisodeBatch(msgspec.Struct, frozen=True):
    """Episodes for one worker to play."""

    base: bytes  # the run as JSON
    seeds: list[int]
    profile: str
    strikes: list[Strike] | None


@contextmanager
def quiet() -> Generator[None]:
    """Drop log lines below critical meanwhile: an episode's warnings are what it is about."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=_SILENT)
    try:
        yield
    finally:
        structlog.configure(**before)


def run_campaign(
    base: RunConfig,
    seeds: Sequence[int],
    profile: str,
    *,
    strikes: list[Strike] | None = None,
    workers: int | None = None,
) -> Iterator[CampaignTotals]:
    """Play and audit every seed; the tally so far, again and again, the last time of all.

    Args:
        base: The run that episodes are drawn from.
        seeds: Of the episodes.
        profile: Which faults are drawn.
        strikes: These faults in every episode instead.
        workers: Processes; None: one a core. 1 plays in this process. They end with the iterator.
    """
    total = CampaignTotals()
    encoded = base.model_dump_json().encode()
    jobs = [
        EpisodeBatch(encoded, list(seeds[start : start + CHUNK]), profile, strikes)
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
    """Processes that leave Ctrl-C, which a terminal sends to them as well, to this one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # they are born with it
    try:
        return multiprocessing.get_context("spawn").Pool(workers, _start_worker)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker() -> None:
    structlog.configure(wrapper_class=_SILENT, cache_logger_on_first_use=True)
    gc.freeze()


def run_job(job: EpisodeBatch) -> CampaignTotals:
    """Play and audit some episodes, one after the other."""
    base, tally = RunConfig.model_validate_json(job.base), CampaignTotals()
    began_s = time.process_time()
    was_enabled = gc.isenabled()
    gc.disable()  # in the middle of an episode a collection finds nothing, and costs a third of the time
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
    result = run_episode(seed, base, profile=job.profile, strikes=job.strikes)
    _count(tally, result)
    violations = violations_of(result)
    if seed % REPLAYED_EVERY == 0:
        again = run_episode(seed, base, profile=job.profile, strikes=job.strikes)
        if again.digest != result.digest:
            violations.append(f"replay differs: {result.digest} and {again.digest} from one seed")
    if violations:
        events = last_events(result, _LAST_EVENTS)
        tally.findings.append(FailedEpisode(seed, violations, events, result.fired))


def violations_of(result: EpisodeResult) -> list[str]:
    """Return the auditor's violations of an episode, and those that its own end shows."""
    plan = result.plan
    found = [
        str(violation)
        for violation in audit(result.journal, result.records, plan.config, prompts=plan.prompts)
    ]
    if result.outcome == "stuck":
        found.insert(0, f"I9 broken: {result.error}")
    return found


def last_events(result: EpisodeResult, count: int) -> list[str]:
    """The end of the journal and of what the actors wrote, a line each."""
    return [repr(each) for each in (*result.journal[-count:], *result.records[-count:])]


def _count(tally: CampaignTotals, result: EpisodeResult) -> None:
    tally.episodes += 1
    tally.events.append(result.events)
    tally.outcomes[result.outcome] = tally.outcomes.get(result.outcome, 0) + 1
    for kind, times in Counter(result.fired).items():
        tally.fired[kind] = tally.fired.get(kind, 0) + times
    for point in result.failpoints:
        tally.reached[point] = tally.reached.get(point, 0) + 1
    for point in result.struck:
        tally.struck[point] = tally.struck.get(point, 0) + 1
