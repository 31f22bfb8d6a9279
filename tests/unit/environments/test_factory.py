import asyncio
from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.config.sections.data import DataConfig
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.config.sections.eval import EvalConfig
from offbeat.config.sections.model import ModelConfig
from offbeat.config.user_code import TargetNotFound
from offbeat.environments.built_in import Arithmetic, StubEnvironment
from offbeat.environments.factory import (
    BadEnvironment,
    make_environment,
    make_evaluation_sets,
    make_prompts,
)
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.inputs import ENVIRONMENT, InputChanged, source_digest
from offbeat.environments.killable import RewardFailed, RewardTarget
from offbeat.environments.prompt_files import PromptFileError
from offbeat.environments.protocol import Environment
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.runs.inputs import input_digests
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.environment_fakes import CharTokenizer, result, task
from tests.support.guessing import Guessing

HERE = Path(__file__).parent


def run_config(environment: dict[str, Any], data: dict[str, Any] | None = None) -> RunConfig:
    return RunConfig(
        steps=1,
        model=ModelConfig(path="model"),
        environment=EnvironmentConfig(**environment),
        data=DataConfig(**(data or {})),
    )


def made(**section: Any) -> Environment:
    return make_environment(EnvironmentConfig(**section), CharTokenizer(), HERE)


def test_arithmetic_options_span_its_prompts() -> None:
    assert make_prompts(run_config({"options": {"low": 1, "high": 4}})).rows == 9


def test_a_directory_with_compressed_prompts_is_not_read_without_them(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "1+1="}\n')
    config = run_config({"name": "function", "target": "m:f"}, {"path": str(tmp_path)})
    assert make_prompts(config).rows == 1
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b")
    with pytest.raises(PromptFileError, match=r"b\.jsonl\.gz: is compressed, .* read without it"):
        make_prompts(config)
    config = run_config({"name": "function", "target": "m:f"}, {"path": f"{tmp_path}/*.jsonl"})
    assert make_prompts(config).rows == 1


@pytest.mark.parametrize("options", [{"lo": 1}, {"low": "x"}, {"low": 5, "high": 5}])
def test_options_that_do_not_fit_are_told(options: dict[str, Any]) -> None:
    with pytest.raises(BadEnvironment, match=r"environment\.options"):
        make_prompts(run_config({"options": options}))


def test_an_option_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadEnvironment, match="name=arithmetic reads low, high"):
        make_prompts(run_config({"options": {"lo": 1}}))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "a", "gold": "5"}', None),
        ('{"prompt": "a"}', "has no 'gold'"),
        ('{"gold": 5}', "has neither of 'prompt' and 'messages'"),
        ('{"prompt": "a", "gold": " "}', "'gold' is empty"),
        ('{"prompt": "a", "gold": true}', "'gold' is True; it must be a string or a number"),
    ],
)
def test_each_row_that_math_verify_compares_with_has_an_answer(
    tmp_path: Path, row: str, problem: str | None
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row)
    section = {"name": "function", "target": "math_verify", "options": {"answer_key": "gold"}}
    config = run_config(section, {"path": str(rows)})
    if problem is None:
        assert make_prompts(config).rows == 1
    else:
        with pytest.raises(PromptFileError, match=problem):
            make_prompts(config)


