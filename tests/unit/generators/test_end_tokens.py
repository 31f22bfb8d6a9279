import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from offbeat.generators.end_tokens import end_ids_of, end_ids_problem, tokenizer_end

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
LISTED = {"eos_token_id": [1, 5]}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


def change(file: Path, **settings: Any) -> None:
    content = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: each for key, each in content.items() if each is not None}))


def test_samples_end_with_the_tokens_of_generation_config_or_else_of_config(folder: Path) -> None:
    assert end_ids_of(folder) == [1]
    change(folder / "generation_config.json", **LISTED)
    assert end_ids_of(folder) == [1, 5]
    change(folder / "generation_config.json", eos_token_id=None)
    assert end_ids_of(folder) == [1], "config.json names it"
    assert not end_ids_problem(folder)


def test_a_multimodal_config_names_the_end_in_its_text_part(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    (folder / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 7}}))
    assert end_ids_of(folder) == [7]


def test_a_model_without_any_end_token_is_told_of_with_the_tokenizers(folder: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        change(folder / name, eos_token_id=None)
    assert end_ids_of(folder) == []
    assert "its tokenizer ends with '<eos>' (1)" in end_ids_problem(folder)
    assert not end_ids_problem(folder, stop_token_ids=[1])


def test_a_model_without_any_end_token_may_end_with_stop_strings(folder: Path) -> None:
    for name in ("generation_config.json", "config.json"):
        change(folder / name, eos_token_id=None)
    assert not end_ids_problem(folder, stop=["</answer>"])


def test_a_tokenizer_that_ends_otherwise_than_the_model_is_told_of(folder: Path) -> None:
    change(folder / "tokenizer_config.json", eos_token={"content": "<unk>"})
    assert "'<unk>' (3), but samples end only with [1]" in end_ids_problem(folder)
    assert not end_ids_problem(folder, stop_token_ids=[3])


def test_the_id_of_the_tokenizers_end_is_found_in_any_of_its_files(folder: Path) -> None:
    assert tokenizer_end(folder) == ("<eos>", 1)
    change(folder / "tokenizer_config.json", added_tokens_decoder={"9": {"content": "<eos>"}})
    assert tokenizer_end(folder) == ("<eos>", 9)
    change(folder / "tokenizer_config.json", eos_token="of no file")
    assert tokenizer_end(folder) == ("of no file", None)
    assert not end_ids_problem(folder)
