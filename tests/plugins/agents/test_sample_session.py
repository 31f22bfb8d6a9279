"""Turns of a sample are joined token by token, or are branches with a reason."""

import asyncio
from dataclasses import replace
from itertools import groupby
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.messages.failures import RolloutFailed
from offbeat.models.media_rules import MediaTokens
from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.chat_bridge import BranchReason
from offbeat.plugins.agents.endpoint.errors import LimitExceeded, SessionFinished
from offbeat.plugins.agents.endpoint.session import (
    Branch,
    ChatTurn,
    SampleSession,
    SessionLimits,
    TokenTurn,
    Turn,
)
from tests.support.agent_conversations import (
    ANSWERS,
    STEPS,
    TOOL,
    check_what_is_trained,
    user,
    wander,
)
from tests.support.agent_endpoint import (
    CHATML,
    END,
    NO_END_TOKENS,
    STRIPS_EARLIER_THINKING,
    DrawnBytes,
    encode,
    session,
    template,
)

STRIPS_ALL_THINKING: Final = CHATML.replace(
    "{{ message.content }}", "{{ message.content.split('</think>')[-1] }}"
)


SHORTENS_EARLIER_ANSWERS: Final = CHATML.replace(
    "{{ message.content }}",
    "{{ message.content[:-1] if message.role == 'assistant' and not loop.last"
    " else message.content }}",
)


COUNTS_MESSAGES: Final = "{{ messages | length }} messages\n" + CHATML


KEEPS_THINKING_SINCE_THE_LAST_QUESTION: Final = """\
{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}
{%- set seen = namespace(question=0) %}
{%- for message in messages %}{% if message.role == "user" %}
{%- set seen.question = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
{{- "\\n<tool_response>\\n" + message.content + "\\n</tool_response>" }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content if loop.index0 >= seen.question else message.content.split("</think>")[-1] }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Qwen3's: tools answer in one user turn, and a new question forgets what was thought before."""


async def talk(on: SampleSession, *later: str, **request: Any) -> list[ChatMessage]:
    """A user who says these things one after another; the whole conversation."""
    messages = list[ChatMessage]()
    for text in ("hello", *later):
        messages.append(user(text))
        messages.append((await on.chat(ChatTurn(tuple(messages), **request))).answer)
    return messages


def sampled(branch: Branch) -> list[list[int]]:
    """The runs of tokens that are trained."""
    transcript = branch.transcript
    runs = groupby(zip(transcript.mask, transcript.token_ids, strict=True), lambda each: each[0])
    return [[token for _, token in run] for is_trained, run in runs if is_trained]


def text_of(branch: Branch) -> str:
    return _whole().decode([*branch.prompt_ids, *branch.transcript.token_ids])


def _whole() -> Any:
    return template()._tokenizer  # noqa: SLF001 -- special tokens are to be seen


def test_a_sampled_token_of_pictures_is_context_of_the_next_turn_and_no_text_may_have_one() -> None:
    on = session(DrawnBytes(["me@you<|im_end|>"]))
    tokens = MediaTokens({encode("@")[0]: "<image>"})
    on.engine = replace(on.engine, media_tokens=tokens)
    messages = asyncio.run(talk(on, "how are you?"))
    with pytest.raises(RolloutFailed, match="the conversation has the token '<image>'"):
        asyncio.run(on.chat(ChatTurn((*messages, user("what is @?")))))
    assert on.failure is None
    (branch,) = on.finish()
    assert "me@you" in text_of(branch)


# --- token by token -------------------------------------------------------------------------------


def test_the_next_prompt_begins_with_what_was_drawn_and_goes_on_as_the_template_does() -> None:
    engine = DrawnBytes(['hi  there {"a":1}<|im_end|>', "fine<|im_end|>"])
    on = session(engine)
    asyncio.run(talk(on, "how are you?"))
    (branch,) = on.finish()
    assert text_of(branch) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        'hi  there {"a":1}<|im_end|>\n'
        "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>"
    )
    assert sampled(branch) == [encode('hi  there {"a":1}<|im_end|>'), encode("fine<|im_end|>")]
    assert branch.reason is BranchReason.OPENING


