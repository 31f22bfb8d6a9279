"""The journal under crashes, power cuts, full disks and rivals, in any order: nothing durable is lost."""

import asyncio
import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
)

from offbeat.controller.events import AnyEvent, DropReason, ReturnKind
from offbeat.controller.group_moves import Place
from offbeat.controller.journal import (
    FileJournal,
    JournalFailed,
    JournalTaken,
    open_journal,
    read_journal,
    recover,
)
from offbeat.controller.ledger import Ledger, steps_after
from offbeat.messages.failures import OffbeatError
from offbeat.messages.weights import WeightsAck
from offbeat.run_files.disk import Disk
from offbeat.testing.samplers import rewind
from tests.support.ledger_model import receipt, state_of

# --- legal events -------------------------------------------------------------------------------


def move(ledger: Ledger, choice: int, events: list[AnyEvent]) -> None:  # noqa: C901, PLR0912 - one case a move
    """One legal move, so one event; where the choice is not legal now, a prompt is admitted."""
    at = {place: [g for g in ledger.groups.values() if g.place is place] for place in Place}
    step = ledger.trainer_version + 1
    match choice:
        case 0 if at[Place.ADMITTED]:
            ledger.dispatch(at[Place.ADMITTED][-1].prompt_index, "generator-0", step - 1)
        case 1 if at[Place.IN_FLIGHT]:
            group = at[Place.IN_FLIGHT][0]
            ledger.commit(receipt(group.prompt_index, group.attempt, group.oldest_version))
        case 2 if at[Place.IN_FLIGHT]:
            ledger.retry(
                at[Place.IN_FLIGHT][-1].prompt_index, ReturnKind.INFRASTRUCTURE, "engine_lost"
            )
        case 3 if at[Place.READY]:
            ledger.claim(list(ledger.ready)[::-1], step, 1)
        case 4 if at[Place.TRAINING] and ledger.intent is None:
            ledger.intend(step, 1)
        case 4 if ledger.intent is not None:
            ledger.applied(step, 1)
        case 5 if at[Place.TRAINING]:
            ledger.unclaim(step, 1)
        case 6 if at[Place.TRAINING]:
            ledger.refused(step, 1, "nan")
        case 7 if at[Place.READY]:
            ledger.drop(at[Place.READY][0].prompt_index, DropReason.FILTERED, "no_signal")
        case 7 if at[Place.ADMITTED]:
            ledger.drop(
                at[Place.ADMITTED][0].prompt_index, DropReason.DATA, "reward_nan", shrinks=step
            )
        case 8:
            ledger.checkpointed(step - 1, "digest")
        case 9 if ledger.checkpoints and not ledger.in_flight:
            version = ledger.checkpoints[-1]
            rewind(ledger, version, "a rank was lost", steps_after(version, reversed(events)))
        case 10 if at[Place.READY]:
            ledger.evict(at[Place.READY][0].prompt_index, "stale")
        case 11:
            ledger.released(step - 1, f"digest-{step}")
        case 12:
            ledger.served(
                WeightsAck("generator-0", "incarnation-1", 1, step - 1, "digest", 0.0, 0.0)
            )
        case _:
            ledger.admit(step if choice % 2 else None)


MOVES = st.integers(0, 16)


# --- a disk that forgets ------------------------------------------------------------------------


