"""Tokenizer of a model, loaded by the class that another process has chosen."""

import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from packaging.version import Version

from offbeat.config.run import RunConfig
from offbeat.environments.tokenizer import TokenizerClass, chosen_class, load_tokenizer

TINY = Path(__file__).parents[3] / "models" / "tiny-addition"
CONFIG = RunConfig.model_validate({"steps": 1, "model": {"path": str(TINY)}})
TEXT = "12+34="

ENCODE = """
import sys
from offbeat.config.run import RunConfig
from offbeat.environments.tokenizer import TokenizerClass, load_tokenizer

path, module, name, text = sys.argv[1:]
config = RunConfig.model_validate({"steps": 1, "model": {"path": path}})
print(load_tokenizer(config, TokenizerClass(module, name)).encode(text), "torch" in sys.modules)
"""


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"),
    reason="its module of tokenizers imports torch",
)
def test_the_class_that_another_process_has_chosen_encodes_alike_without_torch() -> None:
    tokenizer, chosen = load_tokenizer(CONFIG), chosen_class(CONFIG)
    assert chosen is not None
    told = subprocess.run(
        [sys.executable, "-c", ENCODE, str(TINY), *chosen, TEXT],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert told.stdout.strip() == f"{tokenizer.encode(TEXT)} False"


def test_the_class_that_was_chosen_loads_the_same_tokenizer() -> None:
    tokenizer = load_tokenizer(CONFIG)
    again = load_tokenizer(CONFIG, chosen_class(CONFIG))
    assert type(again) is type(tokenizer)
    assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_a_class_that_this_machine_does_not_have_is_chosen_anew() -> None:
    want = load_tokenizer(CONFIG).encode(TEXT)
    for module, name in (("transformers.no_such_module", "A"), ("transformers", "NoSuchClass")):
        assert load_tokenizer(CONFIG, TokenizerClass(module, name)).encode(TEXT) == want
