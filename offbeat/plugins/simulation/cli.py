"""Implements ``offbeat simulate``: a campaign, or one seed in full detail."""

import secrets
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from offbeat.config.environment_traits import find_traits, known_environments
from offbeat.config.mixture import environment_views
from offbeat.config.run import RunConfig
from offbeat.controller.failpoints import Failpoint
from offbeat.environments.inputs import ADVANTAGE, LOSS, SAMPLER
from offbeat.messages.text import printable
from offbeat.plugins.simulation import schedule as schedules
from offbeat.plugins.simulation.audit_aggregates import audit_aggregates
from offbeat.plugins.simulation.campaign import (
    CampaignTotals,
    FailedEpisode,
    last_events,
    run_campaign,
    violations_of,
)
from offbeat.plugins.simulation.episode import EpisodeResult, run_episode
from offbeat.plugins.simulation.faults import KINDS, PROFILES
from offbeat.plugins.simulation.quiet_log import quiet_log
from offbeat.runs.inputs import targets

HELD: Final = 0
VIOLATED: Final = 1
BAD_ARGUMENTS: Final = 2
INTERRUPTED: Final = 130
_SHOWN_FINDINGS: Final = 10
_SHOWN_VIOLATIONS: Final = 3
_SHOWN_EVENTS: Final = 20
_PROGRESS_S: Final = 10.0
_LONGEST: Final = 500  # characters of a violation in one line

_SUBSTITUTES: Final = {
    SAMPLER: "each episode draws a policy of this package",
    ADVANTAGE: "grpo",
    LOSS: "no loss is computed",
}
"""Stand-ins for the user's code in an episode, by the key of ``targets``."""

_MADE_UP: Final = "made-up tokens and rewards"

Write = Callable[[str], object]


@quiet_log()
def simulate(  # noqa: PLR0913 - the options of a command
    config: RunConfig,
    *,
    seeds: int = 1000,
    seed: int | None = None,
    faults: str = "all",
    schedule: Path | None = None,
    base: int | None = None,
    workers: int | None = None,
    recipe: Sequence[str] = ("RECIPE",),
    verbose: bool = False,
    write: Write = sys.stdout.write,
    report_progress: Write = sys.stderr.write,
) -> int:
    """Run this run's controller under seeded faults; return the exit code.

    Args:
        config: The recipe. Each episode draws its own policies and sizes from it.
        seeds: Number of episodes of a campaign.
        seed: Play only this seed and report it in full.
        faults: A name of ``PROFILES``.
        schedule: A file of planned faults to play instead of drawn ones.
        base: First seed of a campaign. None: random.
        workers: Number of processes. None: one per core.
        recipe: Recipe and overrides as the user typed them, for the printed replay command.
        verbose: Also show each failed episode, outcomes, and counts of faults and failpoints.
        write: Receives the output text.
        report_progress: Receives a line every ten seconds of a campaign.
    """
    if faults not in PROFILES:
        write(f"no fault profile is named {faults!r}. Use one of {', '.join(PROFILES)}\n")
        return BAD_ARGUMENTS
    try:
        planned_faults = None if schedule is None else schedules.read(schedule)
    except (OSError, msgspec.DecodeError) as problem:
        write(f"{schedule} is not a schedule of faults: {problem}\n")
        return BAD_ARGUMENTS
    if unknown := sorted({strike.action for strike in planned_faults or ()} - KINDS.keys()):
        write(f"no fault is named {', '.join(unknown)}; there are {', '.join(KINDS)}\n")
        return BAD_ARGUMENTS
    replay = replay_command(recipe, faults, schedule)
    write(_substitutes(config))
    if seed is not None:
        return _report(
            run_episode(seed, config, profile=faults, planned_faults=planned_faults), write
        )
    first = secrets.randbelow(10**9) if base is None else base
    began = reported_at = time.perf_counter()
    is_interrupted, tally = False, CampaignTotals()
    planned = range(first, first + seeds)
    try:
        write(f"{seeds} episodes from seed {first}, faults: {faults}\n")
        for tally in run_campaign(
            config, planned, faults, planned_faults=planned_faults, workers=workers
        ):
            if time.perf_counter() > reported_at + _PROGRESS_S:
                reported_at = time.perf_counter()
                report_progress(f"  {tally.episodes} played, violations in {len(tally.findings)}\n")
    except KeyboardInterrupt:
        is_interrupted = True
        write(f"interrupted after {tally.episodes} of {seeds} episodes\n")
    if tally.episodes:
        wall_s = time.perf_counter() - began
        show = _write_tables if verbose else _write_lines
        show(tally, wall_s, faults, first, replay, write)
    if tally.findings:
        return VIOLATED
    return INTERRUPTED if is_interrupted else HELD


def _substitutes(config: RunConfig) -> str:
    """Return lines about the stand-ins for the user's code; empty without user code."""
    environments = {view.environment.name for view in environment_views(config).values()}
    mine = {target: _SUBSTITUTES.get(key, _MADE_UP) for key, target in targets(config).items()}
    # Code that the recipe names is listed under that name.
    nameless = {name for name in environments if not find_traits(name).user_code}
    of_others = {name for name in nameless if name not in known_environments()}
    mine |= dict.fromkeys(sorted(of_others), _MADE_UP)
    mine |= dict.fromkeys(config.plugins, "metrics are kept in memory")
    lines = "".join(f"  {name}: {substitute}\n" for name, substitute in mine.items())
    return f"in place of your code:\n{lines}" if lines else ""


