"""Runs whose engines decode with the trainer's own tensors, and faults in them."""

import asyncio
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest
from torch import nn

from offbeat.config.run import RunConfig
from offbeat.controller.events import AnyEvent, Committed, Released, Served
from offbeat.generators.spec import EngineSpec
from offbeat.local.hosted import Hosted
from offbeat.local.parts import CpuClocks, make_rank, make_shared_engine
from offbeat.local.shared_weights import SharedEngineServer, SharedRank, make_twin
from offbeat.local.threads import WorkThread
from offbeat.messages.failures import (
    CheckpointFailed,
    EngineUnavailable,
    ReleaseLost,
    StaleFence,
    StepOutOfOrder,
    TrainerCall,
    TrainStepFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.generation import GenerateRequest, SamplingParams
from offbeat.messages.training import TrainerState
from offbeat.messages.weights import WeightRelease
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.weight_sync.manifest import release_digest
from offbeat.weight_sync.transport import make_release
from tests.support.live_run import offbeat
from tests.support.no_address import no_address
from tests.support.plain_modules import ModuleSource
from tests.support.run_records import RunRecords
from tests.support.shared_weight_runs import EXPERTS, SCENARIOS
from tests.support.starting import ROOT

pytestmark = [pytest.mark.timeout(240), pytest.mark.real_clock]
FENCE = Fence("run", 1)
REQUEST = GenerateRequest("a", (3, 4, 5), 4, SamplingParams(max_new_tokens=4, seed=1))
MODEL = ROOT / "models" / "tiny-addition"


class Scenarios:
    """The scenarios of ``shared_weight_runs``, which one process plays one after another."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        played = play(directory, *(each for each in SCENARIOS if each != "killed"))
        assert played.returncode == 0, played.stdout[-2000:] + played.stderr[-2000:]

    def records(self, name: str) -> RunRecords:
        records = RunRecords.read(self._directory / name)
        records.agree()
        records.no_token_is_from_the_future()
        return records

    def decode_steps(self, name: str) -> tuple[int, int]:
        """Decode steps of the engines, and how many overlapped an optimizer step."""
        steps, overlaps = map(int, (self._directory / f"{name}.steps").read_text().split())
        return steps, overlaps


def play(directory: Path, *names: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "tests.support.shared_weight_runs", str(directory), *names]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def scenarios(tmp_path_factory: pytest.TempPathFactory) -> Scenarios:
    return Scenarios(tmp_path_factory.mktemp("scenarios"))


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a run that was killed while an optimizer step had changed its weights."""
    directory = tmp_path_factory.mktemp("killed")
    assert play(directory, "killed").returncode == -signal.SIGKILL
    return directory / "killed"


def samples(events: list[AnyEvent]) -> list[tuple[object, ...]]:
    """What was sampled: prompt, rewards, lengths, versions and texts of each group, in order."""
    receipts = (event.receipt for event in events if isinstance(event, Committed))
    rows = (
        (each.prompt_index, each.rewards, each.response_tokens, each.version_spans, each.texts)
        for each in receipts
    )
    return sorted(rows)


def releases(events: list[AnyEvent]) -> dict[int, str]:
    return {event.version: event.digest for event in events if isinstance(event, Released)}


@pytest.mark.plugins
def test_one_copy_gives_the_samples_releases_and_weights_of_two(scenarios: Scenarios) -> None:
    two, one = scenarios.records("two-copies"), scenarios.records("one-copy")
    assert samples(one.events) == samples(two.events)
    assert releases(one.events) == releases(two.events)
    assert list(releases(one.events)) == list(range(7))
    assert one.summary.weights_digest == two.summary.weights_digest is not None
    assert [line["sync/sent_bytes"] for line in one.metrics] == [0] * 6
    assert any(line["sync/sent_bytes"] for line in two.metrics)


@pytest.mark.plugins
@pytest.mark.parametrize("family", EXPERTS)
def test_one_copy_of_a_model_with_experts_gives_the_samples_and_weights_of_two(
    scenarios: Scenarios, family: str
) -> None:
    two, one = (scenarios.records(f"{family}-{copies}") for copies in ("two-copies", "one-copy"))
    assert samples(one.events) == samples(two.events)
    assert releases(one.events) == releases(two.events)
    digests = [*releases(two.events).values()]
    assert all(before != after for before, after in pairwise(digests)), "steps change weights"
    assert one.summary.weights_digest == two.summary.weights_digest is not None


@pytest.mark.plugins
@pytest.mark.parametrize(
    "name", ["one-copy", "two-engines", "one-copy-not-applied", "finish-raises"]
)
def test_no_decode_step_overlaps_an_optimizer_step(scenarios: Scenarios, name: str) -> None:
    steps, overlaps = scenarios.decode_steps(name)
    assert steps > 6
    assert overlaps == 0


@pytest.mark.plugins
def test_each_engine_serves_every_version_and_each_token_is_of_a_served_one(
    scenarios: Scenarios,
) -> None:
    records = scenarios.records("two-engines")
    served = {
        (event.engine, event.version) for event in records.events if isinstance(event, Served)
    }
    used = {
        (event.receipt.engine, version)
        for event in records.events
        if isinstance(event, Committed)
        for spans in event.receipt.version_spans
        for version, _ in spans
    }
    assert {engine for engine, _ in used} == {"generator-0", "generator-1"}
    assert used <= served


@pytest.mark.plugins
def test_a_step_that_is_not_applied_leaves_the_engines_their_version(scenarios: Scenarios) -> None:
    two = scenarios.records("two-copies-not-applied")
    one = scenarios.records("one-copy-not-applied")
    assert samples(one.events) == samples(two.events)
    assert one.summary.weights_digest == two.summary.weights_digest is not None
    assert one.summary.restarts == one.summary.trainer_restarts == 0


@pytest.mark.plugins
def test_a_finish_that_raises_costs_trainer_and_engines_a_restart_and_no_weights(
    scenarios: Scenarios,
) -> None:
    plain, struck = scenarios.records("two-copies"), scenarios.records("finish-raises")
    assert struck.summary.weights_digest == plain.summary.weights_digest
    assert (struck.summary.trainer_restarts, struck.summary.restarts) == (1, 1)
    both = scenarios.records("finish-raises-two-engines").summary
    assert (both.trainer_restarts, both.restarts) == (1, 2)


@pytest.mark.plugins
@pytest.mark.parametrize("copies", ["one", "two"])
def test_a_run_killed_behind_an_optimizer_step_resumes_with_any_number_of_copies(
    scenarios: Scenarios, killed: Path, tmp_path: Path, copies: str
) -> None:
    plain = scenarios.records("two-copies").summary
    shutil.copytree(killed, tmp_path / "killed")
    shares = f"generator.share_weights={str(copies == 'one').lower()}"
    code, said = offbeat("train", shares, "--resume", tmp_path / "killed")
    assert code == 0, said
    records = RunRecords.read(tmp_path / "killed")
    records.agree()
    assert records.summary.weights_digest == plain.weights_digest


# --- one rank and its engines ---------------------------------------------------------------------


class Parts:
    """A rank, and engines that share its weights."""

    @staticmethod
    def spec(run_dir: Path) -> TrainerSpec:
        config = RunConfig.model_validate(
            {
                "steps": 4,
                "model": {"path": str(MODEL)},
                "runtime": {"backend": "local"},
                "generator": {"share_weights": True, "max_model_len": 32},
                "sampler": {"name": "in_order", "max_staleness": 0},
                "sync": {"canary_interval": 1},
            }
        )
        return TrainerSpec(config, str(run_dir))

    def __init__(self, run_dir: Path) -> None:
        self._cpu, trainer = CpuClocks(), self.spec(run_dir)
        config = trainer.config
        self.engine_spec = EngineSpec("e", config.model, config.generator, config.stub, 0, "")
        make = partial(make_rank, trainer, self._cpu)
        self.trainer = Hosted[TrainerRank]("trainer", make)
        self._threads = list[WorkThread]()

    @property
    def rank(self) -> SharedRank:
        rank = self.trainer.wait()
        assert isinstance(rank, SharedRank)
        return rank

    def make_engine(self) -> SharedEngineServer:
        self._threads.append(WorkThread("engine"))
        make = partial(make_shared_engine, self.engine_spec, self.trainer, self._cpu)
        server = self._threads[-1].submit(make, self._threads[-1]).result(60)
        assert isinstance(server, SharedEngineServer)
        return server

    def publish(self, version: int = 0) -> WeightRelease:
        published, *handles = self.rank.publish_weights(FENCE, version)
        return make_release(version, published, tuple(handles), 0)


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path)
    yield parts
    parts.trainer.end()


