"""Environments of verifiers. Skipped without the library: ``make test-verifiers``."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_prompts
from offbeat.environments.inputs import DATA, InputChanged
from offbeat.environments.prompt_files import FilePrompts, PromptFileError
from offbeat.messages.failures import FailureKind, RolloutFailed
from offbeat.messages.finding import Level
from offbeat.messages.generation import SamplingParams
from offbeat.messages.groups import Prompt, Receipt, RolloutTask
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.session import SessionLimits
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.agents.factory import make_agent
from offbeat.plugins.task_libraries.checks import check_verifiers
from offbeat.rollouts.calls import EngineClient
from offbeat.rollouts.columns import Columns
from offbeat.rollouts.samples import SampleFailurePolicy
from offbeat.transfer_queue import schema
from tests.support.agent_endpoint import END, DrawnBytes, qwen_byte_tokenizer

pytest.importorskip("verifiers", reason="the extra verifiers is not installed")

pytestmark = [pytest.mark.environments, pytest.mark.filterwarnings("default")]

HERE = Path(__file__).parent
CALL = '<tool_call>\n{"name": "add",  "arguments": {"a":2, "b": 3}}\n</tool_call><|im_end|>'
"""Two spaces and none where JSON is written anew with one: encoded again it would be other tokens."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    qwen_byte_tokenizer().save_pretrained(directory)
    return directory


def recipe(model: Path, *, renderer: str = "qwen3", **env: Any) -> RunConfig:
    env = {"taskset": {"id": "vf_sums"}} | env
    section = {
        "name": "verifiers",
        "options": {"env": env},
        "renderer": {"name": renderer},
        "reward_memory_mib": 16_000,
    }
    recipe = {"steps": 1, "model": {"path": str(model)}, "environment": section}
    return RunConfig.model_validate(recipe | {"data": {"shuffle": False}})


def prompts(model: Path, began_with: Mapping[str, str] | None = None, **env: Any) -> FilePrompts:
    made = make_prompts(recipe(model, **env), began_with or {}, HERE)
    assert isinstance(made, FilePrompts)
    return made


def play(
    model: Path, *script: str, answer: str = "5", **env: Any
) -> tuple[Receipt, Columns, DrawnBytes]:
    config = recipe(model, **env)
    template = TokenizerTemplate(PreTrainedTokenizerFast.from_pretrained(model))
    engine = DrawnBytes(list(script), encode=template.encode)
    prompt = Prompt(0, 0, 0, {"idx": 0, "prompt": "2+3?", "answer": answer})

    async def main() -> tuple[Receipt, Columns]:
        agent = make_agent(config.environment, HERE, model_path=config.model.path)
        bridge = TemplateBridge(template, template.end_texts((END,)))
        groups = AgentGroups(agent, bridge, SessionLimits())
        await groups.start()
        try:
            task = RolloutTask(prompt, 1, 1, "engine-0", 3, 60.0)
            client = EngineClient(task, engine.generate, SamplingParams(max_new_tokens=400), 4000)
            return await groups.run_group(client, SampleFailurePolicy("fail_group"))
        finally:
            await groups.close()

    return *asyncio.run(main()), engine


def test_an_episode_with_a_tool_is_trained_on_the_tokens_that_were_drawn(model: Path) -> None:
    receipt, columns, engine = play(model, CALL, "It is 5.<|im_end|>")
    (_, first, first_logprobs), (request, second, second_logprobs) = engine.calls
    whole = [*columns[schema.PROMPT_IDS].tolist(), *columns[schema.RESPONSE_IDS].tolist()]
    assert whole == [*request.prompt_ids, *second]
    mask = columns[schema.LOSS_MASK]
    assert columns[schema.RESPONSE_IDS][mask].tolist() == [*first, *second]
    logprobs = columns[schema.GENERATION_LOGPROBS][mask].tolist()
    assert logprobs == [*first_logprobs, *second_logprobs]
    assert (receipt.rewards, receipt.turns, receipt.answers) == ((0.5,), (2,), ())
    assert receipt.rewards_by_name == (("answers", (2.0,)), ("right", (1.0,)))


def test_a_harness_that_edits_the_history_opens_a_branch_and_each_token_is_trained_once(
    model: Path,
) -> None:
    edits = {"harness": {"id": "vf_sums", "edits_history": True}}
    receipt, columns, engine = play(model, CALL, "It is 5.<|im_end|>", agent=edits)
    drawn = [token for _, said, _ in engine.calls for token in said]
    assert columns[schema.RESPONSE_IDS][columns[schema.LOSS_MASK]].tolist() == drawn
    assert receipt.branches == (2,)


def test_an_error_of_a_reward_is_no_reward(model: Path) -> None:
    with pytest.raises(RolloutFailed) as caught:
        play(model, "It is 5.<|im_end|>", answer="broken")
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, "verifiers_failed")
    assert "no such answer" in str(caught.value)


def test_the_tasks_are_the_prompts_and_others_do_not_continue_a_run(model: Path) -> None:
    tasks = prompts(model)
    assert tasks.rows == 3
    found = tasks.prompt(1)
    assert found is not None
    assert (found.data["prompt"], found.data["answer"]) == ("4+4?", "8")
    assert prompts(model, {DATA: tasks.digest}).digest == tasks.digest
    with pytest.raises(InputChanged, match="tasks of vf_sums"):
        prompts(model, {DATA: "another"})


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"agent": {"sampling": {"temperature": 0.5}}}, "sampling sets temperature"),
        ({"agent": {"retries": {"max_retries": 2}}}, "rollout.sample_retries"),
        ({"agent": {"model": "gpt"}}, "names a separate model or client"),
        ({"id": "user-sim"}, "it has 2 roles"),
        ({"taskset": {"id": "no_such_taskset"}}, "no_such_taskset"),
    ],
)
def test_what_could_not_be_trained_as_it_was_drawn_is_refused_by_name(
    model: Path, env: dict[str, Any], problem: str
) -> None:
    with pytest.raises(PromptFileError, match=problem):
        prompts(model, **env)


def test_check_names_the_renderer_and_warns_of_one_that_takes_no_tools(model: Path) -> None:
    (found,) = check_verifiers(recipe(model), HERE)
    assert (found.level, found.message) == (Level.OK, "messages are rendered by Qwen3Renderer")
    (found,) = check_verifiers(recipe(model, renderer="default"), HERE)
    assert found.level is Level.WARNING
