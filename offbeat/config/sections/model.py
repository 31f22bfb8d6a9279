"""Defines section ``model`` of a recipe."""

from collections.abc import Iterator
from typing import Literal

from offbeat.config.base import Config, RecipePath
from offbeat.config.hub_path import HUB, MODEL_FORM, hub_model, is_on_hub
from offbeat.config.problems import Clash


class ModelConfig(Config):
    """The language model."""

    path: RecipePath
    """Hugging Face directory with config, weights and tokenizer, relative to the recipe. It must
    exist on every machine (`offbeat stage`). `hf://OWNER/NAME[@REVISION]` downloads a model from
    the hub to the machine that starts the run. So does `OWNER/NAME` if no such directory exists."""

    weights: RecipePath | None = None
    """A run's training checkpoint, `checkpoints/state_N`, to start from. null: the weights in
    `model.path`. The optimizer starts fresh, so set `trainer.optimizer.warmup_steps`. The run
    directory gets one more copy of the model."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Dtype of the weights in trainer and engines. bfloat16 halves memory but rounds small updates.
    float64 is for comparisons."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. It runs with your rights on every machine."""

    def find_clashes(self) -> Iterator[Clash]:
        if is_on_hub(self.path) and hub_model(self.path) is None:
            message = f"model.path={self.path} names no model"
            yield Clash(("model.path",), message, f"Write {HUB}{MODEL_FORM}.")
