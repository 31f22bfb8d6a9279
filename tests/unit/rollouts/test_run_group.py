import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.environments.built_in import Arithmetic, StubEnvironment
from offbeat.environments.protocol import Environment, EnvironmentUnavailable, Episode, SingleTurn
from offbeat.environments.reward_value import NamedRewards
from offbeat.messages.failures import ActorLost, Component, FailureKind, RolloutFailed
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.rollouts.calls import check_answers
from offbeat.rollouts.columns import Columns, version_of_each_token
from offbeat.rollouts.group import run_group
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.environment_fakes import EOS_ID, SAMPLING, CharTokenizer, answers, result, task
from tests.support.guessing import Guess, Guessing

FAIL_GROUP = SampleFailurePolicy()
ARITHMETIC = Arithmetic(CharTokenizer())


def rolled_out(
    a_task: RolloutTask,
    generate: Any,
    environment: Environment = ARITHMETIC,
    *,
    max_turns: int = 4,
    max_model_len: int = 64,
    policy: SampleFailurePolicy = FAIL_GROUP,
) -> tuple[Receipt, Columns]:
    return asyncio.run(
        run_group(
            a_task,
            environment,
            generate,
            SAMPLING,
            max_turns=max_turns,
            max_model_len=max_model_len,
            policy=policy,
        )
    )


def failure(*args: Any, **options: Any) -> RolloutFailed:
    with pytest.raises(RolloutFailed) as caught:
        rolled_out(*args, **options)
    assert (caught.value.prompt_index, caught.value.attempt) == (7, 1)
    return caught.value


class Fixed(SingleTurn):
    """Gives the rewards it was made with, or raises the error."""

    def __init__(self, *rewards: Any) -> None:
        self.rewards = rewards

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        return (1,)

    async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
        if isinstance(self.rewards[0], BaseException):
            raise self.rewards[0]
        return self.rewards


def test_a_group_is_packed_and_its_receipt_says_what_is_in_it() -> None:
    spans = (((3, 1), (4, 1)), ((4, 3),))
    receipt, columns = rolled_out(task(), answers("7", "11", spans=spans, kept_kv=(1, 0)))
    assert columns["prompt_ids"].tolist() == [ord(char) for char in "3+4="]
    assert columns["response_ids"].tolist() == [ord("7"), EOS_ID, ord("1"), ord("1"), EOS_ID]
    assert columns["response_offsets"].tolist() == [0, 2, 5]
    assert columns["weight_versions"].tolist() == [3, 4, 4, 4, 4]
    assert columns["loss_mask"].all()
    assert columns["rewards"].tolist() == [1.0, 0.0]
    assert receipt.rewards == (1.0, 0.0)
    assert receipt.prompt_tokens == (4, 4)
    assert receipt.response_tokens == receipt.valid_tokens == (2, 3)
    assert receipt.version_spans == spans
    assert receipt.kept_kv == (1, 0)
    assert receipt.oldest_version == 3
    assert receipt.engine_incarnation == "engine-0-a"
    assert set(receipt.columns) == set(schema.ROLLOUT_COLUMNS)
    assert receipt.payload_bytes == schema.payload_bytes(columns)


class Encodes(Fixed):
    """Its prompt is what it was made with."""

    def encode(self, prompt: Prompt) -> Any:
        return self.rewards[0]


@pytest.mark.parametrize(
    ("encoded", "told"),
    [
        ("7", "the prompt is str '7'; return a tuple of token ids"),
        ((1.0, 2.0), "the prompt is tuple (1.0, 2.0)"),
        (((1, 2), (3, 4)), "the prompt is tuple ((1, 2), (3, 4))"),
        ((True,), "the prompt is tuple (True,)"),
        ((1, None), "the prompt is tuple (1, None)"),
        (((1,), (2, 3)), "the prompt: setting an array element"),
        ((1, -1), "the prompt holds -1 to 1; no token has such an id"),
        ((1, 2**31), "the prompt holds 1 to 2147483648"),
        ((1, 2**70), "the prompt is tuple (1, 1180591620717411303424)"),
    ],
)
def test_a_prompt_that_is_no_token_ids_fails_its_group_alone(encoded: object, told: str) -> None:
    failed = failure(task(), answers("7", "8"), Encodes(encoded))
    assert (failed.kind, failed.reason) == (FailureKind.DATA, "environment_wrong_type")
    assert told in failed.detail


