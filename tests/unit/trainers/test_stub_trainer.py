from typing import Any

import numpy as np
import pytest

from offbeat.config.loss_spec import LossSpec
from offbeat.config.sections.generator import StubConfig
from offbeat.fakes.trainer import StubTrainer
from offbeat.messages.fences import StepKey
from offbeat.transfer_queue.tensordict_codec import build_chunk
from tests.support.chunks import in_chunk

Step = tuple[list[dict[str, Any]], list[tuple[float, ...]]]


def stub(slept: list[float] | None = None) -> StubTrainer:
    sleep = (slept if slept is not None else list[float]()).append
    return StubTrainer(StubConfig(step_s=0.5), groups_per_step=8, sleep=sleep)


def run_in_chunks(trainer: StubTrainer, step: Step, order: list[list[int]]) -> Any:
    groups, advantages = step
    key = StepKey(1, 1, 0)
    trainer.begin_train_step(key, LossSpec())
    for part in order:
        key = key.next()
        trainer.train_microbatch(
            key, build_chunk([groups[i] for i in part]), [advantages[i] for i in part]
        )
    return trainer.finish_train_step(key.next())


def test_the_digest_follows_from_the_groups_not_from_their_order(step_data: Step) -> None:
    trainers = [stub() for _ in range(3)]
    results = [
        run_in_chunks(trainers[0], step_data, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        run_in_chunks(trainers[1], step_data, [[7, 6, 5], [4], [3, 2, 1, 0]]),
        trainers[2].train(*in_chunk(step_data), LossSpec()),
    ]
    assert len({trainer.weights_digest() for trainer in trainers}) == 1
    assert len({(each.loss, each.tokens, each.sequences) for each in results}) == 1
    assert trainers[0].weights_digest() != stub().weights_digest()


def test_another_advantage_is_another_digest(step_data: Step) -> None:
    groups, advantages = step_data
    one, other = stub(), stub()
    one.train(build_chunk(groups), advantages, LossSpec())
    other.train(build_chunk(groups), [(9.0, *advantages[0][1:]), *advantages[1:]], LossSpec())
    assert one.weights_digest() != other.weights_digest()


def test_a_step_of_all_groups_costs_what_the_config_says(step_data: Step) -> None:
    slept = list[float]()
    result = run_in_chunks(stub(slept), step_data, [[0], [1, 2, 3, 4, 5, 6, 7]])
    assert sum(slept) == pytest.approx(0.5)
    assert slept[1] == pytest.approx(7 * slept[0])
    assert result.compute_s == pytest.approx(0.5)


def test_prepared_logprobs_agree_with_the_engine(step_data: Step) -> None:
    columns = stub().prepare_logprobs(
        build_chunk(step_data[0]), policy=True, reference=True, temperature=1.0
    )
    for group, prepared in zip(step_data[0], columns, strict=True):
        assert prepared.keys() == {"policy_logprobs", "reference_logprobs"}
        assert np.array_equal(prepared["policy_logprobs"], group["generation_logprobs"])
