from typing import Any

import msgspec
import pytest

from offbeat.controller.receipts import refusal
from offbeat.fakes.receipts import make_receipt
from offbeat.messages.groups import Prompt, Receipt, RolloutTask, SampleFailure, SampleStatus

TASK = RolloutTask(Prompt(7, 0, 7, {}), 2, 2, "generator-0", 0, 60.0)
HONEST = Receipt(
    prompt_index=7,
    attempt=2,
    engine="generator-0",
    engine_incarnation="incarnation-1",
    rewards=(0.0, 1.0),
    prompt_tokens=(3, 3),
    response_tokens=(2, 4),
    valid_tokens=(2, 4),
    finish_reasons=("stop", "length"),
    version_spans=(((5, 2),), ((5, 1), (6, 3))),
    columns=("response_ids",),
    payload_bytes=100,
)


def judged(oldest_version: int = 5, trainer_version: int = 6, **forged: Any) -> str | None:
    receipt = msgspec.structs.replace(HONEST, **forged)
    return refusal(receipt, TASK, oldest_version, trainer_version)


def test_an_honest_receipt_may_enter() -> None:
    assert judged() is None


def test_a_receipt_of_the_fakes_may_enter() -> None:
    made = make_receipt(7, 2, HONEST.version_spans, finish_reasons=HONEST.finish_reasons)
    assert made == HONEST


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (
            {"prompt_index": 8},
            "answer for prompt 8 attempt 2, asked for prompt 7 attempt 2",
        ),
        ({"attempt": 1}, "answer for prompt 7 attempt 1"),
        ({"environment": "sums"}, "of environment 'sums', and prompt 7 is one of ''"),
        ({"rewards": (1.0,)}, "group of [1, 2] samples, asked for 2"),
        ({"prompt_tokens": (3, 3, 3)}, "group of [2, 3] samples"),
        ({"valid_tokens": ()}, "group of [0, 2] samples"),
        ({"finish_reasons": ("stop",)}, "group of [1, 2] samples"),
        ({"version_spans": (((5, 2),),)}, "group of [1, 2] samples"),
        ({"rewards": (0.0, float("nan"))}, "are not all finite"),
        ({"rewards": (float("inf"), 0.0)}, "are not all finite"),
        ({"response_tokens": (0, 4), "version_spans": ((), ((5, 4),))}, "a sample without tokens"),
        ({"prompt_tokens": (3, 0)}, "a sample without tokens"),
        ({"version_spans": (((5, 2),), ((5, 3),))}, "do not cover 4 response tokens"),
        ({"version_spans": (((5, 2),), ((5, 6), (6, -2)))}, "with one of no token"),
        ({"version_spans": (((5, 2),), ((5, 4), (6, 0)))}, "with one of no token"),
        ({"valid_tokens": (2, 5)}, "(2, 5) valid tokens of (2, 4)"),
        ({"valid_tokens": (-1, 4)}, "(-1, 4) valid tokens of (2, 4)"),
        ({"payload_bytes": -1}, "payload of -1 bytes"),
        ({"kept_kv": (1,)}, "kept_kv of 1 samples"),
        ({"statuses": (SampleStatus.MASKED,)}, "group of [1, 2] samples"),
        ({"failures": (SampleFailure.MODEL,)}, "group of [1, 2] samples"),
        ({"retries": (1, 0, 0)}, "group of [2, 3] samples"),
        ({"turns": (1,)}, "group of [1, 2] samples"),
        ({"branches": (2,)}, "group of [1, 2] samples"),
        ({"texts": ("7",)}, "group of [1, 2] samples"),
        ({"branches": (1, 0)}, "(1, 0) branches of samples with (2, 4) response tokens"),
        ({"branches": (3, 1)}, "(3, 1) branches of samples with (2, 4) response tokens"),
        ({"rewards_by_name": (("style", (0.5,)),)}, "group of [1, 2] samples"),
        ({"rewards_by_name": (("style", (0.5, float("nan"))),)}, "are not all finite"),
        (
            {"statuses": (SampleStatus.MASKED,) * 2, "valid_tokens": (0, 0)},
            "0 valid samples of 2; 1 are required",
        ),
        (
            {"statuses": (SampleStatus.MASKED, SampleStatus.VALID)},
            "masked samples with tokens to train: (2, 4)",
        ),
        ({"version_spans": (((4, 1), (5, 1)), ((5, 4),))}, "tokens of version 4: the engine had"),
        (
            {"version_spans": (((5, 2),), ((5, 1), (7, 3)))},
            "version 7: the trainer has made only 6",
        ),
    ],
)
def test_a_forged_one_is_refused_with_what_is_wrong(forged: dict[str, Any], reason: str) -> None:
    assert reason in (judged(**forged) or "")


def test_a_receipt_with_a_masked_sample_may_enter_while_enough_are_valid() -> None:
    statuses = (SampleStatus.MASKED, SampleStatus.VALID)
    masked: dict[str, Any] = {"statuses": statuses, "valid_tokens": (0, 4)}
    assert judged(**masked) is None
    both = msgspec.structs.replace(TASK, min_valid_samples=2)
    told = refusal(msgspec.structs.replace(HONEST, **masked), both, 5, 6)
    assert told == "1 valid samples of 2; 2 are required"


def test_a_receipt_survives_the_journal_and_one_from_before_samples_could_fail_reads_as_valid() -> (
    None
):
    full = msgspec.structs.replace(
        HONEST,
        statuses=(SampleStatus.MASKED, SampleStatus.VALID),
        failures=(SampleFailure.MODEL, SampleFailure.INFRASTRUCTURE),
        retries=(1, 2),
        turns=(3, 1),
    )
    encoded = msgspec.msgpack.encode(full)
    assert msgspec.msgpack.decode(encoded, type=Receipt) == full
    fields = msgspec.msgpack.decode(encoded)
    older = msgspec.convert(fields[: Receipt.__struct_fields__.index("statuses")], Receipt)
    assert (older.valid, older.masked_samples, older.retried_samples) == ((True, True), 0, 0)
    assert older.valid_rewards == older.rewards


def test_a_token_exactly_at_either_bound_is_honest() -> None:
    spans = (((5, 2),), ((6, 4),))
    assert judged(version_spans=spans) is None
    assert judged(oldest_version=6, version_spans=spans) is not None
    assert judged(trainer_version=5, version_spans=spans) is not None


def test_a_group_of_the_right_shape_but_of_another_size_than_asked_is_refused() -> None:
    one = {
        name: getattr(HONEST, name)[:1]
        for name in (
            *("rewards", "prompt_tokens", "response_tokens", "valid_tokens"),
            *("finish_reasons", "version_spans"),
        )
    }
    assert judged(**one) == "group of [1] samples, asked for 2"


def test_a_group_sampled_under_other_settings_than_those_asked_for_is_refused() -> None:
    assert "sampled under other settings (0123456789ab)" in str(judged(sampling="0123456789ab"))


def test_a_group_that_does_not_say_how_it_was_sampled_or_of_which_environment_it_is_is_refused() -> (
    None
):
    prompt = Prompt(7, 0, 7, {}, environment="sums")
    known = msgspec.structs.replace(TASK, prompt=prompt, sampling="0123456789ab")
    assert "of environment ''" in str(refusal(HONEST, known, 5, 6))
    of_sums = msgspec.structs.replace(HONEST, environment="sums")
    assert "sampled under other settings (unknown)" in str(refusal(of_sums, known, 5, 6))
