"""The parts of a run that no runtime makes itself: assembled around any ports."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from offbeat.config.by_value import PackedValue
from offbeat.config.run import RunConfig
from offbeat.controller.controller import Controller
from offbeat.launch.dry_run import dry
from offbeat.launch.run_parts import MadePorts, RunSpec, assemble, environment_specs, trainer_specs
from offbeat.messages.groups import Spooled
from offbeat.messages.worker_report import OnJoined, OnLost, OnReport, WorkerReport
from offbeat.telemetry.summary import Summary
from offbeat.transfer_queue.schema import Columns
from offbeat.transfer_queue.spool_reader import Hold, SpoolReader
from tests.support.fakes import FakeGenerator, FakeRollouts, FakeTrainer
from tests.support.ledger_model import receipt
from tests.support.recorded_runs import RecordedRun
from tests.support.virtual_time import InlineLoop


class ReportedRollouts(FakeRollouts):
    """Environment workers that keep the controller's callbacks."""

    def report_joined(self, on_joined: OnJoined) -> None:
        self.on_joined = on_joined

    def report_lost(self, on_lost: OnLost) -> None:
        self.on_lost = on_lost

    def report_to(self, on_report: OnReport) -> None:
        self.on_report = on_report


class NoSpool(SpoolReader[None]):
    """A spool that nothing is read from."""

    def make_payload(self, columns: Columns, hold: Hold) -> None: ...

    async def lost(self, payloads: Mapping[int, tuple[Any, ...]]) -> set[int]:
        del payloads
        return set()


class MakeFakes:
    """Makes the ports of a run on fakes, and keeps what it was called with."""

    def __init__(self) -> None:
        self.segments = list[set[str]]()
        self.trainer = FakeTrainer()
        self.generators = {"generator-0": FakeGenerator("generator-0")}
        self.rollouts = ReportedRollouts(self.generators)

    def __call__(self, spec: RunSpec, needed: Iterable[str]) -> MadePorts:
        self.segments.append(set(needed))
        spool = NoSpool(spec.run_dir / "spool", needed)
        return MadePorts(self.trainer, self.generators, self.rollouts, spool)


def run_spec(run_dir: Path) -> RunSpec:
    settings = {"steps": 2, "groups_per_step": 4, "samples_per_group": 2, "model": {"path": "none"}}
    return RunSpec(
        dry(RunConfig.model_validate(settings)), "tiny-1", run_dir, run_dir, driver="driver"
    )


def test_a_run_is_assembled_around_any_ports_and_trains_to_its_end(tmp_path: Path) -> None:
    made = MakeFakes()

    async def main() -> tuple[bytes, Controller]:
        host = await assemble(run_spec(tmp_path), made)
        made.rollouts.on_joined("environment-0", "1-a")
        made.rollouts.on_report(WorkerReport("1-a", reward_calls=5))
        made.rollouts.on_lost("environment-0", "it was killed")
        return await host.run(), host.controller

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        ended, controller = runner.run(main())
    summary = Summary.from_json(ended)
    assert (summary.outcome, summary.error, summary.steps) == ("finished", None, 2)
    assert summary == Summary.from_json((tmp_path / "summary.json").read_bytes())
    assert len(made.trainer.steps) == 2 and made.rollouts.closed and made.trainer.closed
    assert summary.workers_lost == ["environment-0"]
    assert controller.state.costs.reward_calls == 5


def test_the_ports_of_a_resumed_run_keep_the_segments_of_groups_that_wait(tmp_path: Path) -> None:
    former = RecordedRun(tmp_path)
    former.ledger.released(0, "d0")
    prompt_index = former.ledger.admit(None)
    attempt = former.ledger.dispatch(prompt_index, "generator-0", 0)
    place = Spooled("environment-0.1-a.000001.spool", 0, 1, b"digest")
    former.ledger.commit(msgspec.structs.replace(receipt(prompt_index, attempt), spooled=place))
    former.close()
    made = MakeFakes()

    async def main() -> None:
        host = await assemble(run_spec(tmp_path), made)
        host.journal.close()

    with asyncio.Runner(loop_factory=InlineLoop) as runner:
        runner.run(main())
    assert made.segments == [{place.segment}]


def test_a_run_that_cannot_be_assembled_closes_its_journal(tmp_path: Path) -> None:
    def make_ports(spec: RunSpec, needed: Iterable[str]) -> MadePorts:
        raise KeyError("a bug")

    async def main() -> None:
        await assemble(run_spec(tmp_path), make_ports)

    with asyncio.Runner(loop_factory=InlineLoop) as runner, pytest.raises(KeyError, match="a bug"):
        runner.run(main())
    opened = [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]


def test_a_loss_by_value_goes_to_the_trainer_only(tmp_path: Path) -> None:
    loss, reward = (
        PackedValue(f"offbeat.by_value:{name}-0", b"", ()) for name in ("loss", "reward")
    )
    algorithm = {"loss": {"name": "custom", "target": loss.target}}
    config = RunConfig.model_validate(
        {"steps": 2, "model": {"path": "none"}, "algorithm": algorithm}
    )
    spec = RunSpec(config, "tiny-1", tmp_path, tmp_path, driver="driver", values=(reward, loss))
    (trainer,) = trainer_specs(spec)
    (worker,) = environment_specs(spec, {})
    assert (trainer.values, worker.values) == ((loss,), (reward,))
    assert trainer.working_dir == worker.working_dir == str(tmp_path)
