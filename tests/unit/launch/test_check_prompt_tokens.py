"""What ``offbeat check`` says of the tokens of prompts."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from offbeat.config.run import RunConfig
from offbeat.launch.checks.prompt_lengths import check_prompt_lengths
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