def test_a_file_is_read_for_any_environment(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    for name in ("stub", "function", "custom", "arithmetic"):
        config = run_config({"name": name}, {"path": str(rows), "epochs": 1})
        source = make_prompts(config)
        assert source.rows == 2
        assert source.prompt(2) is None


def test_a_function_reward_needs_a_file_and_says_so() -> None:
    with pytest.raises(
        BadEnvironment, match=r"data\.path: environment 'function' makes no prompts"
    ):
        make_prompts(run_config({"name": "function", "target": "m:f"}))


def test_the_stub_has_endless_prompts_and_needs_no_tokenizer() -> None:
    prompt = make_prompts(run_config({"name": "stub"})).prompt(10**6)
    environment = make_environment(EnvironmentConfig(name="stub"), None, HERE)
    assert isinstance(environment, StubEnvironment)
    assert prompt is not None
    assert environment.encode(prompt) == environment.encode(prompt) != ()


def test_each_name_makes_its_environment() -> None:
    assert isinstance(made(), Arithmetic)
    assert isinstance(made(name="function", target="user_rewards:length"), FunctionReward)
    assert isinstance(made(name="custom", target="tests.support.guessing:Guessing"), Guessing)


def test_what_an_environment_lacks_is_told() -> None:
    with pytest.raises(BadEnvironment, match="'function' needs it; name module:name"):
        made(name="function")
    with pytest.raises(BadEnvironment, match="needs a tokenizer"):
        make_environment(EnvironmentConfig(), None, HERE)
    with pytest.raises(BadEnvironment, match="makes a str; subclass SingleTurn or MultiTurn"):
        made(name="custom", target="builtins:repr")
    with pytest.raises(TargetNotFound, match="no module absent from"):
        made(name="custom", target="absent:Absent")


def scored(environment: Environment, text: str, row: dict[str, Any] | None = None) -> list[Any]:
    assert isinstance(environment, FunctionReward)
    of = task(row or {"prompt": "?"})

    async def score() -> list[Any]:
        await environment.start()
        try:
            rewards = await environment.score(of, result("r", [text, "ok"]))
            return [each.reward for each in rewards]
        finally:
            await environment.close()

    return asyncio.run(score())


def test_a_function_is_given_the_text_without_the_stop_token() -> None:
    environment = made(name="function", target="user_rewards:length", options={"scale": 0.5})
    assert scored(environment, "abc") == [1.5, 1.0]


def test_a_function_is_given_the_special_tokens_that_are_trained() -> None:
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    section = EnvironmentConfig(name="function", target="user_rewards:thought_in_tags")
    environment = make_environment(section, tokenizer, HERE)
    drawn = "".join(map(chr, tokenizer.encode("<think>2+2 is 4</think>5")))
    assert scored(environment, drawn) == [1.0, 0.0]


def test_a_grader_is_given_the_answer_that_the_prompt_has_begun() -> None:
    target = RewardTarget("user_rewards:whole", HERE, {}, 2048, 20.0, 120.0)
    grader = FunctionReward(CharTokenizer(), target, 1, ignores_thinking=True)
    begun = "<think>so "
    messages = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": begun}]
    assert scored(grader, "3", {"messages": messages}) == [len(f"{begun}3"), len(f"{begun}ok")]


def test_a_failed_reward_fails_the_group_as_data() -> None:
    with pytest.raises(RolloutFailed) as caught:
        scored(made(name="function", target="user_rewards:raises"), "bad")
    error = caught.value
    assert (error.kind, error.reason) == (FailureKind.DATA, "reward_raised")
    assert (error.prompt_index, error.attempt) == (7, 1)


def test_a_function_that_cannot_be_imported_is_told_when_the_worker_starts() -> None:
    with pytest.raises(RewardFailed, match="reward_import_failed"):
        scored(made(name="function", target="broken_rewards:reward"), "a")


def test_a_function_that_stops_being_importable_ends_the_run(tmp_path: Path) -> None:
    module = tmp_path / "fragile_rewards.py"
    module.write_text("import os\ndef reward(prompt, response): os._exit(1)\n")
    target = RewardTarget("fragile_rewards:reward", tmp_path, {}, 2048, 20.0, 120.0)

    async def scenario() -> list[tuple[FailureKind, str]]:
        environment = FunctionReward(CharTokenizer(), target, workers=1)
        await environment.start()
        module.write_text("raise ImportError\n")
        told = list[tuple[FailureKind, str]]()
        try:
            for _ in range(2):
                with pytest.raises(RolloutFailed) as caught:
                    await environment.score(task({}), result("r", ["a"]))
                told.append((caught.value.kind, caught.value.reason))
        finally:
            await environment.close()
        return told

    assert asyncio.run(scenario()) == [
        (FailureKind.DATA, "reward_process_died"),
        (FailureKind.BUG, "reward_import_failed"),
    ]


# --- what the run began with ---------------------------------------------------------------------


def test_prompts_that_are_not_those_the_run_began_with_are_refused(tmp_path: Path) -> None:
    rows, held = tmp_path / "rows.jsonl", tmp_path / "held.jsonl"
    rows.write_text('{"prompt": "1+1="}\n')
    held.write_text('{"prompt": "2+2="}\n')
    config = run_config({}, {"path": str(rows)})
    config = config.model_copy(update={"eval": EvalConfig(interval=1, path=str(held))})
    began_with = input_digests(config, tmp_path)
    assert make_prompts(config, began_with).rows == 1
    assert make_evaluation_sets(config, began_with)
    rows.write_text('{"prompt": "3+3="}\n')
    held.write_text('{"prompt": "4+4="}\n')
    with pytest.raises(
        InputChanged, match=r"^data\.path=.*rows\.jsonl changed after the run began"
    ):
        make_prompts(config, began_with)
    with pytest.raises(InputChanged, match=r"^eval\.path="):
        make_evaluation_sets(config, began_with)
    assert make_prompts(config, {}).rows == 1, "nothing was known"


def test_an_environment_that_is_not_the_one_the_run_began_with_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine_changed.py").write_text("from tests.support.guessing import Guessing")
    section = EnvironmentConfig(name="custom", target="mine_changed:Guessing")
    began_with = {ENVIRONMENT: source_digest("mine_changed:Guessing", tmp_path) or ""}
    assert make_environment(section, CharTokenizer(), tmp_path, began_with)
    (tmp_path / "mine_changed.py").write_text("Guessing = 1")
    with pytest.raises(InputChanged, match=r"environment\.target=mine_changed:Guessing"):
        make_environment(section, CharTokenizer(), tmp_path, began_with)


def test_a_reward_process_that_is_replaced_does_not_take_up_edited_code(tmp_path: Path) -> None:
    source = tmp_path / "mine_edited.py"
    source.write_text("import os\n\ndef reward(prompt, response):\n    os._exit(3)\n")
    section = EnvironmentConfig(name="function", target="mine_edited:reward")
    began_with = {ENVIRONMENT: source_digest("mine_edited:reward", tmp_path) or ""}

    async def scored_twice() -> list[RolloutFailed]:
        environment = make_environment(section, CharTokenizer(), tmp_path, began_with)
        assert isinstance(environment, FunctionReward)
        await environment.start()
        failures = list[RolloutFailed]()
        for _ in range(2):
            source.write_text("def reward(prompt, response):\n    return 1.0\n")
            with pytest.raises(RolloutFailed) as caught:
                await environment.score(task(), result("r", ["a", "b"]))
            failures.append(caught.value)
        await environment.close()
        return failures

    died, edited = asyncio.run(scored_twice())
    assert died.reason == "reward_process_died"
    assert (edited.kind, edited.reason) == (FailureKind.BUG, "reward_import_failed")
    assert "environment.target=mine_edited:reward changed after the run began" in edited.detail


def test_the_digest_of_source_covers_what_it_imports_beside_it_and_not_where_it_is(
    tmp_path: Path,
) -> None:
    def digest(folder: str, inner: str = "x = 1") -> str | None:
        package = tmp_path / folder / "mine"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text("")
        (package / "reward.py").write_text("import json\nfrom . import near\n")
        (package / "near.py").write_text("def f():\n    from mine.far import x\n")
        (package / "far.py").write_text(inner)
        (package / "unused.py").write_text(folder)
        return source_digest("mine.reward:f", tmp_path / folder)

    assert digest("a") == digest("b") is not None
    assert digest("a") != digest("b", "x = 2")
    assert source_digest("no_such_module_at_all:f", tmp_path) is None


def test_a_reward_that_imports_for_too_long_names_the_key(tmp_path: Path) -> None:
    (tmp_path / "mine_slow.py").write_text("import time\ntime.sleep(60)\n")
    section = EnvironmentConfig(name="function", target="mine_slow:reward", reward_start_s=0.2)
    environment = make_environment(section, CharTokenizer(), tmp_path)
    with pytest.raises(RewardFailed, match=r"took longer than environment\.reward_start_s=0\.2"):
        asyncio.run(environment.start())


def test_an_evaluation_without_a_file_of_its_own_scores_each_row_once() -> None:
    config = run_config({"options": {"low": 1, "high": 4}})
    config = config.model_copy(update={"eval": EvalConfig(interval=1)})
    prompts = make_evaluation_sets(config)[""]
    drawn = [prompts.prompt(number) for number in range(64)]
    assert len({prompt.row for prompt in drawn if prompt is not None}) == 9
    assert drawn[9:] == [None] * 55


def test_each_evaluation_set_has_its_own_file_that_must_not_change(tmp_path: Path) -> None:
    for name, rows in (
        ("math", '{"problem": "1+1="}'),
        ("code", '{"prompt": "a"}\n{"prompt": "b"}'),
    ):
        (tmp_path / f"{name}.jsonl").write_text(rows)
    math = {"path": str(tmp_path / "math.jsonl"), "columns": {"prompt": "problem"}}
    sets = {"math": math, "code": {"path": str(tmp_path / "code.jsonl")}}
    config = run_config({"name": "function", "target": "m:f"})
    evaluation = EvalConfig.model_validate({"interval": 1, "sets": sets})
    config = config.model_copy(update={"eval": evaluation})
    began_with = input_digests(config, tmp_path)
    assert began_with.keys() >= {"eval.sets.math.path", "eval.sets.code.path"}
    sources = make_evaluation_sets(config, began_with)
    assert {name: source.rows for name, source in sources.items()} == {"math": 1, "code": 2}
    (tmp_path / "code.jsonl").write_text('{"prompt": "c"}')
    with pytest.raises(InputChanged, match=r"^eval\.sets\.code\.path="):
        make_evaluation_sets(config, began_with)
