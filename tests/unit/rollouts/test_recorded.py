"""Groups of rows that no engine has drawn."""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from offbeat.controller.receipts import refusal
from offbeat.environments.demonstrations import Demonstrations
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest
from offbeat.messages.groups import Receipt
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.environment_fakes import EOS_ID, SAMPLING, CharTokenizer, task

ROW = {"prompt": "3+4=", "completion": "7"}
TASK = msgspec.structs.replace(task(ROW, samples=1), version=5)


async def _no_engine(request: GenerateRequest) -> Any:
    raise AssertionError(f"an engine was asked for {request}")


def recorded(max_model_len: int = 64) -> tuple[Receipt, Columns]:
    return asyncio.run(
        run_group(
            TASK,
            Demonstrations(CharTokenizer()),
            _no_engine,
            SAMPLING,
            max_turns=1,
            max_model_len=max_model_len,
            policy=SampleFailurePolicy(),
        )
    )


def test_a_row_becomes_a_group_of_one_sample_without_logprobs_of_an_engine() -> None:
    receipt, columns = recorded()
    schema.check(columns, schema.RECORDED_COLUMNS)
    assert schema.GENERATION_LOGPROBS not in columns
    assert columns[schema.PROMPT_IDS].tolist() == [ord(char) for char in "3+4="]
    assert columns[schema.RESPONSE_IDS].tolist() == [ord("7"), EOS_ID]
    assert receipt.columns == tuple(columns)
    assert (receipt.samples, receipt.valid_tokens, receipt.rewards) == (1, (2,), (0.0,))


def test_its_tokens_bear_the_version_of_the_dispatch_and_pass_the_check_at_commit() -> None:
    receipt, columns = recorded()
    assert np.unique(columns[schema.WEIGHT_VERSIONS]).tolist() == [TASK.version]
    assert refusal(receipt, TASK, oldest_version=5, trainer_version=6) is None


def test_a_row_that_does_not_fit_fails_its_group_by_name() -> None:
    assert recorded(max_model_len=6)[0].tokens == 6
    with pytest.raises(RolloutFailed) as caught:
        recorded(max_model_len=5)
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, "row_too_long")
    assert "row 7 of data.path" in str(caught.value)
    assert "6 tokens do not fit generator.max_model_len=5" in str(caught.value)
