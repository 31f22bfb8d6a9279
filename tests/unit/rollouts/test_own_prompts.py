"""Samples of a group with prompts of their own: nothing is lost, nothing foreign is trained."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.controller.receipts import refusal
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateResult
from offbeat.messages.groups import SampleStatus
from offbeat.rollouts.samples import DrawnSample, pack_with_own_prompts
from offbeat.rollouts.transcript import Transcript
from offbeat.testing.environments import make_result
from offbeat.transfer_queue import schema
from tests.support.environment_fakes import task

TOKENS = st.integers(0, 3)  # few, so that prompts have beginnings in common
TURN = st.tuples(
    st.lists(TOKENS, max_size=3),  # the observation before it
    st.lists(TOKENS, min_size=1, max_size=3),
    st.integers(1, 2),  # weight version
)


def drawn(ids: list[int], version: int) -> GenerateResult:
    return make_result("7-1", [ids], version_spans=(((version, len(ids)),),))


@st.composite
def branch(draw: st.DrawFn) -> Transcript:
    made = Transcript(prompt_ids=(3, *draw(st.lists(TOKENS, max_size=4))))
    for number, (observation, ids, version) in enumerate(draw(st.lists(TURN, min_size=1))):
        made.add_turn(tuple(observation) if number else (), drawn(ids, version))
    return made


@st.composite
def sample(draw: st.DrawFn) -> Transcript:
    first, *later = draw(st.lists(branch(), min_size=1, max_size=3))
    transcript = Transcript()
    transcript.take(first, later)
    return transcript


def samples_of(*prompts: tuple[int, ...]) -> list[Transcript]:
    """Samples of one turn, in which the model drew token 9."""
    samples = list[Transcript]()
    for prompt in prompts:
        branch = Transcript(prompt_ids=prompt)
        branch.add_turn((), drawn([9], 1))
        samples.append(Transcript())
        samples[-1].take(branch)
    return samples


def whole(one: Transcript) -> tuple[list[int], list[bool]]:
    prompt = list(one.prompt_ids)
    return prompt + one.token_ids, [False] * len(prompt) + one.mask


def version_by_trained_token(one: Transcript) -> list[int]:
    versions = [version for version, count in one.spans for _ in range(count)]
    return [version for version, is_drawn in zip(versions, one.mask, strict=True) if is_drawn]


@given(st.lists(sample(), min_size=1, max_size=5))
def test_every_sample_is_packed_as_the_model_saw_it(samples: list[Transcript]) -> None:
    branches = [branch for one in samples for branch in one.branches]
    want = [whole(one) for one in branches]
    versions = [version for one in branches for version in version_by_trained_token(one)]
    shortest = min(len(one.prompt_ids) for one in branches)
    turns = tuple(sum(branch.turns for branch in one.branches) for one in samples)
    receipt, columns = pack_with_own_prompts(
        task(samples=len(samples)), [DrawnSample(one, SampleStatus.VALID) for one in samples]
    )
    prompt = columns[schema.PROMPT_IDS].tolist()
    offsets = columns[schema.RESPONSE_OFFSETS].tolist()
    mask = columns[schema.LOSS_MASK]
    for index, (ids, trained) in enumerate(want):
        own = slice(offsets[index], offsets[index + 1])
        assert prompt + columns[schema.RESPONSE_IDS][own].tolist() == ids
        assert [False] * len(prompt) + mask[own].tolist() == trained
    assert columns[schema.WEIGHT_VERSIONS][mask].tolist() == versions
    assert np.all(columns[schema.GENERATION_LOGPROBS][~mask] == 0.0)
    assert len(prompt) <= shortest
    of_rows = receipt.branches or (1,) * receipt.samples
    assert of_rows == tuple(len(one.branches) for one in samples)
    assert (receipt.turns or (1,) * receipt.samples) == turns
    row_sample = np.repeat(np.arange(len(samples)), of_rows)
    assert columns.get(schema.BRANCH_SAMPLES, row_sample).tolist() == row_sample.tolist()
    valid = np.bincount(row_sample, weights=[sum(trained) for _, trained in want])
    assert receipt.valid_tokens == tuple(valid)
    forward = sum(len(ids) for ids, _ in want)
    assert receipt.tokens == forward
    assert refusal(receipt, task(samples=len(samples)), 0, 9) is None


def test_the_shared_beginning_is_stored_once() -> None:
    samples = samples_of((1, 2, 3, 4), (1, 2, 5))
    _, columns = pack_with_own_prompts(
        task(samples=2), [DrawnSample(one, SampleStatus.VALID) for one in samples]
    )
    assert columns[schema.PROMPT_IDS].tolist() == [1, 2]
    assert columns[schema.RESPONSE_IDS].tolist() == [3, 4, 9, 5, 9]
    assert columns[schema.LOSS_MASK].tolist() == [False, False, True, False, True]


def test_prompts_with_nothing_in_common_fail_their_group() -> None:
    samples = samples_of((1,), (2,))
    with pytest.raises(RolloutFailed, match="no first token") as caught:
        pack_with_own_prompts(
            task(samples=2), [DrawnSample(one, SampleStatus.VALID) for one in samples]
        )
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, "prompts_differ")


def test_samples_that_have_all_failed_share_the_beginning_of_what_they_were_asked() -> None:
    a_task = msgspec.structs.replace(task(samples=2), min_valid_samples=0)
    failure = RolloutFailed(FailureKind.DATA, 0, 1, "agent_raised", "no tool")
    samples = [*samples_of((1, 2)), Transcript()]
    failed = [DrawnSample(one, SampleStatus.MASKED, failure) for one in samples]
    receipt, columns = pack_with_own_prompts(a_task, failed)
    assert columns[schema.PROMPT_IDS].tolist() == [1, 2]
    assert receipt.valid_tokens == (0, 0)
    with pytest.raises(RolloutFailed, match=r"no tool .* none of 2 samples has a token"):
        pack_with_own_prompts(a_task, [DrawnSample(Transcript(), SampleStatus.MASKED, failure)] * 2)


def test_a_masked_sample_shortens_the_prompt_of_no_valid_one() -> None:
    samples = samples_of((1, 2), (8,))
    failure = RolloutFailed(FailureKind.DATA, 0, 1, "agent_raised", "")
    receipt, columns = pack_with_own_prompts(
        task(samples=2),
        [
            DrawnSample(samples[0], SampleStatus.VALID),
            DrawnSample(samples[1], SampleStatus.MASKED, failure),
        ],
    )
    assert columns[schema.PROMPT_IDS].tolist() == [1, 2]
    assert columns[schema.RESPONSE_IDS].tolist() == [9, 8, 9]
    assert receipt.valid_tokens == (1, 0)