def test_a_turn_that_was_cut_is_closed_by_the_template_and_not_by_the_model() -> None:
    on = session(DrawnBytes(["never ends", "fine<|im_end|>"]), max_new_tokens=5)
    asyncio.run(talk(on, "more"))
    (branch,) = on.finish()
    assert "assistant\nnever<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n" in text_of(branch)
    assert sampled(branch) == [encode("never"), encode("fine<|im_end|>")]


def test_the_agent_gets_the_special_tokens_of_an_answer_but_not_its_end() -> None:
    on = session(DrawnBytes(["a<|im_start|>b<|im_end|>", "fine<|im_end|>"]))
    messages = asyncio.run(talk(on, "go on"))
    assert messages[1].content == "a<|im_start|>b"
    (branch,) = on.finish()
    assert sampled(branch) == [encode("a<|im_start|>b<|im_end|>"), encode("fine<|im_end|>")]


def test_a_stop_string_is_kept_in_the_tokens_and_not_in_the_text() -> None:
    on = session(DrawnBytes(["think\nObservation: 5", "done<|im_end|>"]))
    messages = asyncio.run(talk(on, "go on", stop=("Observation:",)))
    assert messages[1].content == "think\n"
    (branch,) = on.finish()
    assert sampled(branch)[0] == encode("think\nObservation:")
    assert "Observation:<|im_end|>\n<|im_start|>user\ngo on" in text_of(branch)


def test_a_stop_string_of_the_recipe_ends_each_answer_and_stays_in_its_text() -> None:
    engine = DrawnBytes(["a</code> never seen", "b;c</code>", "b</code>!"])
    on = session(engine)
    sampling = msgspec.structs.replace(on.engine.sampling, stop=("</code>",))
    on.engine = replace(on.engine, sampling=sampling)

    async def main() -> list[str]:
        turns = [
            await on.chat(ChatTurn((user("1"),))),
            await on.chat(ChatTurn((user("2"),), stop=(";",))),
            await on.chat(ChatTurn((user("3"),), stop=(";",))),
        ]
        assert {turn.finish_reason for turn in turns} == {"stop"}
        return [turn.text for turn in turns]

    assert asyncio.run(main()) == ["a</code>", "b", "b</code>"]
    assert [ids for _, ids, _ in engine.calls] == [
        encode("a</code>"),
        encode("b;"),
        encode("b</code>"),
    ]


def test_a_client_may_go_on_where_a_stop_string_ended_the_answer() -> None:
    on = session(DrawnBytes(["a</code> never seen", "done<|im_end|>"]))

    async def main() -> Turn:
        asked = ChatTurn((user("hello"),), stop=("</code>",))
        turn = await on.chat(asked)
        assert turn.answer.content == "a"
        said = ChatMessage("assistant", "a</code>\nRunning it.")
        return await on.chat(ChatTurn((user("hello"), said, user("so?"))))

    assert asyncio.run(main()).reason is None
    (branch,) = on.finish()
    assert text_of(branch) == (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\na</code>\nRunning it.<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\ndone<|im_end|>"
    )
    assert sampled(branch) == [encode("a</code>"), encode("done<|im_end|>")]


def test_a_client_may_go_on_with_an_answer_that_was_cut() -> None:
    """What was drawn is also a part of what opens the answer: it is joined at the right place."""
    on = session(DrawnBytes(["assistant", "b"]), max_new_tokens=1)

    async def main() -> None:
        await on.chat(ChatTurn((user("hello"),)))
        said = ChatMessage("assistant", "a, so to speak")
        await on.chat(ChatTurn((user("hello"), said, user("so?"))))

    asyncio.run(main())
    (branch,) = on.finish()
    assert text_of(branch).split("hello")[1] == (
        "<|im_end|>\n<|im_start|>assistant\na, so to speak<|im_end|>\n"
        "<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\nb"
    )


