"""The endpoint over HTTP: what agents get, what is refused by name, and what attackers cannot do."""

import asyncio
import contextlib
import io
import json
import socket
import stat
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import aiohttp
import pytest
from yarl import URL

from offbeat.messages.failures import EngineUnavailable, InvalidRequest
from offbeat.messages.generation import GenerateRequest, GenerateResult, SamplingParams
from offbeat.models.media_rules import MediaTokens
from offbeat.plugins.agents.endpoint.errors import RequestRefused
from offbeat.plugins.agents.endpoint.requests import reading_body
from offbeat.plugins.agents.endpoint.server import AgentEndpoint
from offbeat.plugins.agents.endpoint.session import SampleSession, SessionLimits
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.plugins.images.errors import STRAY_TOKEN
from tests.support.agent_endpoint import CHATML, DrawnBytes, encode, session, template

HELLO = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@dataclass(slots=True)
class Client:
    """An agent that has been given a URL and a key."""

    endpoint: AgentEndpoint
    session: SampleSession
    key: str
    http: aiohttp.ClientSession

    async def post(
        self,
        body: Any,
        path: str = "/v1/chat/completions",
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Authorization": f"Bearer {self.key if key is None else key}", **(headers or {})}
        root = self.endpoint.base_url.removesuffix("/v1")
        async with self.http.post(root + path, data=io.BytesIO(content), headers=sent) as response:
            text = await response.text()
            is_stream = response.content_type == "text/event-stream"
            return response.status, text if is_stream else json.loads(text)

    async def refused(self, body: Any, *args: Any, **kwargs: Any) -> tuple[int, str]:
        status, answer = await self.post(body, *args, **kwargs)
        assert set(answer) == {"error"}
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return status, answer["error"]["code"]


@asynccontextmanager
async def serving(
    engine: Any, *, io_deadline_s: float = 60.0, head_deadline_s: float = 60.0, **settings: Any
) -> AsyncIterator[Client]:
    endpoint = AgentEndpoint("policy", io_deadline_s=io_deadline_s, head_deadline_s=head_deadline_s)
    await endpoint.start()
    on = session(engine, **settings)
    connector = aiohttp.TCPConnector(limit=100)
    async with aiohttp.ClientSession(connector=connector) as http:
        try:
            yield Client(endpoint, on, endpoint.open(on), http)
        finally:
            await endpoint.close()


def play(story: Callable[[Client], Awaitable[None]], engine: Any = None, **settings: Any) -> None:
    async def main() -> None:
        async with serving(engine or DrawnBytes(), **settings) as client:
            await story(client)

    asyncio.run(main())


class HeldEngine(DrawnBytes):
    """Answers once it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.go = asyncio.Semaphore(0), asyncio.Event()
        self.cancelled = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.asked.release()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return await super().generate(request)


# --- answers --------------------------------------------------------------------------------------


def test_an_answer_has_the_text_the_usage_and_on_request_the_tokens_as_drawn() -> None:
    async def story(client: Client) -> None:
        body = {**HELLO, "return_token_ids": True, "logprobs": True, "max_tokens": 50}
        status, answer = await client.post(body)
        (choice,) = answer["choices"]
        assert (status, choice["message"]) == (200, {"role": "assistant", "content": "hi €"})
        assert (choice["finish_reason"], answer["object"]) == ("stop", "chat.completion")
        assert choice["token_ids"] == encode("hi €<|im_end|>")
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
        assert [each["token"] for each in choice["logprobs"]["content"]][:2] == ["h", "i"]
        (branch,) = await client.endpoint.finish(client.key)
        assert list(branch.prompt_ids) == answer["prompt_token_ids"]
        assert branch.transcript.token_ids == choice["token_ids"]

    play(story, DrawnBytes(["hi €<|im_end|>"]))


def test_a_stream_is_the_finished_answer_in_pieces() -> None:
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'

    async def story(client: Client) -> None:
        asked = {**HELLO, "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
        status, text = await client.post({**asked, "return_token_ids": True})
        *events, done, rest = text.split("\n\n")
        assert (status, done, rest) == (200, "data: [DONE]", "")
        sent = [json.loads(event.removeprefix("data: ")) for event in events]
        deltas = [choice["delta"] for event in sent for choice in event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == "So:"
        (made,) = [each for delta in deltas for each in delta.get("tool_calls", ())]
        assert (made["index"], made["function"]) == (0, {"name": "add", "arguments": '{"a":1}'})
        assert sent[-2]["choices"][0]["finish_reason"] == "tool_calls"
        assert sent[-2]["choices"][0]["token_ids"] == encode("So: " + call)
        assert sent[0]["prompt_token_ids"]
        assert sent[-1]["choices"] == []
        assert sent[-1]["usage"]["completion_tokens"] == len(encode("So: " + call))

    play(story, DrawnBytes(["So: " + call]))


def test_a_conversation_with_tools_and_contents_of_every_kind_is_one_branch() -> None:
    engine = DrawnBytes(
        [
            '<tool_call>{"name":"add","arguments":{"b":2, "a":1}}</tool_call><|im_end|>',
            "3<|im_end|>",
        ]
    )

    async def story(client: Client) -> None:
        messages: list[Any] = [
            {"role": "developer", "content": "be short"},
            {"role": "user", "content": [{"type": "text", "text": "1+2"}]},
        ]
        asked = {"model": "policy", "tools": [ADD], "tool_choice": "auto"}
        _, answer = await client.post({**asked, "messages": messages})
        said = answer["choices"][0]["message"]
        assert said["content"] is None
        call = said["tool_calls"][0]
        call["function"]["arguments"] = '{ "b": 2, "a": 1 }'  # as a client may write it anew
        messages += [said, {"role": "tool", "tool_call_id": call["id"], "content": "3"}]
        status, answer = await client.post({**asked, "messages": messages})
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "3")
        assert len(await client.endpoint.finish(client.key)) == 1

    play(story, engine)


def test_tools_are_shown_to_the_model_as_the_client_wrote_them() -> None:
    engine = DrawnBytes()
    function = {"name": "z", "description": "a", "parameters": {"b": 1, "a": 2}}

    async def story(client: Client) -> None:
        await client.post({**HELLO, "tools": [{"type": "function", "function": function}]})
        (request, _, _) = engine.calls[0]
        shown = client.session.bridge.decode(request.prompt_ids)
        assert json.dumps({"type": "function", "function": function}) in shown

    play(story, engine)


def test_a_template_gets_the_variables_that_a_request_has_for_it() -> None:
    engine = DrawnBytes()
    opened = "<|im_start|>assistant\n{% endif %}"
    closed = opened.replace("\n", "\n{% if not enable_thinking %}<closed>{% endif %}")

    async def story(client: Client) -> None:
        for thinking in (True, False):
            await client.post({**HELLO, "chat_template_kwargs": {"enable_thinking": thinking}})
        thinks, answers = (request.prompt_ids for request, _, _ in engine.calls)
        assert answers == (*thinks, *encode("<closed>"))

    play(story, engine, chat_template=CHATML.replace(opened, closed))


def test_tokens_may_be_asked_for_by_tokens() -> None:
    async def story(client: Client) -> None:
        sampling = {
            "max_tokens": 9,
            "stop_token_ids": encode("b"),
            "logprobs": 1,
            "temperature": 1.0,
        }
        path = "/inference/v1/generate"
        body = {"model": "policy", "token_ids": [5, 6, 7], "sampling_params": sampling}
        status, answer = await client.post(body, path, headers={"X-Session-ID": "1"})
        (choice,) = answer["choices"]
        assert (status, choice["token_ids"], choice["finish_reason"]) == (
            200,
            encode("xyb"),
            "stop",
        )
        tokens = [each["token"] for each in choice["logprobs"]["content"]]
        assert tokens == [f"token_id:{id_}" for id_ in encode("xyb")]
        await client.post({**body, "token_ids": [5, 6, 7, *choice["token_ids"], 8]}, path)
        assert len(await client.endpoint.finish(client.key)) == 1

    play(story, DrawnBytes(["xybc", "d"]), end_ids=())


def test_models_names_the_one_that_is_served_and_its_window() -> None:
    async def story(client: Client) -> None:
        headers = {"Authorization": f"bearer {client.key}"}
        async with client.http.get(client.endpoint.base_url + "/models", headers=headers) as got:
            (model,) = (await got.json())["data"]
        assert (model["id"], model["max_model_len"]) == ("policy", 321)

    play(story, max_model_len=321)


def test_the_unix_socket_answers_and_is_its_owners_alone() -> None:
    async def story(client: Client) -> None:
        path = client.endpoint.socket_path
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        headers = {"Authorization": f"Bearer {client.key}"}
        async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(path))) as http:
            url = "http://endpoint/v1/chat/completions"
            async with http.post(url, json=HELLO, headers=headers) as response:
                assert response.status == 200
        await client.endpoint.close()
        assert not path.exists()

    play(story)


# --- repetitions and clients that go away ---------------------------------------------------------


def test_a_request_sent_again_while_the_first_runs_is_sampled_once() -> None:
    async def main() -> None:
        engine = HeldEngine()
        async with serving(engine) as client:
            one = asyncio.ensure_future(client.post(HELLO))
            await engine.asked.acquire()
            retry = {"x-stainless-retry-count": "1"}
            two = asyncio.ensure_future(client.post(HELLO, headers=retry))
            engine.go.set()
            assert (await one)[1]["choices"] == (await two)[1]["choices"]
            assert await client.post(HELLO, headers=retry) == await one  # answered just now
            assert len(engine.calls) == 1

    asyncio.run(main())


def test_a_client_that_says_it_asks_for_the_first_time_is_given_another_sample() -> None:
    engine = DrawnBytes()

    async def story(client: Client) -> None:
        for _ in range(2):
            await client.post(HELLO, headers={"x-stainless-retry-count": "0"})
        assert len(engine.calls) == 2

    play(story, engine)


def test_a_client_that_goes_away_takes_its_request_out_of_the_engine() -> None:
    async def main() -> None:
        engine = HeldEngine()
        async with serving(engine) as client:
            asking = asyncio.ensure_future(client.post(HELLO))
            await engine.asked.acquire()
            asking.cancel()
            await engine.cancelled.wait()
            engine.go.set()
            assert (await client.post(HELLO))[0] == 200
            assert (len(client.session.turns), client.session.failure) == (1, None)

    asyncio.run(main())


# --- refusals by name -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temperature": 0.2}, "temperature"),
        ({"top_p": 0.5}, "top_p"),
        ({"top_k": 20}, "top_k: 20 is asked for, but the recipe samples with 0"),
        ({"min_p": 0.1}, "min_p: 0.1 is asked for"),
        ({"n": 2}, "n: 2"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"best_of": 2}, "best_of"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": ["x" * 1001]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url"),
        ({"tools": [{"type": "web_search", "function": {}}]}, "web_search"),
        ({"tool_choice": "sometimes"}, "sometimes"),
        ({"chat_template_kwargs": {"mood": 1}}, "does not read chat_template_kwargs.mood"),
        (
            {"messages": [{"role": "assistant", "content": "x"}]},
            "the last message is the assistant's",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_its_name(changes: Any, named: str) -> None:
    engine = DrawnBytes()

    async def story(client: Client) -> None:
        status, answer = await client.post({**HELLO, **changes})
        assert status == 400
        assert named in answer["error"]["message"]
        assert (engine.calls, client.session.failure) == ([], None)

    play(story, engine)


HUGE = [10**20, 10**400, int("9" * 4000)]


@pytest.mark.parametrize("number", HUGE, ids=["20 digits", "400 digits", "4000 digits"])
@pytest.mark.parametrize("field", ["top_k", "n", "seed", "max_tokens", "top_logprobs", "min_p"])
def test_a_number_without_end_is_refused_and_never_fails_the_sample(
    field: str, number: int
) -> None:
    async def story(client: Client) -> None:
        status, _ = await client.post({**HELLO, field: number})
        sampling = {"top_k": number, "max_tokens": 4}
        body = {"token_ids": [1], "sampling_params": sampling}
        by_tokens, _ = await client.post(body, "/inference/v1/generate")
        assert (status, by_tokens, client.session.failure) == (400, 400, None)

    play(story)


def test_an_error_while_a_body_is_read_is_the_agents() -> None:
    error = OverflowError("int too large to convert to float")
    with pytest.raises(RequestRefused, match="OverflowError"), reading_body():
        raise error


def test_values_that_change_nothing_are_accepted() -> None:
    same = {"temperature": 1, "top_p": 1.0, "n": 1, "frequency_penalty": 0, "logit_bias": {}}
    other = {"user": "me", "store": False, "metadata": {}, "stop": None, "top_k": -1, "min_p": 0}

    async def story(client: Client) -> None:
        assert (await client.post({**HELLO, **same, **other}))[0] == 200

    play(story)


def test_filters_are_accepted_with_the_recipes_value_only() -> None:
    recipe = SamplingParams(max_new_tokens=40, top_k=20, min_p=0.1)

    async def story(client: Client) -> None:
        client.session.engine = replace(client.session.engine, sampling=recipe)
        assert (await client.post({**HELLO, "top_k": 20, "min_p": 0.1}))[0] == 200
        for other in ({"top_k": -1}, {"top_k": 0}, {"min_p": 0}):
            status, answer = await client.post({**HELLO, **other})
            assert status == 400
            assert "but the recipe samples with" in answer["error"]["message"]

    play(story)


def test_another_model_is_not_found() -> None:
    async def story(client: Client) -> None:
        assert await client.refused({**HELLO, "model": "gpt"}) == (404, "model_not_found")

    play(story)


def test_a_conversation_that_does_not_fit_is_told_so_in_the_words_that_frameworks_know() -> None:
    async def story(client: Client) -> None:
        long = {**HELLO, "messages": [{"role": "user", "content": "x" * 200}]}
        assert await client.refused(long) == (400, "context_length_exceeded")
        assert client.session.failure is None

    play(story, max_model_len=100)


# --- engines that fail ----------------------------------------------------------------------------


@dataclass(slots=True)
class FailingEngine:
    error: Exception

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        raise self.error


def test_a_lost_engine_is_not_the_agents_fault_and_the_sample_knows_it() -> None:
    lost = EngineUnavailable("engine-0", "generate", "it is gone", "Start another engine")

    async def story(client: Client) -> None:
        assert await client.refused(HELLO) == (503, "engine_unavailable")
        assert client.session.failure is lost

    play(story, FailingEngine(lost))


def test_a_request_that_the_engine_can_never_serve_is_the_agents_fault() -> None:
    async def story(client: Client) -> None:
        assert await client.refused(HELLO) == (400, "invalid_request")
        assert client.session.failure is None

    play(story, FailingEngine(InvalidRequest("r", "prompt token 99999 is outside", "Tokenize")))


def test_a_message_that_spells_a_token_of_pictures_is_refused_by_its_name() -> None:
    async def story(client: Client) -> None:
        session, (token,) = client.session, encode("@")
        tokens = MediaTokens({token: "<image>"}, stray_reason=STRAY_TOKEN)
        session.engine = replace(session.engine, media_tokens=tokens)
        spelled = {**HELLO, "messages": [{"role": "user", "content": "what is @?"}]}
        status, answer = await client.post(spelled)
        assert (status, answer["error"]["code"]) == (400, "picture_token")
        assert f"has the token '<image>' ({token}) at position" in answer["error"]["message"]
        assert session.failure is None
        status, _ = await client.post(HELLO)
        assert status == 200

    play(story)


def test_a_bug_is_an_answer_and_fails_the_sample() -> None:
    async def story(client: Client) -> None:
        assert await client.refused(HELLO) == (500, "internal_error")
        assert isinstance(client.session.failure, ZeroDivisionError)

    play(story, FailingEngine(ZeroDivisionError()))


class UndecodableAnswers(TemplateBridge):
    """A bridge that opens a conversation, and cannot decode an answer."""

    def decode(self, token_ids: Sequence[int]) -> str:
        raise ZeroDivisionError(len(token_ids))


def test_a_bug_behind_the_engine_fails_the_sample_too() -> None:
    async def story(client: Client) -> None:
        client.session.bridge = UndecodableAnswers(template(), {})
        assert await client.refused(HELLO) == (500, "internal_error")
        assert isinstance(client.session.failure, ZeroDivisionError)

    play(story)


# --- attackers ------------------------------------------------------------------------------------


def test_a_token_opens_its_own_sample_alone_and_only_while_it_runs() -> None:
    engine = DrawnBytes()

    async def story(client: Client) -> None:
        other = session(DrawnBytes())
        others = client.endpoint.open(other)
        name, secret = client.key.split(".")[1:]
        forged = [
            *("x", "offbeat", "offbeat..", f"offbeat.{name}.", f"offbeat.{name}.{secret}x"),
            *(f"offbeat.{name}.{secret[:-1]}", f"other.{name}.{secret}", "offbeat.é.ü", "." * 4000),
            f"offbeat.{name}.{others.split('.')[2]}",
        ]
        for key in forged:
            assert await client.refused(HELLO, key=key) == (401, "invalid_api_key")
        _, answer = await client.post(HELLO, key="sk-mine")
        assert answer["error"]["message"].endswith("send the api_key of the agent's client")
        for headers in ({"Authorization": client.key}, {"Authorization": ""}):
            assert await client.refused(HELLO, headers=headers) == (401, "missing_api_key")
        await client.endpoint.finish(client.key)
        assert await client.refused(HELLO) == (401, "sample_finished")
        assert (engine.calls, other.turns) == ([], [])
        assert (await client.post(HELLO, key=others))[0] == 200
        assert len(other.turns) == 1

    play(story, engine)


def test_the_end_of_a_sample_ends_its_open_requests() -> None:
    async def main() -> None:
        engine = HeldEngine()
        async with serving(engine) as client:
            asking = asyncio.ensure_future(client.refused(HELLO))
            await engine.asked.acquire()
            assert await client.endpoint.finish(client.key) == ()
            assert await asking == (401, "sample_finished")
            assert engine.cancelled.is_set()

    asyncio.run(main())


@pytest.mark.parametrize("requests", [1000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_flood_of_requests_is_turned_away_and_the_others_are_answered(requests: int) -> None:
    async def main() -> None:
        engine = HeldEngine()
        limits = SessionLimits(max_open_requests=4)
        async with serving(engine, limits=limits) as client:
            first = {"x-stainless-retry-count": "0"}
            held = [asyncio.ensure_future(client.post(HELLO, headers=first)) for _ in range(4)]
            for _ in held:
                await engine.asked.acquire()
            flood = asyncio.gather(*(client.refused(HELLO, headers=first) for _ in range(requests)))
            other = client.endpoint.open(beside := session(DrawnBytes()))
            assert (await client.post(HELLO, key=other))[0] == 200
            assert set(await flood) == {(429, "max_open_requests")}
            engine.go.set()
            assert {status for status, _ in await asyncio.gather(*held)} == {200}
            assert (len(engine.calls), len(beside.turns)) == (4, 1)
            branches = await client.endpoint.finish(client.key)
            assert len(branches) == 4 and client.session.failure is None

    asyncio.run(main())


def test_a_refused_request_is_not_kept() -> None:
    limits = SessionLimits(max_requests=2)

    async def story(client: Client) -> None:
        for number in range(5):
            body = {**HELLO, "messages": [{"role": "user", "content": str(number)}]}
            status, _ = await client.post(body)
            assert status == (200 if number < limits.max_requests else 429)
        (entry,) = client.endpoint._entries.values()  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
        kept = entry.calls._calls  # pyright: ignore[reportPrivateUsage] # noqa: SLF001
        assert len(kept) == limits.max_requests

    play(story, limits=limits)


def test_a_history_of_megabytes_is_refused_before_it_is_encoded_or_even_read() -> None:
    async def story(client: Client) -> None:
        for size, refusal in (
            (10 << 20, (400, "context_length_exceeded")),
            (17 << 20, (413, "request_entity_too_large")),
        ):
            long = {**HELLO, "messages": [{"role": "user", "content": "x" * size}]}
            assert await client.refused(long) == refusal
        call = {"id": "1", "function": {"name": "f", "arguments": "x" * (1 << 20)}}
        called = {"role": "assistant", "tool_calls": [call]}
        long = {**HELLO, "messages": [called, {"role": "tool", "content": ""}]}
        assert await client.refused(long) == (400, "context_length_exceeded")
        assert (await client.post(HELLO))[0] == 200

    play(story)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": NaN}', b'"x"'),
        b'{"model": "policy", "messages": ' + b"[" * 100_000,
        b'{"model": "policy", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
        b'{"model": "policy", "messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_a_body_that_is_no_request_is_refused(body: bytes) -> None:
    async def story(client: Client) -> None:
        status, _ = await client.refused(body)
        assert status == 400
        assert (await client.post(HELLO))[0] == 200

    play(story)


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\\ud83d", "the body holds \\ud83d, a lone surrogate"), (b"\xff", "the body is not UTF-8")],
)
def test_text_that_is_none_is_named(content: bytes, told: str) -> None:
    body = b'{"model": "policy", "messages": [{"role": "user", "content": "' + content + b'"}]}'

    async def story(client: Client) -> None:
        status, answer = await client.post(body)
        assert status == 400
        assert told in answer["error"]["message"]

    play(story)


@pytest.mark.parametrize("ids", [[-1], [2**31], [1.5], ["1"], [True], [], [[1]], "12", None])
def test_forged_token_ids_are_refused(ids: Any) -> None:
    engine = DrawnBytes()

    async def story(client: Client) -> None:
        body = {"token_ids": ids, "sampling_params": {}}
        assert await client.refused(body, "/inference/v1/generate") == (400, "invalid_request")
        assert engine.calls == []

    play(story, engine)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/", 404),
        ("//v1/chat/completions", 404),
        ("/v1/chat/completions/", 404),
        ("/v1/%2e%2e/v1/chat/completions", 404),
        ("/v1/models", 405),
        ("/v1/chat%2fcompletions", 404),
        ("/v1/responses", 404),
    ],
)
def test_other_paths_and_methods_are_errors_in_the_same_form(path: str, status: int) -> None:
    async def story(client: Client) -> None:
        url = client.endpoint.base_url.removesuffix("/v1") + path
        headers = {"Authorization": f"Bearer {client.key}"}
        target = URL(url, encoded=True)
        async with client.http.post(target, json=HELLO, headers=headers) as response:
            assert response.status == status
            assert "/v1/chat/completions" in (await response.json())["error"]["message"]

    play(story)


def test_of_two_tokens_in_a_request_none_opens_the_other_sample() -> None:
    async def story(client: Client) -> None:
        other = session(DrawnBytes())
        both = [
            ("Authorization", f"Bearer {client.key}"),
            ("Authorization", f"Bearer {client.endpoint.open(other)}"),
        ]
        url = f"{client.endpoint.base_url}/chat/completions"
        async with client.http.post(url, json=HELLO, headers=both) as response:
            assert response.status in (200, 400)
        assert other.turns == []

    play(story)


@pytest.mark.parametrize(
    ("answered", "sent"),
    [
        (False, ""),
        (False, "POST /v1/chat"),
        (False, "POST /v1/chat/completions HTTP/1.1\r\nX: "),
        (True, "POST /v1/chat"),  # behind a request that was answered on the same connection
    ],
)
def test_a_head_that_never_ends_is_given_up(*, answered: bool, sent: str) -> None:

    async def story(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.endpoint.port)
        if answered:
            authorised = f"Host: x\r\nAuthorization: Bearer {client.key}\r\n\r\n"
            writer.write(f"GET /v1/models HTTP/1.1\r\n{authorised}".encode())
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.write(sent.encode())
        with contextlib.suppress(ConnectionResetError):
            await reader.read()  # returns at its end
        assert reader.at_eof() or reader.exception() is not None
        writer.close()
        assert (await client.post(HELLO))[0] == 200

    play(story, head_deadline_s=0.3)


@pytest.mark.parametrize(
    "key", ["offbeat.é.ü", "offbeat.\N{GRINNING FACE}.x", "\x7f", "offbeat.\xff\xfe"]
)
def test_a_token_that_is_not_ascii_is_refused_as_it_came(key: str) -> None:
    async def story(client: Client) -> None:
        name = client.key.split(".")[1]
        for forged in (key, f"offbeat.{name}.{key}"):
            reader, writer = await asyncio.open_connection("127.0.0.1", client.endpoint.port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n"
            writer.write(f"{head}Authorization: Bearer {forged}\r\n\r\n".encode())
            assert (await reader.readline()).split()[1] in (b"400", b"401")
            writer.close()
        assert (await client.post(HELLO))[0] == 200

    play(story)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zip"])
def test_a_packed_body_is_refused_by_name_and_fails_no_sample(encoding: str) -> None:
    async def story(client: Client) -> None:
        packed = zlib.compress(b"\0" * (64 << 20))  # 64 KiB that would become 64 MiB
        for body in (packed, b"no such format"):
            refused = await client.refused(body, headers={"Content-Encoding": encoding})
            assert refused == (415, "unsupported_content_encoding")
        assert client.session.failure is None
        assert (await client.post(HELLO, headers={"Content-Encoding": "identity"}))[0] == 200

    play(story)


@pytest.mark.parametrize(
    "rest",
    [
        "Content-Length: 100\r\n\r\n{",
        "Transfer-Encoding: chunked\r\n\r\n1000000000000\r\n{",  # 256 TiB are announced
        f"Transfer-Encoding: chunked\r\n\r\n2;{'x' * 100_000}",  # an endless extension
    ],
)
def test_a_body_that_never_ends_is_given_up(rest: str) -> None:
    async def story(client: Client) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", client.endpoint.port)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        writer.write(f"{head}Authorization: Bearer {client.key}\r\n{rest}".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")
        writer.close()
        await writer.wait_closed()
        assert client.session.failure is None

    play(story, io_deadline_s=0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reader_that_never_reads_is_given_up_and_its_place_is_free_again(*, stream: bool) -> None:
    long = "x" * 80_000

    async def story(client: Client) -> None:
        small = socket.socket()
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.connect(("127.0.0.1", client.endpoint.port))
        reader, writer = await asyncio.open_connection(sock=small, limit=1)
        body = json.dumps({**HELLO, "stream": stream, "logprobs": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Authorization: Bearer {client.key}\r\n\r\n".encode() + body)
        assert (await reader.readexactly(8)) == b"HTTP/1.1"  # and nothing more
        while (await client.post(HELLO))[0] == 429:
            pass
        writer.close()

    limits = SessionLimits(max_open_requests=1)
    settings = {"max_new_tokens": 300_000, "max_model_len": 400_000, "limits": limits}
    play(story, DrawnBytes([long + "<|im_end|>"]), io_deadline_s=0.2, **settings)
