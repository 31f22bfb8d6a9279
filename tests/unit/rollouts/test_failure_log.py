"""What failed is kept: row, response and traceback of each failed sample."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.rollouts.calls import environment_code
from offbeat.rollouts.failure_log import FailureLog
from offbeat.run_files.files import FAILURES, FAILURES_BYTES, RunFiles
from offbeat.telemetry.logs import Redactor
from tests.support.environment_fakes import CharTokenizer, task

SECRET = "hunter2-hunter2"
ROW = {"prompt": "Tom has 3 pens and gets 4. How many does he have now?", "key": SECRET}


def raised(error: Exception, response: str = "") -> RolloutFailed:
    with pytest.raises(RolloutFailed) as caught, environment_code(task(ROW)):
        raise error
    caught.value.sample, caught.value.response_ids = 1, list(map(ord, response))
    return caught.value


def kept(folder: Path, *failures: RolloutFailed) -> list[dict[str, Any]]:
    failure_log = FailureLog(RunFiles(folder), Redactor([SECRET]))
    for failure in failures:
        failure_log.add(task(ROW), failure, CharTokenizer())
    failure_log.close()
    file = folder / FAILURES
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_record_has_the_row_the_response_and_the_traceback_without_secrets(
    tmp_path: Path,
) -> None:
    failure = raised(ValueError(f"{SECRET} is garbage"), response="<think>7")
    (record,) = kept(tmp_path, failure)
    assert (record["group"], record["attempt"], record["sample"]) == ("g-000007", 1, 1)
    assert (record["engine"], record["version"]) == ("engine-0", 0)
    assert (record["reason"], record["response"]) == ("environment_raised", "<think>7")
    assert json.loads(record["row"])["prompt"] == ROW["prompt"]
    assert "in raised\n    raise error\nValueError: [redacted] is garbage" in record["traceback"]
    assert SECRET not in (tmp_path / FAILURES).read_text()


def test_the_message_names_the_prompt_and_does_not_carry_the_response() -> None:
    failure = raised(ValueError("garbage"), response="7")
    assert str(failure).startswith("test_failure_log.py:")
    kept(Path("absent"), failure)
    assert (
        "ValueError: garbage (sample 1 of 'Tom has 3 pens and gets 4. How many does ...', "
        in str(failure)
    )
    assert failure.response_ids == ()


@pytest.mark.parametrize("messages", ["a text", [], ["a text"], [{"role": "user"}], {"a": 1}, 7])
def test_a_row_of_an_agent_may_have_messages_of_any_form(tmp_path: Path, messages: object) -> None:
    failure, files = raised(ValueError("garbage")), RunFiles(tmp_path)
    failure_log = FailureLog(files, Redactor([]))
    failure_log.add(task({"messages": messages}), failure, CharTokenizer())
    failure_log.close()
    assert json.loads(json.loads((tmp_path / FAILURES).read_text())["row"]) == {
        "messages": messages
    }


class Refusing(CharTokenizer):
    """A tokenizer that comes with the model, as code, and lacks some ids of the head."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        raise KeyError(token_ids[0])


def test_a_tokenizer_that_refuses_the_response_hides_no_failure(tmp_path: Path) -> None:
    failure_log = FailureLog(RunFiles(tmp_path), Redactor([]))
    failure_log.add(task(ROW), raised(ValueError("garbage"), response="7"), Refusing())
    failure_log.close()
    record = json.loads((tmp_path / FAILURES).read_text())
    assert record["response"].startswith("tokens [55], which the tokenizer refuses")
    assert record["traceback"].endswith("ValueError: garbage\n")


def test_an_outage_and_a_failed_engine_are_not_kept(tmp_path: Path) -> None:
    lost = RolloutFailed(FailureKind.INFRASTRUCTURE, 7, 1, "engine_lost", "gone")
    assert kept(tmp_path, raised(EnvironmentUnavailable("503")), lost) == []


def test_the_file_is_appended_to_and_never_grows_without_bound(tmp_path: Path) -> None:
    assert len(kept(tmp_path, raised(ValueError("a")))) == 1
    assert len(kept(tmp_path, *[raised(ValueError("b"))] * 500)) == 201, "of one process"
    with (tmp_path / FAILURES).open("ab") as file:
        file.truncate(FAILURES_BYTES)
    failure_log = FailureLog(RunFiles(tmp_path), Redactor([]))
    failure_log.add(task(ROW), raised(ValueError("c")), None)
    failure_log.close()
    assert (tmp_path / FAILURES).stat().st_size == FAILURES_BYTES
