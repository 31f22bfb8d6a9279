"""The example of a judge, in a reward process, against a server on this machine."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.factory import make_environment
from offbeat.environments.function_reward import FunctionReward
from offbeat.environments.protocol import EnvironmentUnavailable
from offbeat.messages.failures import FailureKind, RolloutFailed
from tests.support.environment_fakes import CharTokenizer, result, task

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "rewards"
HANGS = "hangs"


class Provider:
    """An OpenAI-compatible server that answers with the next of a script, then with the last."""

    def __init__(self, *script: int | str) -> None:
        self._script = list(script)
        self.asked = list[str]()

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body["messages"][-1]["content"])
        outcome = self._script.pop(0) if len(self._script) > 1 else self._script[0]
        if outcome == HANGS:
            await asyncio.Event().wait()
        if isinstance(outcome, int):
            return web.Response(status=outcome, headers={"Retry-After": "0"})
        message = {"role": "assistant", "content": outcome}
        return web.Response(text=json.dumps({"choices": [{"message": message}]}),
                            content_type="application/json")  # fmt: skip


@asynccontextmanager
async def served(provider: Provider) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/chat/completions", provider.answer)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def graded(provider: Provider, *responses: str, **section: Any) -> list[Any]:
    async def story() -> list[Any]:
        async with served(provider) as url:
            options = {"url": url, "model": "m"}
            named = {"name": "function", "target": "judge:reward", "options": options}
            config = EnvironmentConfig.model_validate(
                {"reward_deadline_s": 60.0, **named, **section}
            )
            environment = make_environment(config, CharTokenizer(), EXAMPLES)
            assert isinstance(environment, FunctionReward)
            await environment.start()
            try:
                asked = task({"prompt": "3+4="}, samples=len(responses))
                rewards = await environment.score(asked, result("r", responses))
                return [each.reward for each in rewards]
            finally:
                await environment.close()

    return asyncio.run(story())


def test_a_judge_that_fails_and_refuses_is_asked_again_and_its_grade_is_the_reward() -> None:
    provider = Provider(503, 429, "It is right.\nGRADE: 10")
    assert graded(provider, "7", reward_retries=2) == [1.0]
    assert len(provider.asked) == 3
    assert "3+4=" in provider.asked[-1]
    assert "<answer>\n7\n</answer>" in provider.asked[-1]


def test_a_judge_that_stays_down_makes_the_environment_unavailable() -> None:
    with pytest.raises(EnvironmentUnavailable, match="the judge answers 503"):
        graded(Provider(503), "7", "8")


def test_a_judge_that_never_answers_makes_it_so_too_before_its_process_is_killed() -> None:
    with pytest.raises(EnvironmentUnavailable, match=r"no reward within 0\.9 s"):
        graded(Provider(HANGS), "7", reward_deadline_s=1.0)


@pytest.mark.parametrize("verdict", ["very good", "GRADE: 11"])
def test_a_verdict_without_a_grade_is_a_failure_by_name_and_never_a_reward_of_0(
    verdict: str,
) -> None:
    with pytest.raises(RolloutFailed) as caught:
        graded(Provider(verdict), "7")
    assert (caught.value.kind, caught.value.reason) == (FailureKind.DATA, "reward_raised")
    assert "the judge gave no grade from 0 to 10" in caught.value.detail