@pytest.mark.parametrize(
    ("drawn", "sent"),
    [("a<|im_end|>", "a and more"), ("a</code>", "a and more"), ("a</code>", "A</code> more")],
    ids=["the_model_ended_it", "without_the_stop_string", "other_text"],
)
def test_an_answer_that_is_not_gone_on_with_as_drawn_is_an_edited_history(
    drawn: str, sent: str
) -> None:
    on = session(DrawnBytes([drawn]))

    async def main() -> Turn:
        await on.chat(ChatTurn((user("hello"),), stop=("</code>",)))
        return await on.chat(ChatTurn((user("hello"), ChatMessage("assistant", sent), user("so?"))))

    assert asyncio.run(main()).reason is BranchReason.HISTORY_EDITED


def test_a_template_that_trims_what_was_drawn_before_the_stop_string_opens_a_branch() -> None:
    trims = CHATML.replace("{{ message.content }}", "{{ message.content | trim }}")
    on = session(DrawnBytes(["  a</code>"]), trims)

    async def main() -> Turn:
        await on.chat(ChatTurn((user("hello"),), stop=("</code>",)))
        said = ChatMessage("assistant", "  a</code> so")
        return await on.chat(ChatTurn((user("hello"), said, user("so?"))))

    assert asyncio.run(main()).reason is BranchReason.TEMPLATE_REWRITES_HISTORY


def test_a_tool_call_is_not_written_anew_however_the_model_spaced_it() -> None:
    call = '<tool_call>{"name":   "add", "arguments": {"b": 1,"a":2}}</tool_call><|im_end|>'
    on = session(DrawnBytes(["Let me see. " + call, "3<|im_end|>"]))

    async def main() -> None:
        first = await on.chat(ChatTurn((user("1+2"),), (TOOL,)))
        assert first.finish_reason == "tool_calls"
        assert first.answer.content == "Let me see."
        (made,) = first.answer.tool_calls
        assert (made.name, made.arguments) == ("add", '{"b":1,"a":2}')
        result = ChatMessage("tool", "3", tool_call_id=made.id)
        await on.chat(ChatTurn((user("1+2"), first.answer, result), (TOOL,)))

    asyncio.run(main())
    (branch,) = on.finish()
    assert call + "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n" in text_of(branch)


def test_a_template_without_end_tokens_is_bridged_as_well() -> None:
    on = session(DrawnBytes(["one", "two"]), NO_END_TOKENS, end_ids=())
    asyncio.run(talk(on, "more"))
    (branch,) = on.finish()
    assert text_of(branch) == "user: hello\nassistant: one\nuser: more\nassistant: two"


# --- branches -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rewriting",
    [
        STRIPS_EARLIER_THINKING,
        STRIPS_ALL_THINKING,
        SHORTENS_EARLIER_ANSWERS,
        COUNTS_MESSAGES,
    ],
)
def test_a_template_that_rewrites_what_was_said_opens_a_branch(rewriting: str) -> None:
    on = session(DrawnBytes(["<think>hm</think>5<|im_end|>", "6<|im_end|>"]), rewriting)
    asyncio.run(talk(on, "and one more?"))
    first, second = on.finish()
    assert second.reason is BranchReason.TEMPLATE_REWRITES_HISTORY
    assert sampled(first) == [encode("<think>hm</think>5<|im_end|>")]
    assert sampled(second) == [encode("6<|im_end|>")]
    rendered = template(rewriting).render(
        (user("hello"), first_answer(on), user("and one more?")), (), opens_answer=True
    )
    assert text_of(second) == rendered + "6<|im_end|>"


def first_answer(on: SampleSession) -> ChatMessage:
    return on.turns[0].answer


