"""What ``offbeat check`` says of the tokens of prompts."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from offbeat.config.run import RunConfig
from offbeat.launch.checks.prompt_lengths import check_prompt_lengths, list_rows
from offbeat.messages.finding import Finding, Level

ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{{ m.content }}"
    "{% endfor %}"
)


def findings(
    folder: Path, model: Path | str, rows: Sequence[Mapping[str, Any]], **sections: Any
) -> list[Finding]:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe: dict[str, Any] = {
        "steps": 1,
        "model": {"path": str(model)},
        "generator": {"max_model_len": 64, "sampling": {"max_new_tokens": 8}},
        "data": {"path": str(folder / "rows.jsonl")},
        "environment": {"name": "function", "target": "mine:reward"},
    }
    return list(check_prompt_lengths(RunConfig.model_validate(recipe | sections)))


def test_rows_that_the_template_refuses_are_counted_and_hide_nothing(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("models/tiny-addition", model)
    (model / "chat_template.jinja").write_text(ALTERNATE)
    user = {"role": "user", "content": "1+1="}
    rows: list[dict[str, Any]] = [{"messages": [user, user]}] * 3
    rows += [{"messages": [user], "tools": [{"type": "function"}]}]
    rows += [{"messages": [{"role": "user", "content": "1+" * 60}]}, {"messages": [user]}]
    refused, too_long = findings(tmp_path, model, rows)
    assert (refused.level, too_long.level) == (Level.ERROR, Level.ERROR)
    assert "4 of the 6 longest of 6 rows in data.path cannot be tokenised: " in refused.message
    assert "3 TemplateError (row 0: Conversation roles must alternate)" in refused.message
    assert "1 UnreadByTemplate (row 3: the model's chat template does not" in refused.message
    assert "1 leave no room" in too_long.message
    spared = findings(tmp_path, model, rows, rollout={"drop_budget": 4})
    assert [each.level for each in spared] == [Level.WARNING] * 2, "the run goes on without them"


def test_rows_that_end_with_an_answer_are_counted_because_the_model_sees_it(
    tmp_path: Path,
) -> None:
    asked = [{"role": "user", "content": "1+1="}]
    answered = {"messages": [*asked, {"role": "assistant", "content": "2"}]}
    rows = [{"messages": asked}, answered, answered]
    lengths, begun = findings(tmp_path, "models/tiny-calculator", rows)
    assert (lengths.level, begun.level) == (Level.OK, Level.WARNING)
    assert "2 end with a message of the assistant, which the model continues" in begun.message
    learn = {"name": "demonstrations"}
    only = findings(tmp_path, "models/tiny-calculator", [answered], environment=learn)
    assert [each.level for each in only] == [Level.OK]


def test_a_text_that_begins_twice_is_a_warning(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("models/tiny-addition", model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    name, id_ = tokenizer.eos_token, tokenizer.eos_token_id
    tokenizer.bos_token = name
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{name} $A", special_tokens=[(name, id_)]
    )
    tokenizer.save_pretrained(model)
    begun, plain = {"prompt": f"{name}1+1="}, {"prompt": "1+1="}
    lengths, twice = findings(tmp_path, model, [plain, begun, begun])
    assert (lengths.level, twice.level) == (Level.OK, Level.WARNING)
    assert f"2 begin with two tokens {id_}, which begins a text; the first is row" in twice.message
    assert len(findings(tmp_path, model, [plain])) == 1


def test_a_token_without_an_embedding_is_found_in_any_row(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree("models/tiny-addition", model)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    embeddings = json.loads((model / "config.json").read_text())["vocab_size"]
    tokenizer.add_tokens([f"<extra{n}>" for n in range(embeddings - len(tokenizer) + 1)])
    tokenizer.save_pretrained(model)
    last = tokenizer.decode([embeddings])
    rows = [{"prompt": "1+1+1+1+1="}] * 300
    lengths, beyond = findings(tmp_path, model, [*rows, {"prompt": last}])
    assert (lengths.level, beyond.level) == (Level.OK, Level.ERROR)
    assert f"the first is row 300: token {embeddings}, but config.json has " in beyond.message


def test_rows_that_leave_less_room_than_a_response_may_need_are_counted(tmp_path: Path) -> None:
    model = "models/tiny-addition"
    fits, cut, too_long = ({"prompt": "1+" * pairs} for pairs in (28, 31, 40))
    (found,) = findings(tmp_path, model, [fits, cut, cut])
    assert found.level is Level.WARNING
    assert "2 leave less room than generator.sampling.max_new_tokens=8" in found.message
    assert "the longest has 62 tokens" in found.message
    assert "cut short: rows 1 to 2 (counted from 0)" in found.message
    assert "Set generator.max_model_len to 70" in found.fix
    assert [each.level for each in findings(tmp_path, model, [fits])] == [Level.OK]
    no_room, found = findings(tmp_path, model, [fits, cut, too_long])
    assert "1 leave no room" in no_room.message
    assert "1 leave less room" in found.message and "to 70" in found.fix


def test_all_rows_that_are_too_long_are_listed_also_beyond_the_200_longest(tmp_path: Path) -> None:
    too_long, fits = {"prompt": "1+" * 40}, {"prompt": "1+1="}
    rows = [fits, too_long, fits, *[too_long] * 300, *[fits] * 300]
    (found,) = findings(tmp_path, "models/tiny-addition", rows)
    assert "the 352 longest of 603 rows in data.path were tokenised: 301 leave no" in found.message
    assert "rows 1, 3 to 302 (counted from 0)" in found.message


def test_row_numbers_are_listed_as_ranges_and_the_rest_is_counted() -> None:
    assert list_rows([7]) == "row 7 (counted from 0)"
    assert list_rows([9, 2, 8, 4]) == "rows 2, 4, 8 to 9 (counted from 0)"
    assert list_rows(range(0, 300, 2)).endswith(", 78 and 110 more (counted from 0)")


def test_a_demonstration_needs_no_room_for_another_response(tmp_path: Path) -> None:
    rows = [{"prompt": "1+" * 31, "completion": "1"}]
    sft: dict[str, Any] = {"environment": {"name": "demonstrations"}, "samples_per_group": 1}
    sft |= {"generator": {"backend": "none", "max_model_len": 64}}
    sft |= {"algorithm": {"loss": {"name": "sft"}}}
    (found,) = findings(tmp_path, "models/tiny-addition", rows, **sft)
    assert found.level is Level.OK
