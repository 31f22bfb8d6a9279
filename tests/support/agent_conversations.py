"""Any conversation of an agent with the endpoint, and what has to be trained of it."""

from hypothesis import strategies as st

from offbeat.plugins.agents.endpoint.chat import ChatMessage
from offbeat.plugins.agents.endpoint.session import ChatTurn, SampleSession
from tests.support.agent_endpoint import DrawnBytes

TOOL = '{"function":{"name":"add","parameters":{}},"type":"function"}'
STEPS = st.sampled_from(["user", "tool", "go_on", "edit", "fork", "tools", "restart"])
CALL = '<tool_call>{"name": "add",  "arguments": {"b":1}}</tool_call>'
SAID = ("a", "€", "\n", " ", "b}", "<think>", "</think>", "assistant\n", CALL, "<|im_end|>")
ANSWERS = st.lists(
    st.lists(st.sampled_from(SAID), min_size=1, max_size=6).map("".join), min_size=9, max_size=9
)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


async def wander(on: SampleSession, steps: list[str], stop: tuple[str, ...]) -> list[ChatTurn]:
    """Hold a conversation of these steps; what was asked."""
    messages, tools, asked = (user("hello"),), (TOOL,), list[ChatTurn]()
    seen = list[tuple[ChatMessage, ...]]()
    for step in ("user", *steps):
        asked.append(ChatTurn(messages, tools, stop))
        turn = await on.chat(asked[-1])
        said = (*messages, turn.answer)
        seen.append(said)
        match step:
            case "user":
                messages = (*said, user("go on"))
            case "tool":
                messages = (*said, ChatMessage("tool", "3€", tool_call_id="x"))
            case "go_on":
                more = turn.history.open_text + "a and on"
                messages = (*messages, ChatMessage("assistant", more), user("so?"))
            case "edit":
                messages = (*messages, ChatMessage("assistant", "edited"), user("so?"))
            case "fork":
                messages = (*seen[len(seen) // 2], user("or else?"))
            case "tools":
                messages, tools = (*said, user("other tools")), (*tools, TOOL)
            case _:
                messages = (user("anew"),)
    return asked


def check_what_is_trained(on: SampleSession, engine: DrawnBytes) -> None:
    """Check that each token drawn is trained once, with its logprob, and no other; end the sample."""
    branches = on.finish()
    trained = list[float]()
    for branch in branches:
        transcript = branch.transcript
        assert sum(number for _, number in transcript.spans) == len(transcript.token_ids)
        drawn = zip(transcript.mask, transcript.token_ids, transcript.logprobs, strict=True)
        for is_trained, token, logprob in drawn:
            assert is_trained == (logprob < 0)
            if is_trained:
                trained.append(logprob)
                assert token == _token_of(engine, logprob)
    assert sorted(trained) == sorted(logprob for _, _, each in engine.calls for logprob in each)
    lines = [(*branch.prompt_ids, *branch.transcript.token_ids) for branch in branches]
    assert on.tokens == sum(map(len, lines))
    assert sum(branch.transcript.turns for branch in branches) == len(on.turns)
    for request, ids, _ in engine.calls:
        seen = (*request.prompt_ids, *ids)
        assert any(line[: len(seen)] == seen for line in lines)


def _token_of(engine: DrawnBytes, logprob: float) -> int:
    return next(ids[each.index(logprob)] for _, ids, each in engine.calls if logprob in each)
