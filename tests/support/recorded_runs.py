"""Run directories with a journal, written without a controller."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from offbeat.controller.journal import FileJournal, open_journal, recover_with_totals
from offbeat.controller.ledger import Ledger
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.failures import Component
from offbeat.messages.groups import Receipt
from offbeat.telemetry.summary import GroupCounts, Summary
from offbeat.testing.samplers import rewind


class RecordedRun:
    """A ledger, its journal, and moves that a run makes."""

    def __init__(
        self,
        run_dir: Path,
        *,
        incarnation: int = 1,
        snapshot_records: int = 1000,
        driver: str = "",
        unix_s: Callable[[], float] = float,
    ) -> None:
        self.run_dir = run_dir
        self.loop = asyncio.new_event_loop()
        self.ledger, self.journal = self._opened(snapshot_records, unix_s)
        self.ledger.open("tiny-1", incarnation, driver)
        self.attempts = 0

    def _opened(
        self, snapshot_records: int, unix_s: Callable[[], float]
    ) -> tuple[Ledger, FileJournal]:
        return open_journal(
            self.run_dir / "journal",
            self._on_this_thread,
            snapshot_records=snapshot_records,
            unix_s=unix_s,
        )

    def _on_this_thread(self, work: Callable[[], int]) -> asyncio.Future[int]:
        done = self.loop.create_future()
        done.set_result(work())
        return done

    def close(self) -> None:
        self.journal.close()
        self.loop.close()

    def summarise(self, **changes: object) -> None:
        ledger = self.ledger
        self.journal.flush_now()
        _, totals = recover_with_totals(self.run_dir / "journal")
        facts = {
            "run_id": ledger.run_id,
            "name": "tiny",
            "outcome": "finished",
            "steps": ledger.trainer_version,
            "trainer_version": ledger.trainer_version,
            "groups": GroupCounts(**ledger.counts(), dropped=dict(ledger.totals.dropped)),
            "wall_s": 1.0,
            "weights_digest": ledger.digest,
            "restarts": totals.tally.restarts.get(Component.ENGINE, 0),
            "worker_restarts": totals.tally.restarts.get(Component.WORKER, 0),
            "worker_losses": totals.tally.worker_losses,
            "workers_lost": sorted(totals.tally.lost_workers),
            "trainer_restarts": totals.tally.restarts.get(Component.TRAINER, 0),
            "engines_retired": list(totals.tally.retired),
            "rewinds": ledger.lineage,
            "controller_incarnations": ledger.incarnation,
            "resumes": totals.resumes,
        }
        Summary(**{**facts, **changes}).write(self.run_dir / "summary.json")  # pyright: ignore[reportArgumentType]

    def rolled_out(self, prompt_index: int, version: int) -> None:
        attempt = self.ledger.dispatch(prompt_index, "generator-1", version)
        self.ledger.commit(receipt(prompt_index, attempt, version))

    def ready(self, count: int, target_step: int | None = None) -> list[int]:
        """Draw groups and have them rolled out under the trainer's version."""
        prompt_indices = [self.ledger.admit(target_step) for _ in range(count)]
        for prompt_index in prompt_indices:
            self.rolled_out(prompt_index, self.ledger.trainer_version)
        return prompt_indices

    def rewind(self, to_version: int, reason: str) -> None:
        after = self.loop.run_until_complete(self.journal.steps_after(to_version))
        rewind(self.ledger, to_version, reason, after)

    def train(self, prompt_indices: list[int]) -> None:
        step, self.attempts = self.ledger.trainer_version + 1, self.attempts + 1
        self.ledger.claim(prompt_indices, step, self.attempts)
        self.ledger.intend(step, self.attempts)
        self.ledger.applied(step, self.attempts)


def receipt(prompt_index: int, attempt: int, version: int) -> Receipt:
    return make_receipt(
        prompt_index,
        attempt,
        (((version, 5),), ((version, 4), (version + 1, 5))),
        engine="generator-1",
        finish_reasons=("stop", "length"),
        generate_s=1.5,
        reward_s=0.25,
    )
