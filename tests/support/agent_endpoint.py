"""A ChatML tokenizer of bytes, and an engine that draws bytes; both are made here."""

import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal

import numpy as np
from transformers import PreTrainedTokenizerFast

from offbeat.environments.environment_plugin import Agent
from offbeat.generators.stop_strings import StopMatcher
from offbeat.messages.generation import (
    STOPPED_AT_STRING,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
)
from offbeat.messages.groups import Prompt, RolloutTask
from offbeat.plugins.agents.endpoint.agent_groups import AgentGroups
from offbeat.plugins.agents.endpoint.bridges import TokenizerTemplate
from offbeat.plugins.agents.endpoint.chat_bridge import ChatBridge
from offbeat.plugins.agents.endpoint.session import Branch, SampleSession, SessionLimits
from offbeat.plugins.agents.endpoint.template_bridge import TemplateBridge
from offbeat.rollouts.calls import EngineClient
from offbeat.testing.environments import make_result
from tests.support.byte_tokenizer import byte_tokenizer

CHATML: Final = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

STRIPS_EARLIER_THINKING: Final = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content if loop.last else message.content.split('</think>')[-1] }}",
)

NO_END_TOKENS: Final = """\
{%- for message in messages %}{{ message.role }}: {{ message.content }}
{% endfor %}{%- if add_generation_prompt %}assistant: {% endif %}"""


def qwen_byte_tokenizer() -> PreTrainedTokenizerFast:
    """As ``byte_tokenizer``, with the other special tokens of Qwen3."""
    tokenizer = byte_tokenizer()
    tags = ("think", "tool_call", "tool_response")
    named = ("<|endoftext|>", *(each for tag in tags for each in (f"<{tag}>", f"</{tag}>")))
    tokenizer.add_tokens(list(named))
    return tokenizer


_TOKENIZER: Final = byte_tokenizer()
END: Final = 257
VOCABULARY: Final = 258


def template(chat_template: str = CHATML) -> TokenizerTemplate:
    tokenizer = byte_tokenizer() if chat_template != CHATML else _TOKENIZER
    tokenizer.chat_template = chat_template
    return TokenizerTemplate(tokenizer)


def encode(text: str) -> list[int]:
    return template().encode(text)


def trained_tokens(branch: Branch) -> list[int]:
    drawn = zip(branch.transcript.token_ids, branch.transcript.mask, strict=True)
    return [token for token, is_trained in drawn if is_trained]


@dataclass(slots=True)
class DrawnBytes:
    """An engine that says what its script says, else random bytes; logprobs are unique."""

    script: list[str] = field(default_factory=list[str])
    calls: list[tuple[GenerateRequest, list[int], list[float]]] = field(
        default_factory=list[tuple[GenerateRequest, list[int], list[float]]]
    )
    version: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: count(1))
    encode: Callable[[str], list[int]] = encode
    end: int = END

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        sampling = request.sampling
        said = self.script.pop(0) if self.script else self._random(sampling.seed)
        ids, reason = self._ended(self.encode(said), sampling)
        logprobs = [-next(self.numbers) / 1024 for _ in ids]  # exact in float32
        self.calls.append((request, ids, logprobs))
        self.version += 1
        return make_result(
            request.request_id,
            [ids],
            logprobs=np.array(logprobs, np.float32),
            finish_reasons=(reason,),
            version_spans=(((self.version, len(ids)),),),
        )

    def _random(self, seed: int | None) -> str:
        dice = random.Random(seed)
        text = "".join(dice.choices('ab€\n {}"', k=dice.randint(1, 12)))
        call = '<tool_call>{"name": "add",  "arguments": {"b":1, "a": "€"}}</tool_call>'
        return text + call * dice.randint(0, 2) + "<|im_end|>" * dice.randint(0, 1)

    def _ended(self, ids: list[int], sampling: SamplingParams) -> tuple[list[int], str]:
        matcher = StopMatcher(template().decode, sampling.stop) if sampling.stop else None
        for length, token in enumerate(ids, 1):
            if token == self.end or token in sampling.stop_token_ids:
                return ids[:length], "stop"
            if matcher is not None and matcher.push(token):
                return ids[:length], STOPPED_AT_STRING
            if length == sampling.max_new_tokens:
                return ids[:length], "length"
        return ids, "length"


def task(seed: int = 3) -> RolloutTask:
    return RolloutTask(Prompt(7, 0, 7, {}), 1, 1, "engine-0", seed=seed, deadline_s=60.0)


def session(
    engine: DrawnBytes,
    chat_template: str = CHATML,
    *,
    end_ids: Sequence[int] = (END,),
    max_new_tokens: int = 400,
    max_model_len: int = 100_000,
    limits: SessionLimits | None = None,
    seed: int = 3,
    bridge: ChatBridge | None = None,
) -> SampleSession:
    made = template(chat_template)
    sampling = SamplingParams(max_new_tokens=max_new_tokens)
    client = EngineClient(task(seed), engine.generate, sampling, max_model_len)
    joins = bridge or TemplateBridge(made, made.end_texts(end_ids))
    return SampleSession(client, joins, limits=limits or SessionLimits())


@asynccontextmanager
async def started_groups(
    agent: Agent,
    bridge: ChatBridge | None = None,
    limits: SessionLimits | None = None,
    branches: Literal["train", "mask"] = "train",
) -> AsyncIterator[AgentGroups]:
    """Start the groups of an agent, and close them at the end."""
    made = template()
    joins = bridge or TemplateBridge(made, made.end_texts((END,)))
    groups = AgentGroups(agent, joins, limits or SessionLimits(), branches)
    await groups.start()
    try:
        yield groups
    finally:
        await groups.close()