@pytest.mark.parametrize("encoded", [[1, 2], np.array([1, 2]), (np.int64(1), 2)])
def test_token_ids_may_come_in_any_sequence(encoded: object) -> None:
    class Anything(Encodes):
        async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
            return [1.0, 0.0]

    _, columns = rolled_out(task(), answers("7", "8"), Anything(encoded))
    assert columns["prompt_ids"].tolist() == [1, 2]


def test_rewards_that_are_no_sequence_fail_their_group_alone() -> None:
    class Forgets(Fixed):
        async def score(self, task: RolloutTask, result: GenerateResult) -> Any:
            return None

    told = failure(task(), answers("7", "8"), Forgets())
    assert (told.kind, told.reason) == (FailureKind.DATA, "environment_raised")


def test_an_environment_that_is_out_of_service_blames_neither_prompt_nor_engine() -> None:
    class Unreachable(Fixed):
        async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
            raise EnvironmentUnavailable("the sandbox answers 503")

    told = failure(task(), answers("7", "8"), Unreachable())
    assert (told.kind, told.reason) == (FailureKind.INFRASTRUCTURE, "environment_unavailable")
    assert told.source is Component.ENVIRONMENT
    assert "503" in told.detail


def test_an_environment_whose_own_call_was_cancelled_has_failed() -> None:
    class Cancelled(Fixed):
        async def score(self, task: RolloutTask, result: GenerateResult) -> Sequence[float]:
            raise asyncio.CancelledError

    told = failure(task(), answers("7", "8"), Cancelled())
    assert (told.kind, told.reason) == (FailureKind.DATA, "environment_raised")
    assert "CancelledError" in told.detail


def test_one_request_asks_for_all_samples_with_the_seed_of_the_task() -> None:
    asked = list[GenerateRequest]()

    async def generate(request: GenerateRequest) -> GenerateResult:
        asked.append(request)
        return result(request.request_id, ["7", "7"])

    rolled_out(task(), generate, max_model_len=9)
    (request,) = asked
    assert request.request_id == "7-1"
    assert (request.samples, request.sampling.seed) == (2, 11)
    assert request.sampling.max_new_tokens == 5, "what is left of the window behind the prompt"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("7", 1.0), ("07", 0.0), (" 7", 0.0), ("7.", 0.0), ("77", 0.0), ("", 0.0), ("x", 0.0)],
)
def test_arithmetic_rewards_exactly_the_sum(response: str, reward: float) -> None:
    receipt, _ = rolled_out(task(samples=1), answers(response))
    assert receipt.rewards == (reward,)


def test_arithmetic_reads_a_response_that_was_cut_as_it_stands() -> None:
    receipt, _ = rolled_out(task(samples=1), answers("7", finish="length"))
    assert receipt.rewards == (1.0,)


class MarkedTokenizer(CharTokenizer):
    """Token 1 is ``7`` behind a space marker: at the start of a text the space is not written."""

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        return ["\u25817" if token_id == 1 else chr(token_id) for token_id in ids]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(" 7" if i == 1 else chr(i) for i in token_ids).removeprefix(" ")


@pytest.mark.parametrize(("ids", "reward"), [("\x01", 1.0), ("\x01\x01", 0.0), ("\x01x", 0.0)])
def test_arithmetic_asks_the_tokenizer_where_a_token_alone_does_not_tell(
    ids: str, reward: float
) -> None:
    receipt, _ = rolled_out(task(samples=1), answers(ids), Arithmetic(MarkedTokenizer()))
    assert receipt.rewards == (reward,)


