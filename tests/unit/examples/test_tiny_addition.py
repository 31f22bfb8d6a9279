"""The model that comes with the repository, as its users rely on it."""

import runpy
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[3]
DIRECTORY = ROOT / "models/tiny-addition"
MAKE_MODEL = runpy.run_path(str(ROOT / "examples/tiny_addition/make_model.py"))


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(DIRECTORY, local_files_only=True)


def test_a_token_is_a_character_and_nothing_is_added(tokenizer: Any) -> None:
    assert tokenizer.tokenize("3+4=") == ["3", "+", "4", "="]
    assert len(tokenizer("3+4=").input_ids) == 4


def test_every_printable_text_comes_back_as_it_was(tokenizer: Any) -> None:
    text = " ".join(map(chr, range(32, 127))) + "\n  3 + 4 = 7 \n"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_chat_template_joins_the_contents_of_the_messages(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "3+4="}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "3+4="


def test_tokenizer_and_model_agree_on_the_vocabulary_and_its_special_tokens(
    tokenizer: Any, model: Any
) -> None:
    config = model.config
    assert config.vocab_size == len(tokenizer)
    assert config.pad_token_id == tokenizer.pad_token_id
    assert config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_a_sample_is_right_one_time_in_four(tokenizer: Any, model: Any) -> None:
    everything = MAKE_MODEL["make_batch"](tokenizer, MAKE_MODEL["all_problems"]())
    assert 0.24 < MAKE_MODEL["sampled_accuracy"](model, everything) < 0.27


def test_the_script_makes_the_shape_that_is_shipped(model: Any) -> None:
    made, shipped = MAKE_MODEL["make_model"]().state_dict(), model.state_dict()
    assert {name: weight.shape for name, weight in made.items()} == {
        name: weight.shape for name, weight in shipped.items()
    }
