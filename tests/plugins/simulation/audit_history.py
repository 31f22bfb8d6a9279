"""A legal run, told twice: by a journal and by the actors' records. Tests then break one thing."""

from collections.abc import Iterable
from typing import Any, TypeVar

import msgspec

from offbeat.config.run import CheckpointConfig, RunConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.controller.events import (
    Admitted,
    AnyEvent,
    Checkpointed,
    Claimed,
    Committed,
    Dispatched,
    Dropped,
    DropReason,
    Opened,
    Released,
    Returned,
    ReturnKind,
    Rewound,
    Served,
    StepApplied,
    StepIntent,
    StepRefused,
    Unclaimed,
)
from offbeat.controller.ledger import steps_after
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Receipt
from offbeat.plugins.simulation.auditor import Violation, audit
from offbeat.plugins.simulation.records import (
    CheckpointLatest,
    CheckpointWritten,
    ControllerEnd,
    ControllerStarted,
    DrawnSamples,
    Ended,
    EngineServes,
    Fault,
    Generated,
    PermitsUsed,
    ReleasePublished,
    TrainerApplied,
    TrainerRestored,
    TrainerStarted,
    WorldRecord,
)

T = TypeVar("T", bound=msgspec.Struct)
ENGINE = "generator-0"
GROUPS_PER_STEP = 2
SAMPLES = 2
NOTHING_FAILED = DrawnSamples((False,) * SAMPLES, (0,) * SAMPLES, (1,) * SAMPLES, (1,) * SAMPLES)


def run_config(**settings: Any) -> RunConfig:
    """Three steps of two groups, bound 1; checkpoints only where a test writes them."""
    defaults = {
        "steps": 3,
        "groups_per_step": GROUPS_PER_STEP,
        "samples_per_group": SAMPLES,
        "checkpoint": CheckpointConfig(interval=0),
    }
    return RunConfig(model=ModelConfig(path="none"), **{**defaults, **settings})


def digest_of(version: int, lineage: int = 0) -> str:
    return f"w{version}" if version == 0 else f"w{version}-{lineage}"


