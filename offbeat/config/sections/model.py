"""Defines section ``model`` of a recipe."""

from typing import Literal

from offbeat.config.base import Config, RecipePath


class ModelConfig(Config):
    """The language model."""

    path: RecipePath
    """Hugging Face directory with config, weights and tokenizer; relative to the recipe. It is read from this disk
    by every process and never downloaded: a run needs no network, and the directory must be on each machine, where
    `offbeat stage` puts it. A larger model learns more for each sample; memory, steps and syncs cost more with its
    size."""

    weights: RecipePath | None = None
    """Training checkpoint of a run, `checkpoints/state_N`, whose weights this run begins with in place of those in
    `model.path`; None: those. They go on from what was learned, with new optimizer moments, whose first steps are
    rough: give `trainer.optimizer.warmup_steps`. One more copy of the model is written into the run's directory."""

    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of the weights in trainer and generators. bfloat16 halves memory and is faster on
    GPUs, but small updates are rounded; float64 is for comparisons."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Some models need it; it runs with your rights
    on every machine."""
