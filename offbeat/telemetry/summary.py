"""Defines ``summary.json``, the result of a run for programs."""

from pathlib import Path
from typing import Final, Literal

import msgspec

from offbeat.run_files.disk import DISK, Disk, unguessable_name

FEW_SIGNALS: Final = 0.25
"""If the share of steps or groups with a signal is below this, a run or a preview warns."""


class GroupCounts(msgspec.Struct, frozen=True):
    """Numbers of prompt groups by where they ended.

    ``drawn`` is the sum of all other numbers, dropped groups included.
    """

    drawn: int = 0
    admitted: int = 0
    in_flight: int = 0
    ready: int = 0
    training: int = 0
    trained: int = 0
    dropped: dict[str, int] = {}  # by reason


class Syncs(msgspec.Struct, frozen=True):
    """Weight syncs. Times are those of the slowest engine."""

    count: int
    pause_s: float  # median; decoding was paused
    transfer_s: float  # median; decoding continued
    nbytes: int  # bytes of one sync


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a finished run, over all incarnations unless a field says otherwise.

    A busy fraction and the waits next to it sum to 1. They are fractions of the time since the
    first weights of each incarnation were served. ``offbeat.telemetry.time_accounting`` defines
    each wait.
    """

    run_id: str
    name: str
    outcome: Literal["finished", "aborted", "failed"]
    error: str | None = None  # one line
    failed_in_user_code: bool = False  # fix the reward, the environment or the agent
    # What ended a run before its last step: a command, a signal, ``run.stop()`` or the setting that
    # set a limit. Empty if all steps were trained, if the prompts ended, or if the run failed.
    ended_by: str = ""
    steps: int  # optimizer steps done
    steps_asked: int = 0  # fewer are done if the run is stopped, or its prompts end
    trainer_version: int
    groups: GroupCounts
    # Means over the first and the last 20 steps, or halves of fewer than 40. None: without rewards
    reward_first: float | None = None
    reward_last: float | None = None
    loss: float | None = None  # loss of the last step of the last incarnation; None if unknown
    # Steps of the last incarnation with a group of unequal rewards; None: rewards are not used
    steps_with_signal: int | None = None
    # With several environments, means over the last 20 steps of the last incarnation
    reward_by_environment: dict[str, float] = {}
    staleness_histogram: dict[int, int] = {}  # samples trained, by versions behind
    max_staleness_trained: int = 0
    masked_samples: int = 0  # failed samples in trained groups; counted nowhere else
    # Trained samples of agents of which the endpoint refused a request, in the last incarnation
    refused_samples: int = 0
    wall_s: float  # without the time between incarnations
    first_step_s: float | None = None  # from the start to the end of step 1
    samples_per_s: float = 0.0  # since the first weights of each incarnation were served
    tokens_per_s: float = 0.0
    trainer_busy_fraction: float = 0.0
    generator_busy_fraction: float = 0.0
    trainer_waits: dict[str, float] = {}  # fraction of the time, by reason
    generator_waits: dict[str, float] = {}
    verdict: str = ""  # the bottleneck; empty without a step
    syncs: Syncs | None = None  # medians of the last incarnation; None without a sync
    restarts: int = 0  # restarts of engines
    worker_restarts: int = 0
    worker_losses: int = 0  # losses of environment workers, including workers that returned
    workers_lost: list[str] = []  # lost workers that had not returned at the end
    trainer_restarts: int = 0  # restarts of all trainer ranks together
    engines_retired: list[str] = []  # engines given up since the start, or the last resume
    evaluation: dict[str, float] = {}  # metrics of the newest evaluation; empty if none
    # Failed evaluations of the last controller; eval/* has the others
    evaluations_failed: int = 0
    evaluation_failure: str = ""  # why the newest failed evaluation failed, in one line
    rewinds: int = 0  # to a checkpoint or the initial model, after a lost trainer or in a resume
    controller_incarnations: int = 1
    resumes: int = 0  # incarnations begun by offbeat train --resume
    weights_digest: str | None = None
    versions: dict[str, str] = {}  # versions of offbeat and its main dependencies

    @property
    def had_no_signal(self) -> bool:
        """Return whether the rewards of every group were equal, in a run that was never resumed."""
        return self.steps_with_signal == 0 < self.steps and self.controller_incarnations == 1

    @property
    def signal_warning(self) -> str:
        """Return a warning if no step of a run, or only few, had a signal, else no text."""
        if self.had_no_signal:
            return (
                "No step had a signal: in each group all rewards were equal, so nothing was "
                "learned."
            )
        count = self.steps_with_signal
        if count is None or self.controller_incarnations > 1 or count >= FEW_SIGNALS * self.steps:
            return ""
        return (
            f"Only {count:,} of {self.steps:,} steps had a signal: in all other steps, the rewards "
            "of each group were equal."
        )

    def to_json(self) -> bytes:
        """Encode as indented JSON with a final newline. A value that is not finite becomes null."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    @classmethod
    def from_json(cls, text: bytes) -> "Summary":
        """Decode what ``to_json`` wrote.

        Raises:
            msgspec.ValidationError: This is not a summary.
        """
        return msgspec.json.decode(text, type=cls)

    def write(self, path: Path) -> None:
        """Write the summary to ``path`` atomically."""
        write_atomically(path, self.to_json())


def duration(seconds: float) -> str:
    """Format a duration for people: ``3 h 05 min``."""
    if seconds < 60:  # noqa: PLR2004  a minute
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"


def write_atomically(path: Path, content: bytes, disk: Disk = DISK) -> None:
    """Replace the file by ``content``, atomically and durably."""
    beside = unguessable_name(path)
    try:
        disk.write(beside, content)
        disk.sync(beside)
        disk.rename(beside, path)
        disk.sync(path.parent)
    finally:
        disk.remove(beside)
