"""The preview of a recipe says whether there is something to learn from."""

from dataclasses import replace

import msgspec

from offbeat.launch.preview import Preview, PreviewedPrompt
from offbeat.messages.evaluations import ScoredSample


def previewed(prompts: tuple[PreviewedPrompt, ...]) -> Preview:
    return Preview(prompts, "models/tiny")


def prompt(*rewards: float | None, finish_reason: str = "stop") -> PreviewedPrompt:
    """A prompt with a sample per reward; None has failed."""
    samples = tuple(
        ScoredSample(
            set="",
            prompt_index=0,
            row=0,
            sample=number,
            reward=reward or 0.0,
            is_valid=reward is not None,
            is_correct=False,
            answer=None,
            finish_reason=finish_reason,
            response_tokens=2,
            turns=1,
            response=f"answer {number}",
            environment_s=0.5,
        )
        for number, reward in enumerate(rewards)
    )
    return PreviewedPrompt("1+1=", samples)


def test_a_group_whose_rewards_differ_has_a_signal() -> None:
    preview = previewed((prompt(0.0, 1.0), prompt(1.0, 1.0)))
    assert (preview.reward, preview.without_signal, preview.reward_s) == (0.75, 0.5, 0.5)
    assert preview.verdict == "50% of the groups have something to learn from."


def test_equal_rewards_are_nothing_to_learn_from() -> None:
    assert previewed((prompt(0.0, 0.0),)).verdict.startswith(
        "There is nothing to learn from: every reward is 0."
    )
    differ = previewed((prompt(0.0, 0.0), prompt(1.0, 1.0))).verdict
    assert differ.startswith("There is nothing to learn from. ")


def test_equal_answers_are_told_apart_from_equal_rewards() -> None:
    samples = prompt(0.0, 0.0).samples

    def answered(text: str | None) -> str:
        alike = tuple(msgspec.structs.replace(each, response=text) for each in samples)
        return previewed((PreviewedPrompt("1+1=", alike),)).verdict

    assert answered("2").startswith("All answers to a prompt are equal")
    assert answered(None).startswith("There is nothing to learn from: every reward is 0.")


def test_few_groups_with_a_signal_are_named() -> None:
    verdict = previewed((prompt(0.0, 1.0), *[prompt(0.0, 0.0)] * 9)).verdict
    assert verdict.startswith("Only 10% of the groups")


def test_failed_samples_have_no_reward() -> None:
    assert prompt(None, 1.0, 1.0).has_signal is False
    assert previewed((prompt(None, None),)).verdict.startswith("Every sample has failed")


def test_the_text_shows_three_prompts_and_the_figures_of_all() -> None:
    text = previewed((prompt(0.0, 1.0, finish_reason="length"), *[prompt(0.0, 1.0)] * 4)).to_text()
    assert text.count("1+1=") == 3
    assert "  reward 1, 2 tokens, length\n      answer 1\n" in text
    assert "model            models/tiny\nprompts          5, 10 samples" in text
    assert "20% of the samples, at the limit of tokens" in text


def test_the_other_keys_of_the_row_are_shown_and_cut() -> None:
    text = str(previewed((replace(prompt(0.0, 1.0), row='{"answer": 2}'),)))
    assert '    1+1=\n  row {"answer": 2}\n  reward 0' in text
    long = str(previewed((replace(prompt(0.0, 1.0), row="x" * 5000),)))
    assert 200 < long.count("x") < 500
    assert "row" not in str(previewed((prompt(0.0, 1.0),))).partition("model ")[0].split()


def test_a_failed_sample_is_shown_as_one() -> None:
    failed = previewed(
        (replace(prompt(None, 1.0), errors={0: "r.py:6 in reward: ValueError: no"}),)
    )
    shown = (
        "  failed: r.py:6 in reward: ValueError: no\n      answer 0\n  reward 1, 2 tokens, stop\n"
    )
    assert shown in str(failed)
    assert "failed           1 of 2 samples: fix the code" in str(failed)
    assert repr(failed) == str(failed), "a notebook shows the last line of a cell"


def test_a_failed_sample_behind_the_first_prompts_is_shown_too() -> None:
    failed = replace(prompt(1.0, None), errors={1: "KeyError"})
    text = previewed((*[prompt(0.0, 1.0)] * 4, failed, failed)).to_text()
    assert "prompt 3\n" in text and "prompt 5\n" in text
    assert text.count("failed: KeyError") == 1
    assert "2 of 12 samples" in text