def storages(module: nn.Module) -> set[int]:
    return {each.untyped_storage().data_ptr() for each in module.state_dict().values()}


def test_every_weight_of_an_engine_is_the_tensor_of_the_trainer(parts: Parts) -> None:
    model = parts.rank.model
    twins = [make_twin(model, parts.engine_spec) for _ in range(2)]
    for twin in twins:
        own = dict(twin.named_parameters(remove_duplicate=False))
        for name, each in model.named_parameters(remove_duplicate=False):
            assert own[name].data_ptr() == each.data_ptr()
            assert own[name] is not each, "the engine's proof replaces its data"
            assert each.requires_grad
            assert not own[name].requires_grad
        assert own.keys() == dict(model.named_parameters(remove_duplicate=False)).keys()
        assert len(set(map(id, own.values()))) == len({id(each) for each in model.parameters()})
        assert twin.config is not model.config
    assert storages(model) == storages(twins[0]) == storages(twins[1])
    assert len(storages(model) | storages(twins[0]) | storages(twins[1])) == len(storages(model))


def test_a_release_names_the_weights_and_holds_none(parts: Parts) -> None:
    release = parts.publish()
    assert release.nbytes == 0
    assert release.handles == ()
    assert release.canary is not None
    source = ModuleSource(parts.rank.model, 64 * 2**20)
    digests = [digest for _, digest in source.chunks()]
    assert release.digest == release_digest(source.manifest, digests)