class History:
    """Writes what a correct controller and correct actors would write, move by move."""

    def __init__(self, config: RunConfig | None = None) -> None:
        self.config = config or run_config()
        self.journal: list[AnyEvent] = []
        self.records: list[WorldRecord] = []
        self.version = 0
        self.lineage = 0
        self.drawn = 0
        self.attempts = 0
        self.epoch = 0
        self.incarnation = 0
        self.engine_incarnation = f"{ENGINE}/1"
        self.serving = 0
        self.receipts: dict[int, Receipt] = {}
        self.group_attempts: dict[int, int] = {}
        self.digests = {0: digest_of(0)}
        self.claimed: list[int] = []

    # --- incarnations -----------------------------------------------------------------------------------

    def open(self) -> None:
        self.incarnation += 1
        self.journal.append(Opened("run", self.incarnation))
        self.records.append(ControllerStarted(0.0, self.incarnation))
        if self.incarnation == 1:
            self.records.append(TrainerStarted(0.0, 1))

    def sync(self) -> None:
        """Publish the trainer's weights and have the engine serve them."""
        self.epoch += 1
        self.serving = self.version
        digest = self.digests[self.version]
        self.records.append(ReleasePublished(0.0, 1, self.version, digest))
        self.journal.append(Released(self.version, digest))
        ack = ENGINE, self.engine_incarnation, self.epoch, self.version, digest
        self.records.append(EngineServes(0.0, *ack))
        self.journal.append(Served(*ack))

    def end(self, outcome: str = "finished", error: str = "", cause: str = "") -> None:
        self.records.append(ControllerEnd(0.0, self.incarnation, outcome, error, cause))
        self.records.append(PermitsUsed(0.0, self.incarnation, GROUPS_PER_STEP, 2, 100))
        self.records.append(Ended(0.0, outcome, 0, (), 0))

    # --- groups ----------------------------------------------------------------------------------

    def admit(self, target_step: int | None = None) -> int:
        prompt_index = self.drawn
        self.journal.append(Admitted(prompt_index, target_step))
        self.drawn += 1
        return prompt_index

    def dispatch(self, prompt_index: int) -> None:
        attempt = self.group_attempts[prompt_index] = self.group_attempts.get(prompt_index, 0) + 1
        self.journal.append(Dispatched(prompt_index, attempt, ENGINE, self.serving))

    def generate(self, prompt_index: int) -> None:
        spans = (((self.serving, 3),),) * SAMPLES
        receipt = make_receipt(
            prompt_index,
            self.group_attempts[prompt_index],
            spans,
            engine=ENGINE,
            engine_incarnation=self.engine_incarnation,
            prompt_tokens=(2,) * SAMPLES,
            payload_bytes=50,
        )
        self.receipts[prompt_index] = receipt
        self.records.append(
            Generated(
                0.0,
                prompt_index,
                receipt.attempt,
                ENGINE,
                self.engine_incarnation,
                spans,
                NOTHING_FAILED,
            )
        )

    def commit(self, prompt_index: int) -> None:
        self.journal.append(Committed(self.receipts[prompt_index]))

    def ready(self, count: int = GROUPS_PER_STEP) -> list[int]:
        """Fresh groups, admitted to committed."""
        prompt_indices = [self.admit() for _ in range(count)]
        self.roll_out(prompt_indices)
        return prompt_indices

    def roll_out(self, prompt_indices: Iterable[int]) -> None:
        for prompt_index in prompt_indices:
            self.dispatch(prompt_index)
            self.generate(prompt_index)
            self.commit(prompt_index)

    def give_back(self, prompt_index: int, kind: ReturnKind = ReturnKind.INFRASTRUCTURE) -> None:
        attempt = self.group_attempts[prompt_index]
        self.journal.append(Returned(prompt_index, attempt, kind, "engine_lost"))

    def drop(
        self,
        prompt_index: int,
        detail: str = "reward_raised",
        *,
        reason: DropReason = DropReason.DATA,
        shrinks: int = 0,
    ) -> None:
        self.journal.append(Dropped(prompt_index, reason, detail, shrinks))

    # --- steps -----------------------------------------------------------------------------------

    @property
    def key(self) -> tuple[int, int]:
        return self.version + 1, self.attempts

    def claim(self, prompt_indices: Iterable[int]) -> None:
        if not self.claimed:
            self.attempts += 1
        prompt_indices = tuple(prompt_indices)
        self.claimed += prompt_indices
        self.journal.append(Claimed(*self.key, prompt_indices))

    def unclaim(self) -> None:
        self.journal.append(Unclaimed(*self.key))
        self.claimed = []

    def intend(self) -> None:
        self.journal.append(StepIntent(*self.key, tuple(self.claimed)))

    def trainer_applies(self) -> None:
        made = self.version + 1
        receipts = [self.receipts[prompt_index] for prompt_index in self.claimed]
        self.digests[made] = digest_of(made, self.lineage)
        self.records.append(
            TrainerApplied(
                at=0.0,
                incarnation=1,
                step=made,
                attempt=self.attempts,
                version=made,
                prompt_indices=tuple(self.claimed),
                attempts=tuple(receipt.attempt for receipt in receipts),
                oldest=tuple(receipt.oldest_version for receipt in receipts),
                newest=tuple(receipt.newest_version for receipt in receipts),
                poison=("",) * len(receipts),
                digest=self.digests[made],
                masked=((),) * len(receipts),
                advantages=((-0.5, 0.5),) * len(receipts),
                branches=((1, 1),) * len(receipts),
            )
        )

    def book_applied(self) -> None:
        prompt_indices = tuple(self.claimed)
        samples = SAMPLES * len(prompt_indices)
        self.journal.append(
            StepApplied(*self.key, self.version + 1, prompt_indices, self.drawn, samples=samples)
        )
        self.version += 1
        self.claimed = []

    def refuse(self, reason: str = "no_valid_tokens") -> None:
        self.journal.append(StepRefused(*self.key, reason))
        self.claimed = []

    def train(self, prompt_indices: Iterable[int]) -> None:
        """A whole step."""
        self.claim(prompt_indices)
        self.intend()
        self.trainer_applies()
        self.book_applied()

    def step(self) -> None:
        """Fresh groups through a whole step, then a sync."""
        self.train(self.ready())
        self.sync()

    # --- checkpoints and rewinds -----------------------------------------------------------------

    def checkpoint(self) -> None:
        digest = self.digests[self.version]
        self.records.append(CheckpointWritten(0.0, self.version, digest))
        self.records.append(CheckpointLatest(0.0, self.version, verifies=True))
        self.journal.append(Checkpointed(self.version, digest))

    def trainer_restored(self, to_version: int) -> None:
        self.records.append(Fault(0.0, "trainer_killed", "trainer"))
        self.records.append(TrainerStarted(0.0, 2))
        self.records.append(TrainerRestored(0.0, 2, to_version, self.digests[to_version]))

    def rewind(self, to_version: int) -> None:
        self.trainer_restored(to_version)
        self.lineage += 1
        self.version = to_version
        self.claimed = []
        after = steps_after(to_version, reversed(self.journal))
        self.journal.append(Rewound(to_version, self.lineage, "the trainer was lost", *after))

    # --- breaking it -----------------------------------------------------------------------------

    def change(self, kind: type[T], which: int = -1, **fields: Any) -> None:
        """Rewrite fields of one event or record of this class."""
        log: list[Any] = (
            self.journal if any(type(e) is kind for e in self.journal) else self.records
        )
        places = [i for i, each in enumerate(log) if type(each) is kind]
        log[places[which]] = msgspec.structs.replace(log[places[which]], **fields)

    def remove(self, kind: type[msgspec.Struct], which: int = -1) -> None:
        log: list[Any] = (
            self.journal if any(type(e) is kind for e in self.journal) else self.records
        )
        places = [i for i, each in enumerate(log) if type(each) is kind]
        del log[places[which]]

    def audit(self, **facts: Any) -> list[Violation]:
        return audit(self.journal, self.records, self.config, **facts)


def whole_run(config: RunConfig | None = None) -> History:
    """A short run from its first weights to its last step."""
    history = History(config)
    history.open()
    history.sync()
    for _ in range(history.config.steps):
        history.step()
    history.end()
    return history


def broken(history: History, **facts: Any) -> set[str]:
    """The invariants that do not hold."""
    return {violation.invariant for violation in history.audit(**facts)}


def started(**settings: object) -> History:
    history = History(run_config(**settings))
    history.open()
    history.sync()
    return history


def killed(history: History) -> History:
    """It need not come out even."""
    history.end("aborted")
    return history
