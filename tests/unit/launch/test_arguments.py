"""Arguments of ``offbeat.train`` that cannot work are refused by their name, before anything starts."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

import offbeat
from offbeat.config.problems import ConfigError
from offbeat.launch.given_rows import BadRows

ROWS: Final = [{"prompt": "1+1=", "answer": 2}]


def right(row: Mapping[str, Any], response: str) -> float:
    return float(response == row["answer"])


def short(row: Mapping[str, Any], response: str) -> float:
    return -float(len(response))


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Any]:
    def trained(**changed: Any) -> offbeat.Run:
        given = {"model": "nowhere", "prompts": ROWS, "reward": right, "steps": 1, **changed}
        return offbeat.train(
            quiet=True,
            run_dir=tmp_path / "run",
            **{k: v for k, v in given.items() if v is not None},
        )

    return trained


@pytest.mark.plugins
@pytest.mark.parametrize(
    ("changed", "problem", "fix"),
    [
        ({"eval_prompts": ROWS}, "never scored", "eval={'interval': N}"),
        ({"eval_interval": 5}, "the key eval.interval", "eval={'interval': ...}"),
        ({"reward": None, "reward_funcs": right}, "reward_funcs", "Write reward=FUNCTION"),
        ({"prompts": None, "train_dataset": ROWS}, "train_dataset", "Write prompts=ROWS"),
        ({"reward": None}, "nothing scores the prompts", "Pass reward=FUNCTION"),
        ({"reward_weights": [1, 2]}, "reward_weights", "{'target': FUNCTION, 'weight': 0.5}"),
        ({"reward": {"a": (right, 0.5)}}, "a has the type tuple", "'weight': 0.5}, for 'a'"),
        ({"reward": 3}, "the type int", "Give a function"),
        ({"reward": []}, "reward: it is empty", "Give a function, a list or a dict"),
        ({"reward": {}}, "reward: it is empty", "Give a function, a list or a dict"),
        ({"reward": None, "rewards": [right]}, "rewards: it is not an argument", "`reward`"),
        ({"reward": None, "rewrad": right}, "rewrad: it is not an argument", "`reward`"),
        ({"prompts": None}, "prompts: it is missing", "Pass prompts=ROWS"),
        ({"prompts": None, "promts": ROWS}, "promts: it is not an argument", "`prompts`"),
        ({"quite": True}, "quite: it is not an argument", "Did you mean `quiet`?"),
        ({"dryrun": True}, "dryrun: it is not an argument", "Did you mean `dry_run`?"),
        ({"changed_code": True}, "offbeat.train does not have it", "offbeat.resume"),
        ({"resume": True}, "unknown key", "`offbeat.resume(RUN)`"),
        ({"model": object()}, "model: it has the type object", "OWNER/NAME"),
        ({"args": object()}, "args: it is not a recipe key", "pass each setting as a separate argument"),
        ({"processing_class": object()}, "it is not a recipe key", "the tokenizer is the one"),
        ({"callbacks": [object()]}, "it is not a recipe key", "`run.metrics()`"),
        ({"peft_config": object()}, "it is not a recipe key", "`trainer.lora.rank`"),
        ({"output_dir": "x"}, "argument output_dir: ", "is `run_dir` here"),
        ({"temperature": 0.0}, "argument temperature: generator.sampling.temp", "Default: 1.0"),
        ({"reward": "accuracy"}, "argument reward: environment.target=accuracy", "module:name"),
        ({"environment": "gsm8k", "reward": None, "prompts": None},
         "argument environment: ", "{name: gsm8k}"),
        ({"wandb": "disabled"}, "argument wandb: ", "wandb: {mode: disabled}"),
    ],
)  # fmt: skip
def test_an_argument_that_cannot_work_names_the_one_that_does(
    train: Callable[..., Any], changed: dict[str, Any], problem: str, fix: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        train(**changed)
    assert problem in str(refused.value)
    assert fix in str(refused.value)


def test_each_call_names_the_call_that_has_an_argument() -> None:
    start: Any = offbeat.start
    with pytest.raises(ConfigError, match=r"quiet: offbeat\.start .*\n.*of offbeat\.train"):
        start(model="nowhere", steps=1, quiet=True)
    preview: Any = offbeat.preview
    with pytest.raises(ConfigError, match=r"quiet: offbeat\.preview .*\n.*of offbeat\.train"):
        preview(model="nowhere", quiet=True)


def test_a_problem_of_a_recipe_file_keeps_its_line(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("steps: 0\nmodel: {path: .}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml:1: steps = 0"):
        offbeat.train(tmp_path / "mine.yaml")


def test_a_conversation_in_the_key_prompt_is_told_its_key(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}]
    model = Path(__file__).parents[3] / "models" / "tiny-addition"
    with pytest.raises(offbeat.RunRefused) as refused:
        offbeat.train(
            model=model, prompts=rows, reward=right, steps=1, run_dir=tmp_path / "run", quiet=True
        )
    assert "a chat is read from 'messages': rename it" in str(refused.value)
    assert "data={'columns': {'prompt': COLUMN, 'answer': COLUMN}}." in str(refused.value)


def test_a_first_argument_that_is_no_recipe_names_what_to_write(tmp_path: Path) -> None:
    train: Any = offbeat.train
    with pytest.raises(ConfigError, match=r"has the type dict.*\n.*offbeat\.train\(\*\*keys\)"):
        train({"model": "nowhere"})
    (tmp_path / "config.json").touch()
    with pytest.raises(ConfigError, match=r"Give a model by name: model='"):
        train(tmp_path)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(ConfigError, match=r"Continue a run: offbeat\.resume\('"):
        train(tmp_path)


def test_a_row_that_is_no_dict_is_named_with_its_type(train: Callable[..., Any]) -> None:
    with pytest.raises(BadRows, match=r"\[0\] has the type object"):
        train(prompts=[object()])
