"""Environment workers whose engine is a function of this process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offbeat.config.run import RunConfig
from offbeat.environments.protocol import Environment
from offbeat.messages.generation import GenerateRequest, GenerateResult
from offbeat.rollouts.calls import Generate
from offbeat.rollouts.response_text import TextlessTokens
from offbeat.rollouts.worker import EnvironmentSpec, EnvironmentWorker, GenerateOn
from offbeat.run_files.sharing import WriteLocation
from tests.support.environment_fakes import CharTokenizer, answers

CONFIG = RunConfig.model_validate(
    {"steps": 1, "model": {"path": "none"}, "environment": {"name": "stub"}}
)


def only(generate: Generate) -> GenerateOn:
    """The one engine of a worker."""

    async def generate_on(engine: str, request: GenerateRequest) -> GenerateResult:
        assert engine == "engine-0"
        return await generate(request)

    return generate_on


class WorkerOf(EnvironmentWorker):
    """A worker of an environment made by the test."""

    def __init__(
        self,
        run_dir: Path,
        environment: Environment,
        tokenizer: CharTokenizer | None = None,
        generate: GenerateOn | None = None,
        **options: Any,
    ) -> None:
        spec = EnvironmentSpec("environment-0", CONFIG, str(run_dir), str(run_dir))
        generate = generate or only(answers("7", "hang"))
        super().__init__(spec, WriteLocation(run_dir), generate, **options)
        textless = TextlessTokens(tokenizer) if tokenizer else None
        self._environments = {
            name: replace(runner, environment=environment, tokenizer=tokenizer, textless=textless)
            for name, runner in self._environments.items()
        }