def test_messages_go_through_the_chat_template() -> None:
    data = {"messages": [{"role": "user", "content": "3+4"}], "answer": 7}
    _, columns = rolled_out(task(data), answers("7", "7"))
    assert CharTokenizer().decode(columns["prompt_ids"].tolist()) == "user:3+4;assistant:"


def test_an_aborted_generation_may_be_tried_elsewhere() -> None:
    told = failure(task(), answers("7", "8", finish="abort"))
    assert (told.kind, told.reason) == (FailureKind.INFRASTRUCTURE, "generation_aborted")


@pytest.mark.parametrize(
    ("texts", "options"),
    [
        (["7"], {}),
        (["7", "8", "9"], {}),
        (["7", "8"], {"spans": (((3, 2),), ((3, 1),))}),
        (["7", "8"], {"spans": (((3, 3),), ((3, 1),))}),
        (["7", "8"], {"spans": (((3, 5), (4, -3)), ((3, 2),))}),
        (["7", "8"], {"spans": (((3, 2),),)}),
    ],
)
def test_an_answer_out_of_shape_is_refused(texts: list[str], options: dict[str, Any]) -> None:
    told = failure(task(), answers(*texts, **options))
    assert (told.kind, told.reason) == (FailureKind.INFRASTRUCTURE, "engine_answer")


def test_an_empty_response_is_refused() -> None:
    told = failure(task(), answers("7", "", finish="length"))
    assert (told.kind, told.reason) == (FailureKind.DATA, "empty_response")
    assert "sample 1" in told.detail


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    told = failure(task(), answers("7", "8"), max_model_len=4)
    assert (told.kind, told.reason) == (FailureKind.DATA, "prompt_too_long")
    assert "max_model_len=4" in told.detail


def test_a_column_that_breaks_the_schema_never_leaves_the_worker() -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        answer = result(request.request_id, ["7", "8"])
        answer.logprobs[2] = np.nan
        return answer

    told = failure(task(), generate)
    assert (told.kind, told.reason) == (FailureKind.DATA, "schema")
    assert "generation_logprobs" in told.detail


@pytest.mark.parametrize(
    ("rewards", "reason"),
    [
        ((1.0,), "reward_wrong_type"),
        ((1.0, None), "reward_none"),
        ((1.0, float("nan")), "reward_not_finite"),
        ((1.0, 1e39), "reward_not_finite"),
        ((1.0, "1"), "reward_wrong_type"),
        ((ValueError("no grader"),), "environment_raised"),
        ((SystemExit(2),), "environment_raised"),
        ((KeyboardInterrupt(),), "environment_raised"),
        ((BaseException("of its own"),), "environment_raised"),
    ],
)
def test_an_environment_that_fails_fails_its_group_and_never_means_zero(
    rewards: tuple[Any, ...], reason: str
) -> None:
    told = failure(task(), answers("7", "8"), Fixed(*rewards))
    assert (told.kind, told.reason) == (FailureKind.DATA, reason)


def test_a_lost_engine_passes_through_for_the_caller_to_classify() -> None:
    async def generate(request: GenerateRequest) -> GenerateResult:
        raise ActorLost("engine-0", "generate", "killed")

    for environment in (ARITHMETIC, Guessing(CharTokenizer())):
        with pytest.raises(ActorLost):
            rolled_out(task({"prompt": "?", "secret": 5}), generate, environment)


def guessing_engine(*turns: tuple[str, tuple[tuple[int, int], ...]]) -> Any:
    """Answers by the number of observations a history holds."""

    async def generate(request: GenerateRequest) -> GenerateResult:
        text, spans = turns[request.prompt_ids.count(ord("?")) - 1]
        kept = sum(count for _, count in spans[1:])
        return result(request.request_id, [text], spans=[spans], kept_kv=(kept,) if kept else ())

    return generate


SECRET_5 = {"prompt": "?", "secret": 5}


