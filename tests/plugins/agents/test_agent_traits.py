"""The agent among the environments: where lists show it, and how the core reads its traits."""

from offbeat.config.environment_traits import known_environments
from offbeat.config.loader import load_recipe
from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.environment_plugin import find_environment
from offbeat.environments.row_checks import row_check

RECIPE = ("steps=2", "model.path=tiny", "environment.name=agent", "data.path=tasks.jsonl")
FUNCTION = "environment.target=agents:play"


def test_lists_of_environments_show_agents_between_the_code_of_a_user_and_demonstrations() -> None:
    names = list(known_environments())
    place = names.index("agent")
    assert (names[place - 1], names[place + 1]) == ("custom", "demonstrations")


def test_an_agent_of_a_recipe_plays_episodes_and_gets_no_rendered_messages() -> None:
    plugin = find_environment("agent")
    assert plugin is not None
    assert plugin.traits.is_agent and not plugin.traits.renders_messages


def test_a_task_may_have_any_keys() -> None:
    task = {"image": 5}
    assert row_check(EnvironmentConfig(name="agent", target="agents:play"))(task) is None
    assert row_check(EnvironmentConfig(name="function", target="rewards:score"))(task) is not None


def test_one_episode_of_a_program_per_process_is_accepted() -> None:
    command = ["environment.command=[play]", "environment.episodes_per_child=1"]
    assert load_recipe(None, [*RECIPE, *command]).config.environment.command == ("play",)
