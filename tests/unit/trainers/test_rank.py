"""A trainer rank in this process, around a stub trainer."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch.distributed as dist
from tensordict import TensorDictBase

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import StubConfig
from offbeat.config.sections.loss import ClippedPgLossConfig
from offbeat.fakes.trainer import StubSource, StubTrainer, make_stub_rank
from offbeat.messages.failures import (
    CheckpointFailed,
    StaleFence,
    StartFailed,
    StepOutOfOrder,
    TrainStepFailed,
)
from offbeat.messages.fences import Fence, StepKey
from offbeat.messages.training import ChunkResult, StepResult
from offbeat.messages.weights import FullReason
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.backend import Advantages
from offbeat.trainers.errors import ColumnsMissing, UntrainableModel
from offbeat.trainers.held_columns import merge_columns
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.ranks.peers import Peers
from offbeat.trainers.spec import TrainerSpec, WorldRendezvous
from offbeat.transfer_queue.schema import Columns
from offbeat.weight_sync.canary import invent_canary
from offbeat.weight_sync.manifest import release_digest
from tests.support.no_address import no_address
from tests.support.recipes import make_config

FENCE = Fence("run", 1)
LOSS = LossSpec()
Trained = Callable[[], list[dict[str, Any]]]


def group(seed: int, *, valid: bool = True) -> Columns:
    dice = np.random.default_rng(seed)
    return {
        "prompt_ids": dice.integers(0, 64, 3, dtype=np.int32),
        "response_ids": dice.integers(0, 64, 4, dtype=np.int32),
        "response_offsets": np.array([0, 2, 4], np.int64),
        "loss_mask": np.full(4, valid),
        "generation_logprobs": -dice.random(4, np.float32),
    }


class Breakable(StubTrainer):
    """A stub trainer that raises what it is told to."""

    breaks: Exception | None = None
    forgets = False
    drifts = False

    def load_state(self, directory: Path) -> None:
        super().load_state(directory)
        if self.forgets:
            self.reset()

    def current_digest(self) -> str:
        return super().current_digest() + "!" * self.drifts

    def train_microbatch(
        self,
        key: StepKey,
        chunk: TensorDictBase,
        advantages: Advantages,
        minibatches: Sequence[int] = (),
    ) -> ChunkResult:
        if self.breaks is not None:
            raise self.breaks
        return super().train_microbatch(key, chunk, advantages, minibatches)

    def abort_train_step(self, key: StepKey) -> None:
        if self.breaks is not None:
            raise self.breaks
        super().abort_train_step(key)


@pytest.fixture
def trainer() -> Breakable:
    return Breakable(StubConfig(), groups_per_step=2, sleep=lambda _: None)


def start_rank(trainer: StubTrainer, run_dir: Path, **overrides: Any) -> TrainerRank:
    config = make_config(**overrides)
    spec, made = TrainerSpec(config, str(run_dir)), (trainer, StubSource(trainer))
    return TrainerRank(spec, lambda _: made, WriteLocation(run_dir), no_address)


@pytest.fixture
def rank(trainer: Breakable, tmp_path: Path) -> Iterator[TrainerRank]:
    made = start_rank(trainer, tmp_path)
    yield made
    made.close()


@pytest.fixture
def trained(tmp_path: Path) -> Trained:
    """The lines of the rank's own log."""
    file = tmp_path / "logs" / "trained-rank0.jsonl"
    return lambda: [json.loads(line) for line in file.read_text().splitlines()]


def chunk(rank: TrainerRank, key: StepKey, *prompt_indices: int, valid: bool = True) -> ChunkResult:
    """One payload with a group for each prompt index."""
    payload = [group(prompt_index, valid=valid) for prompt_index in prompt_indices]
    places = tuple(((0, index),) for index in range(len(prompt_indices)))
    advantages = [(0.5, -0.5)] * len(prompt_indices)
    return rank.train_microbatch(FENCE, key, prompt_indices, advantages, (), places, 0, payload)