async def test_an_engine_serves_a_release_until_the_weights_change(parts: Parts) -> None:
    engine = parts.make_engine()
    release = parts.publish()
    ack = await engine.load(FENCE, 1, release)
    assert (ack.version, ack.digest) == (0, release.digest)
    assert ack.canary_gap is not None
    assert (await engine.served_weights()).problem == ""
    result = await engine.generate(REQUEST)
    assert {version for spans in result.version_spans for version, _ in spans} == {0}
    parts.rank.restore(FENCE, 0)
    waiting = asyncio.ensure_future(
        engine.generate(msgspec.structs.replace(REQUEST, request_id="b"))
    )
    with pytest.raises(ReleaseLost, match="has changed the weights"):
        await engine.load(FENCE, 2, release)
    assert "ask again" in (await engine.served_weights()).problem
    assert not waiting.done()
    await engine.load(FENCE, 3, parts.publish())
    assert (await waiting).token_ids.tolist() == result.token_ids.tolist()
    await engine.close()


async def test_an_engine_of_a_replaced_trainer_breaks_and_the_next_one_serves(parts: Parts) -> None:
    engine = parts.make_engine()
    await engine.load(FENCE, 1, parts.publish())
    parts.trainer.restart()
    with pytest.raises(EngineUnavailable, match="a trainer that was replaced"):
        await engine.load(FENCE, 2, parts.publish())
    with pytest.raises(EngineUnavailable, match="a trainer that was replaced"):
        await engine.state(FENCE)
    other = parts.make_engine()
    assert (await other.load(FENCE, 3, parts.publish())).version == 0
    await asyncio.gather(engine.close(), other.close())


def test_a_finish_that_is_refused_lets_engines_go_on_with_the_weights_they_have(
    parts: Parts,
) -> None:
    rank = parts.rank
    with pytest.raises(StepOutOfOrder):  # as after a microbatch that raised
        rank.finish_train_step(FENCE, StepKey(1, 1, 1))
    assert rank.gate.enter() == 0
    rank.gate.end()
    with pytest.raises(StaleFence):
        rank.restore(Fence("run", 0), 0)
    assert rank.gate.enter() == 0


class Torn(SharedRank):
    """A rank whose checkpoints cannot be read."""

    def _restore(self, at_most: int) -> TrainerState:
        raise CheckpointFailed(0, at_most, "torn")


def test_a_change_that_raises_keeps_engines_from_decoding_until_one_succeeds(
    tmp_path: Path,
) -> None:
    rank = Torn(Parts.spec(tmp_path), WriteLocation(tmp_path), no_address)
    with pytest.raises(CheckpointFailed):
        rank.restore(FENCE, 0)
    assert rank.gate.enter() is None
    with pytest.raises(StepOutOfOrder):
        rank.finish_train_step(FENCE, StepKey(1, 1, 1))
    assert rank.gate.enter() is None


class FailingInFinish(SharedRank):
    """A rank that fails while its optimizer changes the weights."""

    was_open = True

    def _classify_errors(self, call: TrainerCall, step: int, *_: Any, **__: Any) -> NoReturn:
        self.was_open = self.gate.enter() is not None
        raise TrainStepFailed(0, step, call, "planted")


def test_no_engine_decodes_during_a_finish_or_after_one_that_raised(tmp_path: Path) -> None:
    rank = FailingInFinish(Parts.spec(tmp_path), WriteLocation(tmp_path), no_address)
    with pytest.raises(TrainStepFailed):
        rank.finish_train_step(FENCE, StepKey(1, 1, 1))
    assert not rank.was_open
    assert rank.gate.enter() is None
