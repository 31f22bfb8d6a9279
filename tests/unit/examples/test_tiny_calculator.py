"""The model and the tasks of the calculator agent, as its recipe relies on them."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.tiny_calculator import make_model as script
from examples.tiny_calculator.calculator import CALCULATOR, calculate
from examples.tiny_calculator.tasks import HELD_OUT, SEED, TRAINED, make_task, make_tasks
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.chat import ChatMessage, ToolCall, parse_tool_calls
from offbeat.plugins.agents.endpoint.chat_bridge import AnsweredChat, RenderedPrompt
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/tiny_calculator"
DIRECTORY = ROOT / "models/tiny-calculator"
TOOLS = (json.dumps(CALCULATOR),)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, local_files_only=True)


def rows(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text().splitlines()]


def chat_message(message: dict[str, Any]) -> ChatMessage:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return ChatMessage(
        message["role"],
        message.get("content", ""),
        tuple(ToolCall("", call["name"], json.dumps(call["arguments"])) for call in calls),
    )


# --- tasks ------------------------------------------------------------------------------------------


def test_the_answer_of_each_task_is_the_product_of_its_numbers() -> None:
    for row in rows("tasks.jsonl") + rows("held_out.jsonl"):
        assert row["answer"] == math.prod(map(int, re.findall(r"\d+", row["question"])))


def test_no_task_is_held_out_and_trained() -> None:
    trained = {row["question"] for row in rows("tasks.jsonl")}
    held_out = {row["question"] for row in rows("held_out.jsonl")}
    assert (len(trained), len(held_out)) == (TRAINED, HELD_OUT)
    assert not trained & held_out


def test_the_tasks_that_are_shipped_are_those_that_the_script_makes() -> None:
    made = [each["question"] for each in make_tasks(SEED, TRAINED + HELD_OUT)]
    assert made == [row["question"] for row in rows("tasks.jsonl") + rows("held_out.jsonl")]


@pytest.mark.parametrize(
    ("expression", "result"),
    [("471*263", "123873"), ("2**9", "error: write a*b"), ("__import__('os')", "error: write a*b")],
)
def test_the_calculator_reads_two_numbers_and_evaluates_nothing(
    expression: str, result: str
) -> None:
    assert calculate(json.dumps({"expression": expression})) == result


@pytest.mark.parametrize("arguments", ["{}", '{"expression": null}', '{"expression": [1]}'])
def test_a_call_of_another_form_is_answered_with_what_to_write(arguments: str) -> None:
    assert calculate(arguments) == "error: write a*b"


# --- tokenizer and template -------------------------------------------------------------------------


def test_a_digit_is_a_token(tokenizer: Any) -> None:
    assert tokenizer.tokenize("471*263") == list("471*263")


def test_every_text_comes_back_as_it_was(tokenizer: Any) -> None:
    text = " ".join(map(chr, range(32, 127))) + "\n  3 · 4 = zwölf \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_endpoint_reads_the_call_that_the_template_writes(tokenizer: Any) -> None:
    question, call, *_ = script.solution(make_task(random.Random(0)))
    asked, said = (
        tokenizer.apply_chat_template(messages, tools=[CALCULATOR], tokenize=False, **opens)
        for messages, opens in (
            ([question], {"add_generation_prompt": True}),
            ([question, call], {}),
        )
    )
    answer = said.removeprefix(asked).removesuffix("<|im_end|>\n")
    content, (parsed,) = parse_tool_calls(answer)
    function = call["tool_calls"][0]["function"]
    assert (content, parsed.name, parsed.arguments) == ("", "calculator", function["arguments"])


@pytest.mark.parametrize("seed", range(4))
def test_turns_are_joined_to_the_tokens_of_the_whole_conversation(
    tokenizer: Any, seed: int
) -> None:
    """What the model is warmed on, what it is sampled on and what it is trained on are one."""
    template = TokenizerTemplate(tokenizer)
    bridge = TemplateBridge(template, template.end_texts((tokenizer.eos_token_id,)))
    conversation = script.solution(make_task(random.Random(seed)))
    batch = script.make_batch(tokenizer, [conversation])
    is_answer = (batch.labels_BT[0] != script.IGNORED_LABEL).tolist()
    whole = batch.token_ids_BT[0].tolist()
    messages = tuple(map(chat_message, conversation))
    prompt: Any = bridge.opening(messages[:1], TOOLS)
    for turn in range(1, len(messages), 2):
        assert whole[: len(prompt.token_ids)] == list(prompt.token_ids)
        end = is_answer.index(False, len(prompt.token_ids))
        history = AnsweredChat(
            messages[: turn + 1], TOOLS, prompt.text, tuple(whole[:end]), len(prompt.token_ids)
        )
        if turn + 2 < len(messages):
            prompt = bridge.extend(history, messages[: turn + 2], TOOLS)
            assert isinstance(prompt, RenderedPrompt)
    assert tokenizer.decode(whole[end:]) == "\n"  # that was the last turn


def test_the_script_makes_the_tokenizer_that_is_shipped(tokenizer: Any) -> None:
    made = script.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template == tokenizer.chat_template
    conversation = script.solution(make_task(random.Random(1)))
    assert made.apply_chat_template(conversation) == tokenizer.apply_chat_template(conversation)


# --- model ------------------------------------------------------------------------------------------


def test_tokenizer_and_model_agree_on_the_vocabulary_and_its_special_tokens(
    tokenizer: Any, model: Any
) -> None:
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_sample_is_right_one_time_in_three(tokenizer: Any, model: Any) -> None:
    batch = script.make_batch(tokenizer, [script.solution(task) for task in make_tasks(1, 64)])
    assert 0.28 < script.sampled_accuracy(model, batch) < 0.42


def test_the_script_makes_the_shape_that_is_shipped(tokenizer: Any, model: Any) -> None:
    made, shipped = script.make_model(len(tokenizer)).state_dict(), model.state_dict()
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }
