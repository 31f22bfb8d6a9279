"""OpenAI's own client against the endpoint. Skipped where it is not installed: ``make test-agents``."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import SampleSession, SessionLimits
from tests.support.agent_endpoint import DrawnBytes, encode, session, trained_tokens

openai = pytest.importorskip("openai", reason="the extra agents is not installed")
httpx2 = pytest.importorskip("httpx2")

pytestmark = pytest.mark.agents

ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {}, "b": {}}},
    },
}
CALL = '<tool_call>{"name": "add",  "arguments": {"a": 2, "b":3}}</tool_call><|im_end|>'


def play(
    story: Callable[[AgentEndpoint, SampleSession, str], Awaitable[None]],
    *script: str,
    **settings: Any,
) -> None:
    async def main() -> None:
        endpoint = AgentEndpoint("policy")
        await endpoint.start()
        try:
            on = session(DrawnBytes(list(script)), **settings)
            await story(endpoint, on, endpoint.open(on))
        finally:
            await endpoint.close()

    asyncio.run(main())


def sampled_tokens(on: SampleSession) -> list[int]:
    """Tokens that are trained, over all branches."""
    return [token for branch in on.finish() for token in trained_tokens(branch)]


def test_the_sync_client_plays_a_conversation_with_a_tool_as_one_branch() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        def agent() -> str:
            messages: list[Any] = [{"role": "user", "content": "2+3?"}]
            with openai.OpenAI(base_url=endpoint.base_url, api_key=key) as client:
                for _ in range(2):
                    answer = client.chat.completions.create(
                        model="policy", messages=messages, tools=[ADD]
                    )
                    said = answer.choices[0].message
                    messages.append(said.model_dump())
                    messages += [
                        {"role": "tool", "tool_call_id": call.id, "content": "5"}
                        for call in said.tool_calls or ()
                    ]
            return said.content

        assert await asyncio.to_thread(agent) == "It is  5."
        assert len(on.turns) == 2
        assert on.turns[1].parent is on.turns[0]
        assert sampled_tokens(on) == encode(CALL + "It is  5.<|im_end|>")

    play(story, CALL, "It is  5.<|im_end|>")


def test_the_async_client_reads_streams_with_content_tools_and_usage() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        content, arguments, usage = "", "", None
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
            stream = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "2+3?"}],
                tools=[ADD],
                stream=True,
                stream_options={"include_usage": True},
            )
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    content += choice.delta.content or ""
                    for call in choice.delta.tool_calls or ():
                        arguments += call.function.arguments
        assert (content, arguments) == ("Let me see", '{"a":2,"b":3}')
        assert usage is not None
        assert usage.completion_tokens == len(sampled_tokens(on))

    play(story, "Let me see\n" + CALL)


def test_what_vllm_adds_to_answers_arrives_in_the_clients_extra_fields() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        async with openai.AsyncOpenAI(base_url=endpoint.base_url, api_key=key) as client:
            answer = await client.chat.completions.create(
                model="policy",
                messages=[{"role": "user", "content": "hi"}],
                logprobs=True,
                stop=["Observation:"],
                extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True},
            )
            (model,) = [each async for each in client.models.list()]
        choice = answer.choices[0]
        assert choice.message.content == "so "
        assert choice.model_extra["token_ids"] == encode("so Observation:")
        assert tuple(answer.model_extra["prompt_token_ids"]) == on.turns[0].prompt.token_ids
        tokens = [each.token for each in choice.logprobs.content]
        assert tokens == [f"token_id:{id_}" for id_ in encode("so Observation:")]
        assert model.model_extra["max_model_len"] == 100_000

    play(story, "so Observation: 5")


def test_refusals_are_the_clients_own_errors() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        async def refused(content: str, api_key: str, **changes: Any) -> Any:
            asked: Any = {"model": "policy", **changes}
            asked["messages"] = [{"role": "user", "content": content}]
            async with openai.AsyncOpenAI(
                base_url=endpoint.base_url, api_key=api_key, max_retries=0
            ) as client:
                with pytest.raises(openai.APIStatusError) as error:
                    await client.chat.completions.create(**asked)
            return error.value

        for content, api_key, changes, kind, code in (
            ("hi", "wrong", {}, openai.AuthenticationError, "invalid_api_key"),
            ("x" * 5000, key, {}, openai.BadRequestError, "context_length_exceeded"),
            ("hi", key, {"temperature": 0.5}, openai.BadRequestError, "unsupported_value"),
            ("hi", key, {"model": "gpt"}, openai.NotFoundError, "model_not_found"),
        ):
            error = await refused(content, api_key, **changes)
            assert (type(error), error.code) == (kind, code)
        assert on.turns == []

    play(story, max_model_len=1000)


def test_a_limit_of_the_sample_is_a_rate_limit() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        async with openai.AsyncOpenAI(
            base_url=endpoint.base_url, api_key=key, max_retries=0
        ) as client:
            asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}
            await client.chat.completions.create(**asked)
            with pytest.raises(openai.RateLimitError) as error:
                await client.chat.completions.create(**asked)
        assert error.value.code == "max_requests"

    play(story, limits=SessionLimits(max_requests=1))


def test_the_client_speaks_over_the_unix_socket() -> None:
    async def story(endpoint: AgentEndpoint, on: SampleSession, key: str) -> None:
        transport = httpx2.AsyncHTTPTransport(uds=str(endpoint.socket_path))
        async with openai.AsyncOpenAI(
            base_url="http://endpoint/v1",
            api_key=key,
            http_client=httpx2.AsyncClient(transport=transport),
        ) as client:
            answer = await client.chat.completions.create(
                model="policy", messages=[{"role": "user", "content": "hi"}]
            )
        assert answer.choices[0].message.content == "hello"

    play(story, "hello<|im_end|>")
