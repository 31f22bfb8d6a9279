"""The Ray actor that runs episodes: many groups at once on one event loop."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from offbeat.actors.call import RemoteBug, first_line, reply_of
from offbeat.actors.environment_worker.group import run_group
from offbeat.actors.fence_guard import FenceGuard
from offbeat.actors.generators.errors import EngineUnavailable, InvalidRequest
from offbeat.actors.process import prepare
from offbeat.config.run import RunConfig
from offbeat.environments.factory import make_environment
from offbeat.environments.text import Tokenizer
from offbeat.messages.failures import ActorLost, FailureKind, RolloutFailed
from offbeat.messages.fences import Fence
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.messages.groups import Receipt, RolloutTask


@dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Everything a worker is made from; picklable, so that a restart makes the same one."""

    name: str
    config: RunConfig
    model_path: str
    working_dir: str  # user reward code is imported from here
    engines: Mapping[str, str]  # actor names; a handle would not survive the driver's object store


class EnvironmentActor:
    """One environment worker. An async actor."""

    def __init__(self, spec: EnvironmentSpec) -> None:
        prepare()
        self._spec = spec
        self._engines = {name: ray.get_actor(actor) for name, actor in spec.engines.items()}
        self._guard = FenceGuard(spec.name)
        sampling = spec.config.generator.sampling
        self._sampling = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_new_tokens=sampling.max_new_tokens,
            stop_token_ids=sampling.stop_token_ids,
        )
        self._environment = make_environment(
            spec.config.environment, _tokenizer(spec), Path(spec.working_dir)
        )
        self._started: asyncio.Task[None] | None = None

    @ray.method(num_returns=2)
    async def rollout(self, fence: Fence, task: RolloutTask) -> tuple[Receipt, dict[str, Any]]:
        """One finished group: its receipt for the controller, its columns for the trainer.

        Raises:
            RolloutFailed: Classified, here where it happened.
        """
        self._guard.check(fence)

        async def generate(request: GenerateRequest) -> GenerateResult:
            ref = self._engines[task.engine].generate.remote(request)
            return await reply_of(ref, task.engine, "generate")

        config = self._spec.config
        try:
            await self._start_once()
            return await run_group(
                task,
                self._environment,
                generate,
                self._sampling,
                max_turns=config.environment.max_turns,
                max_model_len=config.generator.max_model_len,
            )
        except RolloutFailed:
            raise
        except Exception as error:  # classified where it happened, before it crosses
            raise classified(error, task) from error

    async def close(self) -> None:
        await self._environment.close()

    async def _start_once(self) -> None:
        if self._started is None:
            self._started = asyncio.ensure_future(self._environment.start())
        await asyncio.shield(self._started)


def _tokenizer(spec: EnvironmentSpec) -> Tokenizer | None:
    """The model's tokenizer; a stub environment works without any, and without its import."""
    if spec.config.environment.name == "stub":
        return None
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, for what a stub never uses

    return AutoTokenizer.from_pretrained(
        spec.model_path,
        local_files_only=True,
        trust_remote_code=spec.config.model.trust_remote_code,
    )


def classified(error: Exception, task: RolloutTask) -> RolloutFailed:
    """What an error of a rollout says about trying again. Unknown is a bug."""
    match error:
        case ActorLost():
            kind, reason = FailureKind.INFRASTRUCTURE, "engine_lost"
        case EngineUnavailable():
            kind, reason = FailureKind.INFRASTRUCTURE, "engine_unavailable"
        case InvalidRequest():
            kind, reason = FailureKind.DATA, "invalid_request"
        case RemoteBug():
            kind, reason = FailureKind.BUG, "engine_raised"
        case _:
            kind, reason = FailureKind.BUG, type(error).__name__
    return RolloutFailed(kind, task.ordinal, task.attempt, reason, first_line(error))
