"""What ``offbeat check`` says of an agent."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config.run import RunConfig
from offbeat.launch.checks.user_code import check_targets
from offbeat.launch.dry_run import dry
from offbeat.messages.finding import Finding, Level
from offbeat.plugins.agents.checks import check_agent
from tests.support.agent_endpoint import CHATML, NO_END_TOKENS
from tests.support.byte_tokenizer import byte_tokenizer


def recipe(model: Path, episodes_per_child: int = 8, **own: Any) -> RunConfig:
    agent = {
        **own,
        "name": "agent",
        "target": "a:b",
        "episodes_per_child": episodes_per_child,
        "variables": ["K"],
    }
    return RunConfig.model_validate(
        {
            "steps": 1,
            "model": {"path": str(model)},
            "environment": agent,
            "data": {"path": "tasks.jsonl"},
            "samples_per_group": 8,
            "rollout": {"min_valid_samples": 3},
        }
    )


def findings(model: Path, chat_template: str | None, episodes_per_child: int = 8) -> list[Finding]:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(model)
    return list(check_agent(recipe(model, episodes_per_child)))


def test_without_a_chat_template_no_conversation_can_be_encoded(tmp_path: Path) -> None:
    (found,) = findings(tmp_path, None)
    assert found.level is Level.ERROR and "needs a tokenizer with a chat template" in found.message


REFUSED = "so requests with tools are refused"


@pytest.mark.parametrize(
    ("shows", "said"), [(CHATML, ""), (NO_END_TOKENS, f"; it shows no tools, {REFUSED}")]
)
def test_what_joins_turns_is_named_and_whether_the_model_sees_tools(
    tmp_path: Path, shows: str, said: str
) -> None:
    found = findings(tmp_path, shows)[0]
    assert found.level is Level.OK
    path = f"the chat template of {tmp_path}"
    assert found.message == f"turns are joined by {path}, as no environment.renderer is named{said}"


def test_fewer_episodes_at_once_than_samples_are_told(tmp_path: Path) -> None:
    found = findings(tmp_path, CHATML, episodes_per_child=1)[-1]
    assert found.level is Level.WARNING
    assert "1 episodes run at once; a group has 8" in found.message
    assert findings(tmp_path, CHATML)[-1].level is Level.OK


def test_an_agents_recipe_can_be_dried(tmp_path: Path) -> None:
    dried = dry(recipe(tmp_path, renderer={"name": "qwen3"}))
    assert (dried.environment.name, dried.environment.variables) == ("stub", ())
    assert dried.environment.renderer == {}
    assert (dried.rollout.on_failed_sample, dried.rollout.min_valid_samples) == ("retry", 3)


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("def run(task, client): ...", "is not async: write async def run(task, client)"),
        (
            "async def run(task): ...",
            "takes 1 positional argument; an agent gets a task and a client",
        ),
        (
            "async def run(task, client, *, tool): ...",
            "needs 'tool': add it to its options; an agent gets a task and a client",
        ),
        ("async def run(task, client, tool, depth=1): ...", "needs 'tool'"),
        ("run = 5", "has no 'run' that can be called, but a int"),
    ],
)
def test_an_agent_that_cannot_be_called_is_refused_before_a_run(
    tmp_path: Path, code: str, problem: str
) -> None:
    (tmp_path / "lone_agent.py").write_text(code)
    config = recipe(tmp_path)
    config = config.model_copy(
        update={"environment": config.environment.model_copy(update={"target": "lone_agent:run"})}
    )
    (found,) = check_targets(config, tmp_path)
    assert found.level is Level.ERROR and problem in found.message


def test_options_give_an_agent_the_arguments_that_have_no_default(tmp_path: Path) -> None:
    (tmp_path / "lone_agent.py").write_text("async def run(task, client, *, tool): ...")
    config = recipe(tmp_path)
    given = {"target": "lone_agent:run", "options": {"tool": "search"}}
    config = config.model_copy(update={"environment": config.environment.model_copy(update=given)})
    (found,) = check_targets(config, tmp_path)
    assert found.level is Level.OK