@pytest.mark.parametrize(
    ("finish", "drawn", "rewards", "truncated"),
    [
        ("stop", "7", (1.0,), 0),
        ("stop_string", "7", (1.0,), 0),
        ("stop_string", "7;", (0.0,), 0),
        ("length", "7;", (0.0,), 1),
    ],
)
def test_a_reward_sees_a_stop_string_and_a_sample_that_it_ended_is_whole(
    finish: str, drawn: str, rewards: tuple[float, ...], truncated: int
) -> None:
    receipt, columns = rolled_out(task(samples=1), answers(drawn, finish=finish))
    assert (receipt.rewards, receipt.truncated_samples) == (rewards, truncated)
    kept = CharTokenizer().decode(columns["response_ids"].tolist())
    assert kept == drawn + "</s>" * (finish == "stop")
    assert columns["loss_mask"].all(), "the stop string is trained, as a stop token is"


def test_an_episode_masks_observations_and_stamps_them_with_the_turn_that_follows() -> None:
    engine = guessing_engine(("8", ((1, 2),)), ("3", ((1, 1), (2, 1))), ("5", ((4, 2),)))
    receipt, columns = rolled_out(task(SECRET_5), engine, Guessing(CharTokenizer()))
    start, end = columns["response_offsets"][:2]
    text = CharTokenizer().decode(columns["response_ids"][start:end].tolist())
    assert text == "8</s><?3</s>>?5</s>"
    assert columns["loss_mask"][:end].astype(int).tolist() == [1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    assert columns["weight_versions"][:end].tolist() == [1, 1, 1, 1, 1, 2, 4, 4, 4, 4]
    assert columns["generation_logprobs"][:end].tolist() == [
        -0.5 * valid for valid in columns["loss_mask"][:end]
    ]
    assert receipt.version_spans == (((1, 5), (2, 1), (4, 4)),) * 2
    assert receipt.kept_kv == (1, 1)
    assert receipt.response_tokens == (10, 10)
    assert receipt.valid_tokens == (6, 6)
    assert receipt.rewards == (0.5, 0.5)
    assert receipt.finish_reasons == ("stop", "stop")


def test_an_episode_without_turns_left_is_rewarded_as_it_stands() -> None:
    engine = guessing_engine(("8", ((1, 2),)), ("3", ((1, 2),)))
    receipt, columns = rolled_out(task(SECRET_5), engine, Guessing(CharTokenizer()), max_turns=2)
    assert receipt.finish_reasons == ("turns", "turns")
    assert receipt.rewards == (-0.5, -0.5)
    assert columns["loss_mask"][receipt.response_tokens[0] - 1], "ends with the model's own token"


def test_an_episode_without_room_is_cut_before_the_observation() -> None:
    engine = guessing_engine(("8", ((1, 2),)))
    receipt, _ = rolled_out(task(SECRET_5), engine, Guessing(CharTokenizer()), max_model_len=5)
    assert receipt.finish_reasons == ("length", "length")
    assert receipt.response_tokens == (2, 2)


def test_a_turn_that_was_cut_is_counted_whatever_the_last_one_ended_with() -> None:
    async def first_one_cut(request: GenerateRequest) -> GenerateResult:
        if request.prompt_ids.count(ord("?")) == 1:
            return result(request.request_id, ["8"], finish="length")
        return result(request.request_id, ["5"])

    receipt, _ = rolled_out(task(SECRET_5), first_one_cut, Guessing(CharTokenizer()))
    assert receipt.finish_reasons == ("stop", "stop")
    assert receipt.truncated_turns == (1, 1)
    assert receipt.truncated_samples == 2


def test_every_turn_of_every_sample_has_a_name_and_a_seed_of_its_own() -> None:
    asked = list[GenerateRequest]()
    engine = guessing_engine(("8", ((1, 2),)), ("5", ((1, 2),)))

    async def generate(request: GenerateRequest) -> GenerateResult:
        asked.append(request)
        return await engine(request)

    rolled_out(task(SECRET_5), generate, Guessing(CharTokenizer()))
    assert sorted(request.request_id for request in asked) == [
        "7-1-0-0",
        "7-1-0-1",
        "7-1-1-0",
        "7-1-1-1",
    ]
    assert len({request.sampling.seed for request in asked}) == 4
    assert {request.samples for request in asked} == {1}


def test_the_first_sample_that_fails_ends_the_group() -> None:
    engine = guessing_engine(("no digit", ((1, 9),)))
    told = failure(task(SECRET_5), engine, Guessing(CharTokenizer()))
    assert told.reason == "environment_raised"
    assert told.detail.startswith("guessing.py:27 in step: ValueError: invalid literal for int()")
    assert (told.sample, told.response_ids) == (0, [ord(char) for char in "no digit"] + [0])


def test_stub_rewards_repeat_and_rise_with_the_weight_version() -> None:
    def mean(version: int) -> float:
        engine = answers(*["a"] * 64, spans=[((version, 2),)] * 64)
        receipt, _ = rolled_out(task(samples=64), engine, StubEnvironment())
        again, _ = rolled_out(task(samples=64), engine, StubEnvironment())
        assert receipt.rewards == again.rewards
        assert len(set(receipt.rewards)) == 64
        return sum(receipt.rewards) / 64

    assert mean(0) < mean(50) < mean(200)


Spans = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=4)