def test_reasoning_is_kept_over_tool_turns_where_the_template_keeps_it() -> None:
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    thought = "<think>\nfirst this\n</think>\n\n" + call * 2 + "<|im_end|>"
    script = [thought, "<think>so</think>5<|im_end|>", "6<|im_end|>"]
    on = session(DrawnBytes(script), KEEPS_THINKING_SINCE_THE_LAST_QUESTION)

    async def main() -> None:
        messages = (user("2+3?"),)
        turn = await on.chat(ChatTurn(messages, (TOOL,)))
        results = [
            ChatMessage("tool", "5", tool_call_id=each.id) for each in turn.answer.tool_calls
        ]
        messages = (*messages, turn.answer, *results)
        turn = await on.chat(ChatTurn(messages, (TOOL,)))
        assert turn.reason is None
        turn = await on.chat(ChatTurn((*messages, turn.answer, user("and 3+3?")), (TOOL,)))
        assert turn.reason is BranchReason.TEMPLATE_REWRITES_HISTORY

    asyncio.run(main())
    first, second = on.finish()
    tools = "\n<|im_start|>user" + "\n<tool_response>\n5\n</tool_response>" * 2 + "<|im_end|>\n"
    assert thought + tools + "<|im_start|>assistant\n<think>so</think>5" in text_of(first)
    assert "<think>" not in text_of(second)


def test_an_agent_that_edits_its_history_opens_a_branch() -> None:
    on = session(DrawnBytes())

    async def main() -> BranchReason | None:
        await on.chat(ChatTurn((user("hello"),)))
        edited = (user("hello"), ChatMessage("assistant", "I said something else"), user("so?"))
        return (await on.chat(ChatTurn(edited))).reason

    assert asyncio.run(main()) is BranchReason.HISTORY_EDITED
    assert len(on.finish()) == 2


def test_examples_of_answers_in_a_first_request_are_no_edited_history() -> None:
    on = session(DrawnBytes())
    shown = (user("1+1"), ChatMessage("assistant", "2"), user("2+3"))
    assert asyncio.run(on.chat(ChatTurn(shown))).reason is BranchReason.OPENING


def test_other_tools_open_a_branch() -> None:
    on = session(DrawnBytes())

    async def main() -> BranchReason | None:
        first = await on.chat(ChatTurn((user("hello"),)))
        messages = (user("hello"), first.answer, user("so?"))
        return (await on.chat(ChatTurn(messages, (TOOL,)))).reason

    assert asyncio.run(main()) is BranchReason.TOOLS_CHANGED


def test_two_continuations_of_one_turn_share_its_tokens_and_train_them_once() -> None:
    on = session(DrawnBytes(["root<|im_end|>", "left<|im_end|>", "right<|im_end|>"]))

    async def main() -> None:
        root = await on.chat(ChatTurn((user("hello"),)))
        for way in ("left?", "right?"):
            turn = await on.chat(ChatTurn((user("hello"), root.answer, user(way))))
            assert (turn.parent, turn.reason) == (root, None)

    asyncio.run(main())
    left, right = on.finish()
    assert sampled(left) == [encode("root<|im_end|>"), encode("left<|im_end|>")]
    assert sampled(right) == [encode("right<|im_end|>")]
    assert "root<|im_end|>\n<|im_start|>user\nright?" in text_of(right)


def test_tokens_continue_the_longest_turn_that_they_begin_with() -> None:
    on = session(DrawnBytes(["one", "two", "three"]))

    async def main() -> None:
        first = await on.continue_tokens(TokenTurn((5, 6)))
        both = await on.continue_tokens(TokenTurn((5, 6, *first.completion_ids, 9)))
        assert (both.parent, both.prompt.new_ids) == (first, (9,))
        other = await on.continue_tokens(TokenTurn((5, 7)))
        assert (other.parent, other.reason) == (None, BranchReason.HISTORY_EDITED)

    asyncio.run(main())
    assert [sampled(branch) for branch in on.finish()] == [
        [encode("one"), encode("two")],
        [encode("three")],
    ]