def replay_command(recipe: Sequence[str], faults: str, schedule: Path | None) -> str:
    """Return the shell command that plays an episode again, without its seed.

    Args:
        recipe: Recipe and overrides. Each of them may change the draws of an episode.
        faults: Name of the profile.
        schedule: File of planned faults. None: faults are drawn.
    """
    planned = [] if schedule is None else ["--schedule", str(schedule)]
    return shlex.join(["offbeat", "simulate", *recipe, "--faults", faults, *planned])


def _write_lines(
    tally: CampaignTotals, wall_s: float, faults: str, first: int, replay: str, write: Write
) -> None:
    """Write faults, violations and verdict: three lines."""
    kinds = _kinds_of(faults)
    fired = sum(tally.fired[name] > 0 for name in kinds)
    write(f"{tally.fired.total()} faults fired, {fired} of {len(kinds)} kinds, in {wall_s:.1f} s\n")
    write(f"violations in {len(tally.findings)} episodes")
    if tally.findings:
        finding = tally.findings[0]
        violation = printable(finding.violations[0].strip(), longest=_LONGEST)
        write(f"; seed {finding.seed}: {violation}\n")
        write(f"broken. Replay the first: {replay} --seed {finding.seed}\n")
    else:
        write(f"\nall invariants hold. Replay an episode: {replay} --seed {first}\n")


def _write_tables(
    tally: CampaignTotals, wall_s: float, faults: str, first: int, replay: str, write: Write
) -> None:
    """Write failed episodes, outcomes, and how often each fault and failpoint came up."""
    del first
    for finding in tally.findings[:_SHOWN_FINDINGS]:
        write(_finding_text(finding, replay))
    if (more := len(tally.findings) - _SHOWN_FINDINGS) > 0:
        write(f"and {more} more\n")
    write(_summary(tally, wall_s))
    write(_coverage(tally, faults))


def _finding_text(finding: FailedEpisode, replay: str) -> str:
    shown = "".join(f"  {each}\n" for each in finding.violations[:_SHOWN_VIOLATIONS])
    more = len(finding.violations) - _SHOWN_VIOLATIONS
    events = "".join(f"    {each}\n" for each in finding.last_events)
    return (
        f"seed {finding.seed}: {', '.join(finding.fired) or 'no fault'}\n{shown}"
        + (f"  and {more} more violations\n" if more > 0 else "")
        + f"  the last events\n{events}  replay: {replay} --seed {finding.seed}\n"
    )


def _summary(tally: CampaignTotals, wall_s: float) -> str:
    fired = tally.fired.total()
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(tally.outcomes.items()))
    return (
        f"{tally.episodes} episodes in {wall_s:.1f} s: {tally.episodes / wall_s:.1f} episodes/s, "
        f"{1000 * tally.cpu_s / tally.episodes:.1f} ms of CPU each, "
        f"{median(tally.events):.0f} events (median), {fired / tally.episodes:.2f} faults fired "
        f"(mean)\noutcomes: {outcomes}; violations in {len(tally.findings)} episodes\n"
    )


def _coverage(tally: CampaignTotals, faults: str) -> str:
    """Format the faults fired and failpoints reached, one per line, and mark missing ones."""
    lines = ["fault                  fired"]
    lines += [_counted(name, tally.fired[name]) for name in _kinds_of(faults)]
    lines += ["failpoint              episodes"]
    lines += [
        f"{_counted(point, tally.reached[point])}, struck {tally.struck[point]} times"
        for point in Failpoint
    ]
    return "\n".join(lines) + "\n"


def _kinds_of(faults: str) -> list[str]:
    """Return the kinds of faults of a profile."""
    return [name for name, kind in KINDS.items() if faults in ("all", kind.profile)]


def _counted(name: str, count: int) -> str:
    return f"{name:<22} {count}{'' if count else '   <- never'}"


def _report(result: EpisodeResult, write: Write) -> int:
    """Report one episode in full."""
    violations = [*violations_of(result), *map(str, audit_aggregates(result.journal))]
    write(f"seed {result.seed}: {result.outcome} after {result.virtual_s:.1f} s of virtual time, "
          f"{result.events} events, digest {result.digest}\n")  # fmt: skip
    if result.error:
        write(f"{result.error}\n")
    write(
        f"planned\n{schedules.dump(result.plan.planned_faults)}fired: {', '.join(result.fired)}\n"
    )
    if (silent := len(result.plan.planned_faults) - len(result.fired)) > 0:
        write(f"{silent} of the planned faults never came due, or found no target\n")
    for line in last_events(result, _SHOWN_EVENTS):
        write(f"  {line}\n")
    for violation in violations:
        write(f"{violation}\n")
    write("" if violations else "no violation\n")
    return VIOLATED if violations else HELD
