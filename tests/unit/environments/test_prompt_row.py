"""Every field of a row that changes the prompt is rendered, or refused by its name."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from transformers import AutoTokenizer

from offbeat.config.sections.environment import EnvironmentConfig
from offbeat.environments.demonstrations import Demonstrations
from offbeat.environments.row_checks import row_check
from offbeat.environments.text import UnreadByTemplate, encode_prompt
from offbeat.messages.groups import Prompt

USER = {"role": "user", "content": "1+2="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
FUNCTION = EnvironmentConfig(name="function", target="m:f")
THINKS = (
    "{%- for m in messages %}<{{ m.role }}>{{ m.content }}{%- endfor %}"
    "{%- if add_generation_prompt %}<assistant>{%- if not enable_thinking|default(true) %}"
    "{% generation %}-{% endgeneration %}{%- endif %}{%- endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained("models/tiny-calculator", local_files_only=True)


@pytest.fixture
def thinking() -> Any:
    """A tokenizer of its own, whose template reads ``enable_thinking`` and shows no tools."""
    made: Any = AutoTokenizer.from_pretrained("models/tiny-calculator", local_files_only=True)
    made.chat_template = THINKS
    return made


def read(row: Mapping[str, Any], tokenizer: Any) -> str:
    """The prompt of a row that passes the check, as text."""
    assert row_check(FUNCTION)(row) is None
    return tokenizer.decode(encode_prompt(Prompt(0, 0, 0, dict(row)), tokenizer))


def refused(row: Mapping[str, Any], environment: EnvironmentConfig = FUNCTION) -> str:
    problem = row_check(environment)(row)
    assert problem is not None
    return problem


def test_the_model_goes_on_with_a_last_message_of_the_assistant(tokenizer: Any) -> None:
    begun = {"role": "assistant", "content": "Let me think: "}
    assert read({"messages": [USER, begun]}, tokenizer) == (
        "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\nLet me think: "
    )
    in_parts = {**begun, "content": [{"type": "text", "text": "Let me think: "}]}
    assert read({"messages": [USER, in_parts]}, tokenizer).endswith("assistant\nLet me think: ")


def test_a_template_shows_the_tools_of_a_row(tokenizer: Any) -> None:
    bare = read({"messages": [USER]}, tokenizer)
    shown = f"<|im_start|>system\n{json.dumps(TOOL)}\n<|im_end|>\n{bare}"
    assert read({"messages": [USER], "tools": [TOOL]}, tokenizer) == shown
    assert read({"messages": [USER], "tools": json.dumps([TOOL])}, tokenizer) == shown
    for nothing in ([], None, "", "[]"):
        assert read({"messages": [USER], "tools": nothing}, tokenizer) == bare


def test_a_demonstration_is_learned_behind_its_tools(tokenizer: Any) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [call]}], "tools": [TOOL]}
    assert row_check(EnvironmentConfig(name="demonstrations"))(row) is None
    made = Demonstrations(tokenizer).demonstrate(Prompt(0, 0, 0, row))
    assert '"name": "add"' in tokenizer.decode(made.prompt_ids)
    assert '"arguments": {"a": 1}}' in tokenizer.decode(made.response_ids), "not a string of JSON"


def test_a_template_gets_the_variables_of_a_row(thinking: Any) -> None:
    row: dict[str, Any] = {"messages": [USER]}
    assert read(row, thinking) == "<user>1+2=<assistant>"
    row["chat_template_kwargs"] = {"enable_thinking": False}
    assert read(row, thinking) == "<user>1+2=<assistant>-"
    row["chat_template_kwargs"] = {"enable_thinking": True}
    assert read(row, thinking) == "<user>1+2=<assistant>"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"tools": [TOOL]}, "tools"),
        (
            {"chat_template_kwargs": {"enable_thinkng": False}},
            "chat_template_kwargs.enable_thinkng",
        ),
        ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
    ],
)
def test_what_a_template_does_not_read_is_refused_with_what_it_reads(
    thinking: Any, fields: Mapping[str, Any], name: str
) -> None:
    with pytest.raises(UnreadByTemplate) as unread:
        read({"messages": [USER], **fields}, thinking)
    assert f"does not read {name} (variables that it reads: enable_thinking)" in str(unread.value)


def test_a_developer_is_shown_as_the_system_that_templates_know(tokenizer: Any) -> None:
    asked = {"messages": [{"role": "developer", "content": "Add."}, USER]}
    assert read(asked, tokenizer).startswith("<|im_start|>system\nAdd.<|im_end|>")


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [{"role": "human", "content": "?"}]}, "messages[0] has the role 'human'; did you mean 'user'?"),
        ({"messages": [{"role": "narrator", "content": "?"}]}, "roles are system, developer, user"),
        ({"prompt": "?", "tools": [TOOL]}, "has 'tools' next to 'prompt'"),
        ({"prompt": "?", "chat_template_kwargs": {"a": 1}}, "'chat_template_kwargs' next to 'prompt'"),
        ({"messages": [USER], "tools": ["add"]}, "'tools' is ['add']; it is a list of objects"),
        ({"messages": [USER], "tools": "add"}, "'tools' is 'add'; it is a list of objects"),
        ({"messages": [USER], "chat_template_kwargs": [1]}, "'chat_template_kwargs' is [1]; it is an object"),
        ({"messages": [USER], "system": "Be brief."}, "has 'system', which the model would not see"),
        ({"prompt": "?", "videos": ["a.mp4"]}, "has 'videos', which the model would not see"),
        (
            {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[-1] calls tools, but nothing answers the call",
        ),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[-1] is the assistant's and empty"),
    ],
)  # fmt: skip
def test_what_no_prompt_can_show_is_refused_by_its_name(
    row: Mapping[str, Any], problem: str
) -> None:
    assert problem in refused(row)


def test_an_environment_that_makes_the_chat_itself_refuses_what_it_would_drop() -> None:
    row = {"question": "1+1?", "answer": "2"}
    gsm8k = EnvironmentConfig(name="gsm8k")
    assert row_check(gsm8k)({**row, "messages": [USER], "tools": None}) is None
    for key, value in (("tools", [TOOL]), ("chat_template_kwargs", {"a": 1}), ("system", "Add.")):
        assert f"has {key!r}, which the model would not see" in refused({**row, key: value}, gsm8k)


@pytest.mark.plugins
def test_an_agent_or_a_custom_environment_may_read_such_fields_itself() -> None:
    row = {"prompt": "?", "system": "Add.", "tools": ["calculator"]}
    for name in ("agent", "custom"):
        assert row_check(EnvironmentConfig(name=name, target="m:f"))(row) is None


def test_the_answer_of_a_grader_may_be_in_an_object() -> None:
    options = {"answer_key": "reward_model.ground_truth"}
    graded = EnvironmentConfig(name="function", target="math_verify", options=options)
    assert row_check(graded)({"prompt": "?", "reward_model": {"ground_truth": "2"}}) is None
    assert "has no 'reward_model.ground_truth'" in refused({"prompt": "?", "answer": 2}, graded)