# --- limits ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (SessionLimits(max_requests=2), "max_requests"),
        (SessionLimits(max_branches=2), "max_branches"),
        (SessionLimits(max_sample_tokens=100), "max_sample_tokens"),
    ],
)
def test_a_sample_is_bounded(limits: SessionLimits, name: str) -> None:
    engine = DrawnBytes(["1234567890" * 4] * 9)
    on = session(engine, limits=limits)

    async def main() -> None:
        for number in range(9):
            await on.chat(ChatTurn((user(f"question {number}"),)))

    with pytest.raises(LimitExceeded) as exceeded:
        asyncio.run(main())
    assert exceeded.value.limit == name
    assert sum(len(ids) for _, ids, _ in engine.calls) <= 100


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (SessionLimits(max_branches=2), "max_branches"),
        (SessionLimits(max_sample_tokens=150), "max_sample_tokens"),
    ],
)
def test_requests_that_are_open_together_do_not_exceed_a_limit_together(
    limits: SessionLimits, name: str
) -> None:
    on = session(DrawnBytes(["1234567890" * 4] * 9), limits=limits)

    async def main() -> list[Turn | BaseException]:
        chats = (on.chat(ChatTurn((user(f"question {number}"),))) for number in range(9))
        return await asyncio.gather(*chats, return_exceptions=True)

    refused = [each for each in asyncio.run(main()) if isinstance(each, BaseException)]
    assert {each.limit for each in refused if isinstance(each, LimitExceeded)} == {name}
    branches = on.finish()
    assert len(branches) == 9 - len(refused) > 0
    whole = sum(len(each.prompt_ids) + len(each.transcript.token_ids) for each in branches)
    assert len(branches) <= limits.max_branches and whole <= limits.max_sample_tokens


def test_a_finished_sample_samples_no_more() -> None:
    on = session(DrawnBytes())
    asyncio.run(talk(on))
    on.finish()
    with pytest.raises(SessionFinished):
        asyncio.run(talk(on))


def test_equal_seeds_of_an_agent_do_not_make_equal_turns() -> None:
    engine = DrawnBytes()
    on = session(engine)
    asyncio.run(talk(on, "again", seed=1))
    one, two = (request.sampling.seed for request, _, _ in engine.calls)
    assert one != two


def test_samples_of_one_group_draw_the_same_request_under_seeds_of_their_own() -> None:
    engine = DrawnBytes()
    for sample in range(2):
        on = session(engine)
        on.sample = sample
        asyncio.run(talk(on))
    one, two = (request.sampling.seed for request, _, _ in engine.calls)
    assert one != two


# --- any conversation -----------------------------------------------------------------------------

TEMPLATES = st.sampled_from(
    [
        CHATML,
        STRIPS_EARLIER_THINKING,
        STRIPS_ALL_THINKING,
        KEEPS_THINKING_SINCE_THE_LAST_QUESTION,
        SHORTENS_EARLIER_ANSWERS,
        COUNTS_MESSAGES,
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=8), st.integers(1, 80), st.booleans(), ANSWERS, TEMPLATES)
def test_every_drawn_token_is_trained_once_with_its_logprob_and_nothing_else_is(
    steps: list[str], most: int, stops: bool, answers: list[str], chat_template: str
) -> None:
    engine = DrawnBytes(answers)
    on = session(engine, chat_template, max_new_tokens=most)
    asked = asyncio.run(wander(on, steps, ("b}",) if stops else ()))
    check_what_is_trained(on, engine)
    made = template(chat_template)
    for turn, request in zip(on.turns, asked, strict=True):
        _check_prompt(
            turn, request, made.render(request.messages, request.tools, opens_answer=True)
        )


def _check_prompt(turn: Turn, request: ChatTurn, rendered: str) -> None:
    """Check that the model read what the template writes, but for how it had spelled its answers."""
    prompt, parent = turn.prompt, turn.parent
    read = _whole().decode(prompt.token_ids)
    if parent is None:
        assert read == rendered
        return
    assert prompt.token_ids == (*parent.history.token_ids, *prompt.new_ids)
    assert rendered.endswith(_whole().decode(prompt.new_ids))
    sent = request.messages[len(parent.history.messages) - 1]
    as_drawn = not sent.tool_calls and sent.content.startswith(decoded(parent))
    if parent.parent is None and as_drawn:
        assert read == rendered


def decoded(turn: Turn) -> str:
    return template().decode(turn.completion_ids)


def test_the_end_token_is_the_templates() -> None:
    assert template().end_texts([END]) == {END: "<|im_end|>"}
