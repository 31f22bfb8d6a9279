"""A preview samples real answers and rewards them by the recipe's own function."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import nbformat
import pytest
from nbclient import NotebookClient
from typer.testing import CliRunner

import offbeat
from offbeat.launch.commands.main import app
from offbeat.launch.preview import PreviewFailed

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = ROOT / "models" / "tiny-addition"
ROWS: Final = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(5) for b in range(5)]


def reward(row: Mapping[str, Any], response: str) -> float:
    return float(response == str(row["answer"]))


def test_it_shows_prompts_answers_and_rewards_and_keeps_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = offbeat.preview(model=MODEL, prompts=ROWS, reward=reward, max_new_tokens=4)
    assert len(shown.prompts) == 16
    for each in shown.prompts:
        row = json.loads(each.samples[0].prompt or "")
        assert each.text == row["prompt"]
        assert json.loads(each.row) == {"answer": row["answer"]}
        for sample in each.samples:
            response = (sample.response or "").removesuffix("<eos>")
            assert sample.reward == reward(row, response)
    assert 0.0 < (shown.reward or 0.0) < 1.0
    assert list(tmp_path.iterdir()) == []


def test_a_sample_whose_reward_raises_is_shown_and_the_others_are_rewarded() -> None:
    def only_even(row: Mapping[str, Any], response: str) -> float:
        if row["answer"] % 2:
            raise ValueError(f"{row['answer']} is odd")
        return reward(row, response)

    shown = offbeat.preview(model=MODEL, prompts=ROWS, reward=only_even, max_new_tokens=4)
    assert len(shown.prompts) == 16
    for each in shown.prompts:
        answer = json.loads(each.samples[0].prompt or "")["answer"]
        assert each.failed == (4 if answer % 2 else 0)
        for error in each.errors.values():
            assert error.endswith(f"in only_even: ValueError: {answer} is odd")
    assert "in only_even: ValueError: " in str(shown)
    assert f"{shown.failed} of 64 samples" in str(shown)


def test_a_reward_that_always_raises_is_named_with_its_line() -> None:
    def typo(row: Mapping[str, Any], response: str) -> float:
        return float(row["anwser"] == response)

    error = r"every sample failed \(64\): .* in typo: KeyError: 'anwser'"
    with pytest.raises(PreviewFailed, match=error):
        offbeat.preview(model=MODEL, prompts=ROWS, reward=typo, max_new_tokens=4)


def test_a_first_preview_in_a_notebook_prints_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    call = f"""
import offbeat
rows = [{{"prompt": f"{{a}}+1=", "answer": a + 1}} for a in range(9)]
def reward(row, response):
    return float(response == str(row["answer"]))
offbeat.preview(model={str(MODEL)!r}, prompts=rows, reward=reward, max_new_tokens=4)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(call)])
    NotebookClient(notebook, timeout=100).execute()
    outputs = notebook.cells[0].outputs
    assert [each["output_type"] for each in outputs] == ["execute_result"]
    assert "9, 36 samples" in outputs[0]["data"]["text/plain"]


def test_the_command_prints_it() -> None:
    recipe = str(ROOT / "recipes" / "quickstart.yaml")
    result = CliRunner().invoke(app, ["preview", recipe, "--local", "--prompts=4", "--samples=2"])
    assert result.exit_code == 0, result.output
    assert "prompts          4, 8 samples" in result.stdout


def test_a_recipe_without_engines_is_refused() -> None:
    recipe = str(ROOT / "recipes" / "tiny-sft.yaml")
    result = CliRunner().invoke(app, ["preview", recipe])
    assert result.exit_code == 2
    assert "starts no engine" in result.stderr


def test_prompts_that_cannot_be_used_are_refused_with_their_line(tmp_path: Path) -> None:
    chat = {"prompt": [{"role": "user", "content": "1+1="}], "answer": 2}
    prompts = tmp_path / "chat.jsonl"
    prompts.write_text(json.dumps(chat))
    with pytest.raises(offbeat.RunRefused, match=r"chat.jsonl:1.*messages"):
        offbeat.preview(model=MODEL, prompts=prompts, reward=reward, max_new_tokens=4)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL, model, ignore=shutil.ignore_patterns("chat_template.jinja"))
    chat = [{"messages": [{"role": "user", "content": "1+1="}], "answer": 2}] * 4
    with pytest.raises(offbeat.RunRefused, match=r"cannot be tokenised.*chat_template"):
        offbeat.preview(model=model, prompts=chat, reward=reward, max_new_tokens=4)
