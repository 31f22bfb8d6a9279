"""Writes answers in the forms that clients of OpenAI and vLLM read."""

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.chat_bridge import ChatBridge
from offbeat.plugins.agents.endpoint.requests import ChatRequest
from offbeat.plugins.agents.endpoint.session import Turn

DONE: Final = b"data: [DONE]\n\n"
_Object = dict[str, Any]


def chat_completion(turn: Turn, asked: ChatRequest, model: str, bridge: ChatBridge) -> _Object:
    """Return the body of an answer that is not streamed."""
    choice: _Object = {
        "index": 0,
        "message": _message(turn.answer),
        "finish_reason": turn.finish_reason,
        "logprobs": _logprobs(turn, asked, bridge),
    }
    body = _head(turn, model, "chat.completion")
    if asked.return_token_ids:
        body["prompt_token_ids"] = turn.prompt.token_ids
        choice["token_ids"] = turn.completion_ids
    return {**body, "choices": [choice], "usage": _usage(turn)}


def chunks(turn: Turn, asked: ChatRequest, model: str, bridge: ChatBridge) -> Iterator[bytes]:
    """Return a finished answer as the events of a stream."""
    head, answer = _head(turn, model, "chat.completion.chunk"), turn.answer
    counts_usage = asked.stream_options is not None and asked.stream_options.include_usage
    rest: _Object = {"usage": None} if counts_usage else {}

    def event(delta: _Object, finish_reason: str | None = None, **fields: Any) -> bytes:  # noqa: ANN401
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, **fields}
        return _event({**head, "choices": [choice], **rest})

    if asked.return_token_ids:
        rest["prompt_token_ids"] = turn.prompt.token_ids
    yield event({"role": "assistant", "content": "" if answer.content else None})
    rest.pop("prompt_token_ids", None)
    if answer.reasoning:
        yield event({"reasoning_content": answer.reasoning})
    if answer.content:
        yield event({"content": answer.content})
    if answer.tool_calls:
        calls = _message(answer)["tool_calls"]
        yield event({"tool_calls": [{"index": at, **call} for at, call in enumerate(calls)]})
    ids = {"token_ids": turn.completion_ids} if asked.return_token_ids else {}
    yield event({}, turn.finish_reason, logprobs=_logprobs(turn, asked, bridge), **ids)
    if counts_usage:
        yield _event({**head, "choices": [], "usage": _usage(turn)})
    yield DONE


def token_completion(turn: Turn) -> _Object:
    """Return the answer to a request by tokens."""
    choice = {
        "index": 0,
        "token_ids": turn.completion_ids,
        "finish_reason": turn.finish_reason,
        "logprobs": {"content": _token_logprobs(turn)},
    }
    return {"request_id": str(turn.number), "choices": [choice], "prompt_token_ids": None}


def models(model: str, max_model_len: int) -> _Object:
    """Return the list of models, which has only the served model."""
    served = {"id": model, "object": "model", "created": 0, "owned_by": "offbeat"}
    return {"object": "list", "data": [{**served, "max_model_len": max_model_len}]}


def _head(turn: Turn, model: str, kind: str) -> _Object:
    id_ = f"chatcmpl-{turn.result.request_id}"
    return {"id": id_, "object": kind, "created": int(time.time()), "model": model}


def _message(answer: ChatMessage) -> _Object:
    message: _Object = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in answer.tool_calls
        ]
    return message


def _usage(turn: Turn) -> _Object:
    prompt, completion = len(turn.prompt.token_ids), len(turn.result.token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


def _logprobs(turn: Turn, asked: ChatRequest, bridge: ChatBridge) -> _Object | None:
    if not asked.logprobs:
        return None
    content = _token_logprobs(turn)
    if not asked.return_tokens_as_token_ids:
        for each, id_ in zip(content, turn.completion_ids, strict=True):
            each["token"] = bridge.decode([id_])
    return {"content": content, "refusal": None}


def _token_logprobs(turn: Turn) -> list[_Object]:
    logprobs = turn.result.logprobs.tolist()
    return [
        {"token": f"token_id:{id_}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for id_, logprob in zip(turn.completion_ids, logprobs, strict=True)
    ]


def _event(body: _Object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