def step(
    rank: TrainerRank, number: int, *chunks: tuple[int, ...], attempt: int = 1, valid: bool = True
) -> StepResult:
    key = StepKey(number, attempt, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    for prompt_indices in chunks:
        key = key.next()
        chunk(rank, key, *prompt_indices, valid=valid)
    return rank.finish_train_step(FENCE, key.next())


def test_a_full_disk_under_the_log_of_what_was_trained_fails_no_step_and_no_restore(
    trainer: Breakable, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trained-rank0.jsonl").symlink_to("/dev/full")
    rank = start_rank(trainer, tmp_path)
    assert step(rank, 1, (0, 1)).applied
    assert rank.restore(FENCE, 0).version == 0
    rank.close()


def test_each_applied_step_is_one_line_with_its_groups(rank: TrainerRank, trained: Trained) -> None:
    step(rank, 1, (0, 1), (2,))
    step(rank, 2, (3,), attempt=2)
    assert trained() == [
        {"step": 1, "attempt": 1, "version": 1, "prompt_indices": [0, 1, 2]},
        {"step": 2, "attempt": 2, "version": 2, "prompt_indices": [3]},
    ]
    state = rank.state(FENCE)
    assert (state.version, state.last_step, state.last_attempt) == (2, 2, 2)


def test_a_repeated_key_counts_once(rank: TrainerRank, trained: Trained) -> None:
    keys = [StepKey(1, 1, seq) for seq in range(3)]
    for _ in range(2):
        rank.begin_train_step(FENCE, keys[0], LOSS)
    assert chunk(rank, keys[1], 0, 1) is chunk(rank, keys[1], 0, 1)
    assert rank.finish_train_step(FENCE, keys[2]) == rank.finish_train_step(FENCE, keys[2])
    assert trained() == [{"step": 1, "attempt": 1, "version": 1, "prompt_indices": [0, 1]}]
    assert rank.state(FENCE).version == 1


def test_a_begin_repeated_late_forgets_no_chunk(rank: TrainerRank, trained: Trained) -> None:
    begin = StepKey(1, 1, 0)
    rank.begin_train_step(FENCE, begin, LOSS)
    chunk(rank, begin.next(), 0)
    rank.begin_train_step(FENCE, begin, LOSS)
    rank.finish_train_step(FENCE, begin.next().next())
    assert trained()[0]["prompt_indices"] == [0]


def test_only_the_step_after_the_version_it_holds_is_begun(rank: TrainerRank) -> None:
    for number in (0, 2):
        with pytest.raises(StepOutOfOrder, match="step after version 0, which this rank holds"):
            rank.begin_train_step(FENCE, StepKey(number, 1, 0), LOSS)
    step(rank, 1, (0,))


def test_a_group_trained_twice_shows_as_twice(rank: TrainerRank, trained: Trained) -> None:
    step(rank, 1, (0, 1), (1,))
    assert trained()[0]["prompt_indices"] == [0, 1, 1]


def test_an_aborted_attempt_leaves_no_line_and_no_change(
    rank: TrainerRank, trained: Trained
) -> None:
    before = rank.state(FENCE).digest
    key = StepKey(1, 1, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    chunk(rank, key.next(), 0, 1)
    rank.abort_train_step(FENCE, key)
    assert rank.state(FENCE).digest == before
    with pytest.raises(StepOutOfOrder):
        rank.finish_train_step(FENCE, key.next().next())
    step(rank, 1, (1, 0), attempt=2)
    assert trained() == [{"step": 1, "attempt": 2, "version": 1, "prompt_indices": [1, 0]}]


def test_a_step_that_is_not_applied_leaves_no_line(rank: TrainerRank, trained: Trained) -> None:
    assert not step(rank, 1, (0,), valid=False).applied
    assert trained() == []
    assert rank.state(FENCE).last_step == 0


def test_a_failure_is_one_line_that_says_rank_step_call_and_place(
    rank: TrainerRank, trainer: Breakable
) -> None:
    key = StepKey(1, 1, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    trainer.breaks = MemoryError("out of memory\n  tried to allocate 2 GiB")
    with pytest.raises(TrainStepFailed) as failed:
        chunk(rank, key.next(), 0)
    text = str(failed.value)
    assert "\n" not in text
    assert text.startswith("trainer rank 0 failed in microbatch of step 1: MemoryError: out of mem")
    assert "(test_rank.py:" in text


def test_an_abort_that_fails_is_a_failure_of_its_rank_as_well(
    rank: TrainerRank, trainer: Breakable
) -> None:
    key = StepKey(1, 1, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    trainer.breaks = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(TrainStepFailed, match="failed in abort of step 1: RuntimeError: CUDA"):
        rank.abort_train_step(FENCE, key)


def test_a_failed_chunk_is_not_counted_when_it_succeeds_later(
    rank: TrainerRank, trainer: Breakable, trained: Trained
) -> None:
    key = StepKey(1, 1, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    trainer.breaks = MemoryError()
    with pytest.raises(TrainStepFailed):
        chunk(rank, key.next(), 7)
    trainer.breaks = None
    chunk(rank, key.next(), 0)
    rank.finish_train_step(FENCE, key.next().next())
    assert trained()[0]["prompt_indices"] == [0]


def test_a_typed_failure_stays_itself(rank: TrainerRank, trainer: Breakable) -> None:
    with pytest.raises(StepOutOfOrder):
        rank.finish_train_step(FENCE, StepKey(1, 1, 1))
    assert trainer.steps_applied == 0


def test_every_call_of_a_replaced_controller_is_refused(rank: TrainerRank) -> None:
    rank.state(Fence("run", 2))
    key = StepKey(1, 1, 0)
    calls: list[Callable[[], Any]] = [
        lambda: rank.state(FENCE),
        lambda: rank.about(FENCE),
        lambda: rank.publish_weights(FENCE, 0),
        lambda: rank.prepare_logprobs(FENCE, LOSS, (), 0),
        lambda: rank.begin_train_step(FENCE, key, LOSS),
        lambda: rank.hold(FENCE, 1),
        lambda: chunk(rank, key.next(), 0),
        lambda: rank.finish_train_step(FENCE, key.next()),
        lambda: rank.abort_train_step(FENCE, key),
        lambda: rank.save(FENCE, 0),
        lambda: rank.save_checkpoint(FENCE, 0),
        lambda: rank.restore(FENCE, 0),
    ]
    for call in calls:
        with pytest.raises(StaleFence):
            call()


def test_what_is_published_is_the_weights_and_their_digest(
    rank: TrainerRank, trainer: Breakable
) -> None:
    step(rank, 1, (0,))
    (manifest, digest, *_), *chunks = rank.publish_weights(FENCE, 1)
    assert manifest.canary is not None
    assert len(chunks) == rank.about(FENCE)[1] == len(manifest.chunk_nbytes)
    assert b"".join(each.tobytes() for each in chunks) == bytes.fromhex(trainer.weights_digest())
    assert digest == release_digest(manifest, [each for _, each in StubSource(trainer).chunks()])


def test_a_snapshot_does_not_follow_the_next_step(rank: TrainerRank) -> None:
    _, before = rank.publish_weights(FENCE, 0)
    kept = before.copy()
    step(rank, 1, (0,))
    assert np.array_equal(before, kept)


@pytest.mark.plugins
def test_after_a_restore_a_release_has_no_base(trainer: Breakable, tmp_path: Path) -> None:
    rank = start_rank(trainer, tmp_path, sync={"delta": True})
    reasons = [rank.publish_weights(FENCE, 0)[0].full_reason for _ in range(2)]
    rank.restore(FENCE, 0)
    published, *handles = rank.publish_weights(FENCE, 0)
    rank.close()
    assert reasons == [FullReason.NO_BASE, FullReason.TOO_LARGE]
    assert published.full_reason is FullReason.NO_BASE
    assert len(handles) == sum(rank.about(FENCE)[1:]) == 2


def test_every_nth_release_of_a_process_has_a_canary_of_its_weights(
    trainer: Breakable, tmp_path: Path
) -> None:
    for interval, expected in ((0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4])):
        rank = start_rank(trainer, tmp_path, sync={"canary_interval": interval})
        published = [rank.publish_weights(FENCE, 0)[0][0] for _ in range(5)]
        with_one = [place for place, manifest in enumerate(published) if manifest.canary]
        assert with_one == expected
        for place in with_one:
            tokens, logprobs = invent_canary(trainer.weights_digest())
            assert (published[place].canary.tokens, published[place].canary.logprobs) == (
                tokens,
                logprobs,
            )
        rank.close()


def test_prepared_columns_come_with_their_names_and_sizes(rank: TrainerRank) -> None:
    loss = LossSpec(ClippedPgLossConfig(old_logprobs="policy", kl_coef=0.1))
    payload = [group(0), group(1)]
    places = (((0, 1),), ((0, 0),))
    (names, sizes), columns = rank.prepare_logprobs(FENCE, loss, places, 0, payload)
    assert names == ("policy_logprobs", "reference_logprobs")
    assert sizes == (32, 32)
    assert np.array_equal(columns[0]["policy_logprobs"], payload[1]["generation_logprobs"])


def test_a_groups_columns_are_gathered_from_all_its_payloads() -> None:
    a, b, c = (np.array([i]) for i in range(3))
    payloads = [[{"x": a}, {"x": b}], [{"y": c}]]
    assert merge_columns((((0, 1), (1, 0)), ((0, 0),)), payloads) == [{"x": b, "y": c}, {"x": a}]


def test_the_model_is_saved_under_the_name_of_its_step(rank: TrainerRank, tmp_path: Path) -> None:
    step(rank, 1, (0,))
    rank.save(FENCE, 1)
    assert (tmp_path / "checkpoints" / "step_1").is_dir()


def test_weights_of_another_version_are_not_saved_under_the_name_asked_for(
    rank: TrainerRank, tmp_path: Path
) -> None:
    with pytest.raises(TrainStepFailed, match="it holds version 0"):
        rank.save(FENCE, 4)
    assert not (tmp_path / "checkpoints" / "step_4").exists()


# --- checkpoints --------------------------------------------------------------------------------------


def test_a_checkpoint_says_what_it_holds(rank: TrainerRank, tmp_path: Path) -> None:
    step(rank, 1, (0,))
    made = rank.save_checkpoint(FENCE, 1)
    assert (made.version, made.digest) == (1, rank.state(FENCE).digest)
    files = list((tmp_path / "checkpoints" / "state_1").iterdir())
    assert 0 < made.nbytes < sum(each.stat().st_size for each in files)


class CountsHashes(StubTrainer):
    """A stub trainer that counts how often its weights are hashed."""

    hashed = 0

    def weights_digest(self) -> str:
        self.hashed += 1
        return super().weights_digest()


def test_weights_are_hashed_once_per_version_however_often_their_digest_is_wanted(
    tmp_path: Path,
) -> None:
    trainer = CountsHashes(StubConfig(), groups_per_step=2, sleep=lambda _: None)
    rank = start_rank(trainer, tmp_path)
    seen = [rank.state(FENCE).digest, rank.state(FENCE).digest]
    assert trainer.hashed == 1
    step(rank, 1, (0,), attempt=1)
    seen += [rank.save_checkpoint(FENCE, 1).digest, rank.state(FENCE).digest]
    assert trainer.hashed == 2
    step(rank, 2, (1,), attempt=2)
    seen += [rank.state(FENCE).digest, rank.restore(FENCE, 1).digest]
    assert trainer.hashed == 4
    rank.close()
    first, one, two = seen[0], seen[2], seen[4]
    assert seen == [first, first, one, one, two, one]
    assert len({first, one, two}) == 3


def test_a_directory_that_cannot_be_written_is_a_typed_failure(
    rank: TrainerRank, tmp_path: Path
) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointFailed, match="File exists"):
        rank.save_checkpoint(FENCE, 0)
    step(rank, 1, (0,))


def test_without_a_checkpoint_a_restore_is_the_initial_model(
    rank: TrainerRank, trained: Trained
) -> None:
    initial = rank.state(FENCE)
    step(rank, 1, (0,))
    assert rank.restore(FENCE, 1) == initial
    assert trained()[-1] == {"restored": 0}


def test_a_restore_drops_the_open_step_and_its_groups(rank: TrainerRank, trained: Trained) -> None:
    step(rank, 1, (7,), attempt=6)
    key = StepKey(2, 7, 0)
    rank.begin_train_step(FENCE, key, LOSS)
    chunk(rank, key.next(), 0, 1)
    rank.restore(FENCE, 1)
    with pytest.raises(StepOutOfOrder):
        rank.finish_train_step(FENCE, key.next().next())
    rank.abort_train_step(FENCE, key)
    step(rank, 1, (2,), attempt=8)
    assert trained()[-1] == {"step": 1, "attempt": 8, "version": 1, "prompt_indices": [2]}


def test_a_checkpoint_that_holds_other_weights_than_it_says_is_not_taken_up(
    rank: TrainerRank, trainer: Breakable, tmp_path: Path
) -> None:
    step(rank, 1, (0,))
    rank.save_checkpoint(FENCE, 1)
    trainer.forgets = True
    with pytest.raises(CheckpointFailed, match="its manifest says"):
        rank.restore(FENCE, 1)


def test_a_checkpoint_of_other_weights_of_the_same_version_is_not_taken_up(
    rank: TrainerRank, trainer: Breakable
) -> None:
    step(rank, 1, (0,))
    rank.save_checkpoint(FENCE, 1)
    trainer.drifts = True
    with pytest.raises(CheckpointFailed, match="its manifest says"):
        rank.restore(FENCE, 1)


def held(rank: TrainerRank, key: StepKey, number: int) -> ChunkResult:
    """A chunk of one group whose columns were sent ahead under this number."""
    return rank.train_microbatch(FENCE, key, [0], [(0.5, -0.5)], (), (((0, 0),),), number)


def test_columns_sent_ahead_of_a_call_are_those_of_that_call(rank: TrainerRank) -> None:
    rank.begin_train_step(FENCE, StepKey(1, 1, 0), LOSS)
    rank.hold(FENCE, 7, [group(0)])
    assert held(rank, StepKey(1, 1, 1), 7).sequences == 2


@pytest.mark.parametrize("before", [None, 6])
def test_columns_that_did_not_arrive_fail_the_call_and_are_never_those_of_another(
    rank: TrainerRank, before: int | None
) -> None:
    """Those of a call that was cancelled are still there."""
    rank.begin_train_step(FENCE, StepKey(1, 1, 0), LOSS)
    if before is not None:
        rank.hold(FENCE, before, [group(1)])
    with pytest.raises(ColumnsMissing):
        held(rank, StepKey(1, 1, 1), 7)
    with pytest.raises(StepOutOfOrder):
        rank.finish_train_step(FENCE, StepKey(1, 1, 2))
    rank.abort_train_step(FENCE, StepKey(1, 1, 0))
    assert step(rank, 1, (0,), attempt=2).applied


def test_columns_of_a_replaced_controller_are_not_those_of_a_call_of_the_next_one(
    rank: TrainerRank,
) -> None:
    """Each controller numbers its calls from 1; the first one of this was refused, or never sent."""
    successor = Fence(FENCE.run_id, FENCE.incarnation + 1)
    rank.hold(FENCE, 1, [group(0)])
    rank.begin_train_step(successor, StepKey(1, 1, 0), LOSS)
    with pytest.raises(ColumnsMissing):
        rank.train_microbatch(successor, StepKey(1, 1, 1), [0], [(0.5, -0.5)], (), (((0, 0),),), 1)


def test_what_a_process_cannot_be_a_rank_of_is_said_again_to_whoever_asks_later(
    tmp_path: Path,
) -> None:
    """A model may be refused after the first caller has given up, and another one begun to ask."""
    made = list[str]()

    def refuse(_peers: Peers) -> NoReturn:
        made.append("model")
        raise UntrainableModel("Llama", "is divided otherwise", "Set trainer.tensor_parallel to 1")

    config = make_config()
    spec, place = TrainerSpec(config, str(tmp_path), ranks=2), WriteLocation(tmp_path)
    rank = TrainerRank(spec, refuse, place, lambda: "127.0.0.1")
    world = WorldRendezvous("world", rank.listen(FENCE), size=1, timeout_s=20.0)
    for _ in range(2):
        with pytest.raises(UntrainableModel, match="divided otherwise"):
            rank.join(FENCE, world)
    assert made == ["model"]
    assert not dist.is_initialized()
    rank.close()


def test_a_rank_that_other_machines_cannot_reach_opens_no_rendezvous(tmp_path: Path) -> None:
    config = make_config()
    spec, place = TrainerSpec(config, str(tmp_path), ranks=2), WriteLocation(tmp_path)
    rank = TrainerRank(spec, partial(make_stub_rank, spec), place, lambda: "192.0.2.1")
    with pytest.raises(StartFailed, match=r"trainer rank 0 cannot start: .* address 192\.0\.2\.1"):
        rank.listen(FENCE)
    rank.close()


# --- without Ray --------------------------------------------------------------------------------------

ONE_RELEASE_EACH = """
import sys
from functools import partial
from pathlib import Path

from offbeat.config.run import RunConfig
from offbeat.messages.fences import Fence
from offbeat.run_files.sharing import WriteLocation
from offbeat.trainers.rank import TrainerRank
from offbeat.trainers.spec import TrainerSpec
from offbeat.fakes.trainer import make_stub_rank
from offbeat.trainers.torch.torch_trainer import make_torch_rank

model, folder = sys.argv[1:]
for backend, make in (("stub", make_stub_rank), ("torch", make_torch_rank)):
    settings = {"steps": 1, "model": {"path": model}, "trainer": {"backend": backend}}
    spec, place = TrainerSpec(RunConfig.model_validate(settings), folder), WriteLocation(Path(folder))
    rank = TrainerRank(spec, partial(make, spec), place, lambda: sys.exit("asked for an address"))
    rank.publish_weights(Fence("run", 1), 0)
    rank.close()
print("published", *{"ray"} & {*sys.modules})
"""


def test_ranks_are_made_and_publish_in_a_process_that_loads_no_ray(tmp_path: Path) -> None:
    model = Path(__file__).parents[3] / "models" / "tiny-addition"
    finished = subprocess.run(
        [sys.executable, "-c", ONE_RELEASE_EACH, str(model), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.splitlines()[-1] == "published"
