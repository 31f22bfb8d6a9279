"""Defines sums over a run's records, as a journal's snapshots and aggregates encode them. Pure."""

from array import array
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from offbeat.controller.events import AnyEvent, RewardCallsMade, Spent
from offbeat.messages.failures import Component
from offbeat.telemetry.time_accounting import serving_shares, verdict

STEP_FIELDS: Final = (
    *("version", "unix_s", "reward", "samples", "tokens", "masked_samples"),
    "pause_s",  # the longest time without any record; NaN before the first weights were served
)
"""Numbers of a step, in this order in a row of ``Aggregates.steps``."""

_FORMER_KEPT: Final = 64  # former workers with separately remembered calls


# --- over the whole run --------------------------------------------------------------------------


class RunCosts(msgspec.Struct):
    """Costs of a run over all incarnations: processes replaced, time spent.

    Its size does not grow with the run.
    """

    processes: dict[str, str] = {}
    """Incarnation that answered last, for each engine, each worker and the trainer."""
    restarts: dict[Component, int] = {}
    """Number of replaced processes, by component. The trainer's ranks count as one."""
    trainer_s: dict[str, float] = {}
    """Seconds of the trainer by ``TrainerTime``, over all steps."""
    engine_s: dict[str, float] = {}
    """Seconds of all engines by ``GeneratorTime``, over all steps."""
    generate_s: float = 0.0
    """Time of a group in its engine: the mean of each step, summed over all steps."""
    reward_s: float = 0.0
    """Time of a group in environment and reward, averaged and summed in the same way."""
    syncs: int = 0
    """Completed weight syncs, each counted once per engine."""
    retired: dict[str, str] = {}
    """Engines retired since the run was last started or resumed, with the last failure of each."""
    reward_calls: int = 0
    """Calls of reward functions, over all workers and incarnations."""
    reward_calls_of: dict[str, int] = {}
    """Calls of each process of a worker since the run was last started or resumed.

    Of replaced processes, only the latest reporters are kept, because a report may be late.
    """
    worker_losses: int = 0
    """How often an environment worker was lost, including workers that came back."""
    lost_workers: dict[str, str] = {}
    """Workers that were lost and have not answered since, with the reason for each."""

    def add_process(self, component: Component, name: str, incarnation: str) -> None:
        """Add a process that answered. It replaces the former process of its name."""
        if self.processes.get(name) not in {None, incarnation}:
            self.restarts[component] = self.restarts.get(component, 0) + 1
        self.processes[name] = incarnation
        self.lost_workers.pop(name, None)

    def add_worker_loss(self, worker: str, reason: str) -> None:
        """Add the loss of an environment worker."""
        self.worker_losses += 1
        self.lost_workers[worker] = reason

    def add_time(self, spent: Spent) -> None:
        """Add the time of a step."""
        _add_seconds(self.trainer_s, spent.trainer)
        _add_seconds(self.engine_s, spent.engines)
        self.generate_s += spent.generate_s
        self.reward_s += spent.reward_s
        self.syncs += spent.syncs

    def add_reward_calls(self, made: RewardCallsMade) -> None:
        """Add the calls of a worker's process since its last report."""
        self.reward_calls += made.calls - self.reward_calls_of.pop(made.process, 0)
        self.reward_calls_of[made.process] = made.calls  # at the end, to keep the order of reports
        if len(self.reward_calls_of) > _FORMER_KEPT + 2 * len(self.processes):
            self._forget_former()

    def _forget_former(self) -> None:
        """Forget the calls of processes that were replaced long ago. Totals still count them."""
        present = set(self.processes.values())
        former = [each for each in self.reward_calls_of if each not in present]
        for each in former[:-_FORMER_KEPT]:
            del self.reward_calls_of[each]

    def forget_processes(self) -> None:
        """Forget all processes, because all actors are new.

        So no process counts as a replacement, and no engine as retired. Costs so far still count.
        """
        self.processes, self.retired, self.reward_calls_of = {}, {}, {}
        self.lost_workers = {}

    def is_new(self, name: str, incarnation: str) -> bool:
        """Return whether another process answered last under this name, or this one was lost."""
        return self.processes.get(name) != incarnation or name in self.lost_workers

    def is_unseen_loss(self, name: str, incarnation: str) -> bool:
        """Return whether this process replaces one whose loss is not recorded."""
        before = self.processes.get(name)
        return before not in {None, incarnation} and name not in self.lost_workers

    def shares(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the time shares of trainer and engines, without their starts. Each sums to 1."""
        return serving_shares(self.trainer_s, self.engine_s)

    def verdict(self) -> str:
        """Return the bottleneck of the run."""
        trainer, engines = self.shares()
        return verdict(trainer, engines, generate_s=self.generate_s, reward_s=self.reward_s)


class RunTotals(msgspec.Struct):
    """Times and rates of all incarnations so far. Part of the journal's snapshots.

    Its size does not grow with the run. Times come from the journal. The time between two
    incarnations is not counted. An event without a time adds no time.
    """

    wall_s: float = 0.0
    """Seconds from the first to the last event of each incarnation, summed."""
    serving_s: float = 0.0
    """The part of ``wall_s`` since the first weights of each incarnation were served."""
    samples: int = 0
    """Valid samples trained, including by steps that a rewind has undone."""
    masked_samples: int = 0
    """Masked samples of the groups trained."""
    tokens: int = 0
    """Prompt and response tokens of the groups trained."""
    first_step_s: float | None = None
    """``wall_s`` at the end of the first step."""
    resumes: int = 0
    """Incarnations started by a different driver than the incarnation before."""
    driver: str | None = None
    """The process that started the last incarnation, or None before any."""
    serving: bool = False
    """Whether the last incarnation has served weights."""
    at_s: float = 0.0
    """The time of day of the last event."""
    tally: RunCosts = msgspec.field(default_factory=RunCosts)
    """The costs of all incarnations so far."""


# --- over the records between two snapshots ------------------------------------------------------


class RareEvent(msgspec.Struct, frozen=True, array_like=True):
    """A record of a rare event: a process was lost or came back, or the run was rewound."""

    version: int  # the trainer's, before it
    before_unix_s: float  # the time of the record before it
    event: AnyEvent


class Aggregates(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the records of some successive segments. Times are times of day."""

    first_segment: int
    records: int
    began_unix_s: float
    ended_unix_s: float
    lowest_group: int  # least and greatest prompt index in a move of these records;
    highest_group: int  # -1 if there is none
    steps: (
        bytes  # float64, a row of STEP_FIELDS for each step applied here and not undone by the end
    )
    staleness: bytes  # int64, rows of (number of the step's row, versions behind, samples)
    undone_to: int | None  # steps after this version that earlier parts applied are undone
    rare: tuple[RareEvent, ...]
    quiet: tuple[tuple[float, float, int], ...]  # from, to, trainer's version: no record between
    quiet_left_out: int
    engines: tuple[str, ...]  # that have served weights so far
    width_s: float  # of the bins below, which begin at began_unix_s
    trainer_busy: bytes  # float32 per bin: seconds in which a step was open
    sync_busy: bytes  # between a release and the last engine that serves it
    engine_busy: dict[str, bytes]  # in which the engine had a group
    trainer_s: dict[str, bytes]  # seconds of the trainer by TrainerTime
    engine_s: dict[str, bytes]  # of all engines together, by GeneratorTime


class CarriedState(msgspec.Struct):
    """State that one part passes to the next one, in addition to the group table."""

    version: int = 0
    at_s: float = 0.0  # of the last record
    serving: bool = False  # this incarnation has served weights
    pause_s: float = 0.0  # the longest of the step in progress
    lap_s: float = 0.0  # where the time that the next Spent attributes begins
    trainer_since_s: float | None = None  # when the open step was claimed
    released_s: float | None = None
    synced_s: float = 0.0  # to where the time since the release is counted
    engines: list[str] = []
    lost: list[str] = []
    engine_of: dict[int, str] = {}  # by group in flight


def _add_seconds(total: dict[str, float], seconds: Mapping[str, float]) -> None:
    for category, value in seconds.items():
        total[category] = total.get(category, 0.0) + value


# --- bins of time --------------------------------------------------------------------------------

BINS: Final = 256
_NARROWEST: Final = 0.01  # seconds


class TimeBins:
    """Time bins of equal width, from a start time on. The width doubles when all bins are used."""

    def __init__(self, began_s: float) -> None:
        self.began_s = began_s
        self.width_s = _NARROWEST
        self._seconds = dict[str, list[float]]()

    def add(self, name: str, start_s: float, end_s: float, seconds: float) -> None:
        """Spread seconds evenly over ``[start_s, end_s]``. The part before the first bin is cut."""
        bins = self._seconds.get(name)
        if bins is None:
            bins = self._seconds[name] = [0.0] * BINS
        start, end = max(0.0, start_s - self.began_s), max(0.0, end_s - self.began_s)
        while end >= BINS * self.width_s:
            self.halve()
        width = self.width_s
        first, last = int(start / width), int(end / width)
        if first >= last:
            bins[last] += seconds
            return
        rate = seconds / (end - start)
        bins[first] += ((first + 1) * width - start) * rate
        for number in range(first + 1, last):
            bins[number] += width * rate
        bins[last] += (end - last * width) * rate

    def to_bytes(self) -> dict[str, bytes]:
        """Return the bins of each name as float32, little endian on every machine that Ray runs on."""
        return {name: array("f", bins).tobytes() for name, bins in self._seconds.items()}

    def halve(self) -> None:
        """Merge bins in pairs. Then half as many are in use, with twice the width."""
        self.width_s *= 2
        for bins in self._seconds.values():
            pairs = [bins[2 * half] + bins[2 * half + 1] for half in range(BINS // 2)]
            bins[:] = pairs + [0.0] * (BINS // 2)


def align(all_bins: Iterable[TimeBins]) -> None:
    """Give bins that begin at the same moment the same width: that of the widest."""
    bins = list(all_bins)
    width_s = max(each.width_s for each in bins)
    for each in bins:
        while each.width_s < width_s:
            each.halve()