class ForgetfulDisk(Disk):
    """Keeps real files, and knows what of them a power cut may take.

    Bytes that were not fsynced go from the end of their file; names whose directory was not fsynced
    go, or come back, from the last change on. ``calls_left`` calls from now on succeed, then every
    one fails, a write half done.
    """

    def __init__(self) -> None:
        self.calls_left: int | None = None
        self.hasty_renames = 0  # of files that were not durable yet
        self._paths = dict[int, Path]()
        self._safe_bytes = dict[Path, int]()
        self._undo = list[Callable[[], object]]()  # of changes of names

    def create(self, path: Path) -> int:
        self._call()
        file = super().create(path)
        self._paths[file] = path
        self._safe_bytes[path] = 0
        self._undo.append(path.unlink)
        return file

    def append(self, file: int, data: bytes) -> None:
        try:
            self._call()
        except OSError:
            super().append(file, data[: len(data) // 2])
            raise
        super().append(file, data)

    def sync_appended(self, file: int) -> None:
        self._call()
        path = self._paths[file]
        self._safe_bytes[path] = path.stat().st_size

    def sync(self, path: Path) -> None:
        self._call()
        if path.is_dir():
            self._undo.clear()
        else:
            self._safe_bytes[path] = path.stat().st_size

    def rename(self, old: Path, new: Path) -> None:
        self._call()
        self.hasty_renames += self._safe_bytes[old] < old.stat().st_size
        super().rename(old, new)
        self._safe_bytes[new] = self._safe_bytes.pop(old)
        self._undo.append(lambda: new.rename(old))

    def remove(self, path: Path) -> None:
        self._call()
        data = path.read_bytes()
        super().remove(path)
        self._undo.append(lambda: path.write_bytes(data))

    def close(self, file: int) -> None:
        del self._paths[file]
        super().close(file)

    def process_ends(self) -> None:
        self.calls_left = None
        for file in self._paths:
            os.close(file)
        self._paths.clear()

    def power_cut(self, taken: Callable[[int], int]) -> None:
        """``taken(most)`` says how much goes of what may."""
        self.process_ends()
        for path, safe in list(self._safe_bytes.items()):
            if path.exists():
                size = path.stat().st_size
                os.truncate(path, size - taken(size - safe))
        for undo in self._undo[len(self._undo) - taken(len(self._undo)) :][::-1]:
            undo()
        self._undo.clear()
        self._safe_bytes.clear()

    def _call(self) -> None:
        if self.calls_left is not None:
            if not self.calls_left:
                raise OSError(errno.EIO, "the disk is gone")
            self.calls_left -= 1


# --- one incarnation -----------------------------------------------------------------------------------


class Incarnation:
    """A controller, as far as the journal sees one."""

    def __init__(self, directory: Path, disk: ForgetfulDisk, snapshot_records: int) -> None:
        self.loop = asyncio.new_event_loop()
        self.jobs = list[tuple[Callable[[], int], asyncio.Future[int]]]()
        self.waits = list[tuple[asyncio.Task[None], int]]()
        self.ledger: Ledger
        self.journal: FileJournal
        try:
            self.ledger, self.journal = open_journal(
                directory, self._run_blocking, snapshot_records=snapshot_records, disk=disk
            )
        except OffbeatError:
            self.loop.close()
            raise
        self.events = list(read_journal(directory))
        assert state_of(self.ledger) == state_of(Ledger.fold(self.events))
        self.durable = 0  # events that a barrier has vouched for
        self.ledger.record = self._record
        self.ledger.open("run-1", self.ledger.incarnation + 1)

    def moves(self, choices: list[int]) -> None:
        for choice in choices:
            move(self.ledger, choice, self.events)

    def begin_barrier(self) -> None:
        wait = self.loop.create_task(self.journal.barrier())
        self.waits.append((wait, len(self.events)))
        self.turn()

    def work(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """The thread does one job; the loop hears of it after ``meanwhile``."""
        if self.jobs:
            job, ended = self.jobs.pop(0)
            try:
                durable = job()
            except OffbeatError as error:
                meanwhile()
                ended.set_exception(error)
            else:
                meanwhile()
                ended.set_result(durable)
            self.turn()

    def end(self) -> None:
        """The process is gone, with whatever it was doing."""
        for wait, _ in self.waits:
            wait.cancel()
        self.jobs.clear()
        self.turn()
        self.loop.close()

    def _record(self, event: AnyEvent) -> None:
        self.events.append(event)
        self.journal.append(event)

    def _run_blocking(self, job: Callable[[], int]) -> asyncio.Future[int]:
        ended: asyncio.Future[int] = self.loop.create_future()
        self.jobs.append((job, ended))
        return ended

    def turn(self) -> None:
        for _ in range(3):
            self.loop.call_soon(self.loop.stop)
            self.loop.run_forever()
        for wait, upto in [entry for entry in self.waits if entry[0].done()]:
            self.waits.remove((wait, upto))
            if wait.cancelled():
                continue
            error = wait.exception()
            if error is None:
                self.durable = max(self.durable, upto)
            else:
                assert error is self.journal.failure


# --- the machine --------------------------------------------------------------------------------


class JournalLives(RuleBasedStateMachine):
    """Incarnations of a controller over one directory; at most two at a time, the older one not knowing."""

    @initialize(snapshot_records=st.sampled_from([3, 7, 1000]))
    def begin(self, snapshot_records: int) -> None:
        self.room = tempfile.TemporaryDirectory()
        self.directory = Path(self.room.name) / "journal"
        self.disk = ForgetfulDisk()
        self.snapshot_records = snapshot_records
        self.zombie: Incarnation | None = None
        self.durable = 0
        self.incarnation: Incarnation | None = Incarnation(
            self.directory, self.disk, snapshot_records
        )

    @property
    def alive(self) -> Incarnation:
        assert self.incarnation is not None
        return self.incarnation

    @rule(choices=st.lists(MOVES, min_size=1, max_size=8))
    def moves(self, choices: list[int]) -> None:
        self.alive.moves(choices)

    @rule()
    def barrier_begins(self) -> None:
        self.alive.begin_barrier()

    @rule(jobs=st.integers(1, 3), choices=st.lists(MOVES, max_size=3))
    def the_thread_works(self, jobs: int, choices: list[int]) -> None:
        """``choices``: moves that the loop makes while the thread is at it, then a barrier."""

        def meanwhile() -> None:
            self.alive.moves(choices)
            self.alive.begin_barrier()

        for _ in range(jobs):
            self.alive.work(meanwhile)
        self.durable = max(self.durable, self.alive.durable)

    @rule()
    def barrier(self) -> None:
        self.alive.begin_barrier()
        while self.alive.jobs:
            self.alive.work()
        assert not self.alive.waits
        self.durable = max(self.durable, self.alive.durable)
        assert self.alive.journal.failure or self.alive.durable == len(self.alive.events)

    @rule()
    def snapshot(self) -> None:
        self.alive.journal.snapshot()

    @rule()
    def flush_at_the_end(self) -> None:
        durable = self.alive.journal.flush_now()
        self.alive.turn()
        if durable:
            self.durable = len(self.alive.events)
        else:
            assert isinstance(self.alive.journal.failure, JournalFailed)

    @rule(calls=st.integers(0, 12))
    def the_disk_will_fail(self, calls: int) -> None:
        self.disk.calls_left = calls

    @rule(data=st.data())
    def a_snapshot_rots(self, data: st.DataObject) -> None:
        snapshots = sorted(self.directory.glob("snapshot-*.bin"))
        if snapshots:
            spoiled = bytearray(snapshots[-1].read_bytes())
            spoiled[data.draw(st.integers(0, len(spoiled) - 1))] ^= 0x10
            snapshots[-1].write_bytes(spoiled)

    @rule()
    def closed_and_begun_again(self) -> None:
        durable = self.alive.journal.close()
        events = len(self.alive.events)
        self._next_incarnation(self.disk.process_ends)
        assert not durable or len(self.alive.events) == events + 1

    @rule()
    def killed_and_begun_again(self) -> None:
        self._next_incarnation(self.disk.process_ends)

    @rule(data=st.data(), calls=st.none() | st.integers(0, 8))
    def power_cut_and_begun_again(self, data: st.DataObject, calls: int | None) -> None:
        """``calls``: how far the next incarnation comes before the disk fails it, and the power again."""

        def cut() -> None:
            self.disk.power_cut(lambda most: data.draw(st.integers(0, most)) if most else 0)

        self._next_incarnation(cut, calls)

    @precondition(lambda self: self.zombie is None)
    @rule()
    def replaced_without_knowing(self) -> None:
        self.zombie, self.disk.calls_left = self.alive, None
        former = self.zombie.events
        self.incarnation = Incarnation(self.directory, self.disk, self.snapshot_records)
        assert self.durable <= len(self.incarnation.events) - 1 <= len(former)
        assert self.incarnation.events[:-1] == former[: len(self.incarnation.events) - 1]

    @precondition(lambda self: self.zombie is not None)
    @rule(choices=st.lists(MOVES, min_size=1, max_size=8))
    def the_replaced_one_goes_on(self, choices: list[int]) -> None:
        zombie = self.zombie
        assert zombie is not None
        durable = zombie.durable
        zombie.moves(choices)
        zombie.begin_barrier()
        while zombie.jobs:
            zombie.work()
        assert not zombie.waits
        assert zombie.durable == durable, "no barrier succeeds any more"
        assert isinstance(zombie.journal.failure, JournalTaken | JournalFailed)

    @rule()
    def a_reader_sees_a_beginning_of_the_events_and_all_that_is_durable(self) -> None:
        found = list(read_journal(self.directory))
        assert self.durable <= len(found)
        assert found == self.alive.events[: len(found)]
        assert state_of(recover(self.directory)) == state_of(Ledger.fold(found))

    def teardown(self) -> None:
        for incarnation in (self.incarnation, self.zombie):
            if incarnation is not None:
                incarnation.end()
        self.disk.process_ends()
        self.room.cleanup()
        assert not self.disk.hasty_renames

    def _next_incarnation(self, crash: Callable[[], None], calls: int | None = None) -> None:
        former = self.alive.events
        for incarnation in (self.alive, self.zombie):
            if incarnation is not None:
                incarnation.end()
        self.incarnation = self.zombie = None
        crash()
        self.disk.calls_left = calls
        try:
            self.incarnation = Incarnation(self.directory, self.disk, self.snapshot_records)
        except JournalFailed:
            crash()
            self.incarnation = Incarnation(self.directory, self.disk, self.snapshot_records)
        assert self.durable <= len(self.incarnation.events) - 1
        assert self.incarnation.events[:-1] == former[: len(self.incarnation.events) - 1]


TestJournalLives = JournalLives.TestCase
TestJournalLives.settings = settings(max_examples=60, stateful_step_count=40)