@given(st.lists(Spans.map(tuple), min_size=1, max_size=5).map(tuple))
def test_spans_and_versions_say_the_same(spans: tuple[tuple[tuple[int, int], ...], ...]) -> None:
    want = [version for sample in spans for version, count in sample for _ in range(count)]
    assert version_of_each_token(spans, len(want)).tolist() == want


def scored(a_task: RolloutTask) -> RolloutTask:
    return msgspec.structs.replace(a_task, evaluation=True, eval_set="math")


def test_final_answers_are_extracted_for_evaluations_alone() -> None:
    assert rolled_out(scored(task()), answers("7", "9"))[0].answers == ("7", "9")
    assert rolled_out(task(), answers("7", "9"))[0].answers == ()
    assert rolled_out(scored(task()), answers("7", "9"), Fixed(1.0, 1.0))[0].answers == ()


def test_a_score_may_name_the_final_answer() -> None:
    named = Fixed(NamedRewards(1.0, {}, "7"), 0.0)
    assert rolled_out(scored(task()), answers("7", "9"), named)[0].answers == ("7", "")
    assert rolled_out(task(), answers("7", "9"), named)[0].answers == ()


def test_an_episode_says_its_own_final_answer() -> None:
    class Told(Guess):
        def answer(self) -> str | None:
            return str(self.wrong)

    class Telling(Guessing):
        def begin(self, task: RolloutTask, sample: int) -> Episode:
            return Told(self.tokenizer, secret=5)

    engine = guessing_engine(("8", ((1, 2),)), ("5", ((1, 2),)))
    receipt, _ = rolled_out(scored(task(SECRET_5)), engine, Telling(CharTokenizer()))
    assert receipt.answers == ("1", "1")


@pytest.mark.parametrize(
    ("said", "kept"),
    [(["a", "\ud800"], ("a", "?")), (["5" * 200, ""], ("5" * 200, ""))],
)
def test_an_answer_is_text_that_any_process_can_read(said: list[str], kept: tuple[str]) -> None:
    assert check_answers(task(), said, 2) == kept


def test_an_answer_of_any_length_is_compared_by_a_short_one() -> None:
    long, same, other = check_answers(task(), ["5" * 9999, "5" * 9999, "5" * 9998], 3)
    assert long == same != other
    assert len(long) == 32


@pytest.mark.parametrize("said", [["a"], ["a", None], ["a", 5]])
def test_an_answer_that_is_no_text_fails_its_group(said: list[Any]) -> None:
    with pytest.raises(RolloutFailed, match="answer_wrong_type"):
        check_answers(task(), said, 2)
