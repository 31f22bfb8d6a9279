"""A run on several environments: what the controller tells of each."""

from offbeat.controller.events import Committed
from offbeat.environments.prompts import MixedPrompts, StubPrompts
from offbeat.fakes.receipts import FakePrompts
from offbeat.messages.groups import Prompt
from tests.support.world import World


class Mixed(FakePrompts):
    """Prompts of two environments, three of the easy one for each of the hard one."""

    def __init__(self) -> None:
        super().__init__()
        weights = {"easy": 3, "hard": 1}
        sources = {name: StubPrompts(8, shuffle=True, seed=0, epochs=None) for name in weights}
        self.mixed = MixedPrompts(sources, weights, seed=0)

    def prompt(self, prompt_index: int) -> Prompt | None:
        return self.mixed.prompt(prompt_index)

    def environment_of(self, prompt_index: int) -> str:
        return self.mixed.place(prompt_index)[0]


def test_metrics_journal_and_summary_name_the_environment_of_each_group() -> None:
    prompts = Mixed()
    config = {"samples_per_group": 2, "groups_per_step": 4, "steps": 3}
    run = World({**config, "sampler": {"name": "in_order"}}, prompts=prompts)
    hard = [index for index in range(12) if prompts.environment_of(index) == "hard"]
    run.rollouts.forged = {index: {"rewards": (0.0, 0.0)} for index in hard}
    run.run()
    first = run.telemetry.records[0]
    assert (first["environment/easy/reward"], first["environment/hard/reward"]) == (0.5, 0.0)
    assert (first["environment/easy/share"], first["environment/hard/share"]) == (0.75, 0.25)
    assert first["environment/easy/response_tokens_mean"] == 2.0
    named = {
        event.receipt.prompt_index: event.receipt.environment for event in run.events(Committed)
    }
    assert named == {index: prompts.environment_of(index) for index in range(12)}
    summary = run.built.progress.summary("run", "finished", None)
    assert summary.reward_by_environment == {"easy": 0.5, "hard": 0.0}
