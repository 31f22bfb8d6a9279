from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from offbeat.messages.failures import SchemaError
from offbeat.transfer_queue.schema import check
from offbeat.transfer_queue.tensordict_codec import from_tensordict, to_tensordict


def group(prompt: list[int], lengths: list[int], seed: int = 0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    tokens = sum(lengths)
    return {
        "prompt_ids": np.array(prompt, np.int32),
        "response_ids": rng.integers(0, 99, tokens).astype(np.int32),
        "response_offsets": np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        "loss_mask": rng.random(tokens) < 0.5,
        "generation_logprobs": -rng.random(tokens).astype(np.float32),
        "weight_versions": np.zeros(tokens, np.int32),
        "rewards": rng.random(len(lengths)).astype(np.float32),
    }


shapes = st.tuples(
    st.lists(st.integers(0, 9), min_size=1, max_size=4),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
)


@given(shapes, st.integers(0, 9))
def test_a_group_comes_back_as_it_went_in(shape: tuple[list[int], list[int]], seed: int) -> None:
    columns = group(*shape, seed)
    again = from_tensordict(to_tensordict([columns]))
    check(again)
    assert all(np.array_equal(again[name], columns[name]) for name in columns)


@given(st.lists(shapes, min_size=1, max_size=4))
def test_every_sample_of_every_group_is_one_row(made: list[tuple[list[int], list[int]]]) -> None:
    groups = [group(*shape, seed) for seed, shape in enumerate(made)]
    batch = to_tensordict(groups)
    rows = [(g, i) for g in groups for i in range(len(g["rewards"]))]
    assert batch.batch_size == torch.Size([len(rows)])
    responses, prompts = batch["response_ids"].unbind(), batch["prompt_ids"].unbind()
    for (columns, i), response, prompt in zip(rows, responses, prompts, strict=True):
        start, end = columns["response_offsets"][i : i + 2]
        assert response.tolist() == columns["response_ids"][start:end].tolist()
        assert prompt.tolist() == columns["prompt_ids"].tolist()


def test_read_only_shared_memory_is_read_without_a_warning() -> None:
    columns = group([1], [2, 3])
    for values in columns.values():
        values.flags.writeable = False
    assert to_tensordict([columns])["rewards"].shape == (2,)


def test_groups_that_do_not_fit_together_are_refused_by_name() -> None:
    odd = group([1], [2])
    del odd["rewards"]
    with pytest.raises(SchemaError, match="rewards"):
        to_tensordict([group([1], [2]), odd])
    with pytest.raises(SchemaError, match="at least one group"):
        to_tensordict([])
    two_prompts = to_tensordict([group([1], [2]), group([2], [2])])
    with pytest.raises(SchemaError, match="one prompt"):
        from_tensordict(two_prompts)
