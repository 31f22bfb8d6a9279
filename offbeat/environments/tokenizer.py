"""Loads the tokenizer of a run's model."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from typing import Any

from offbeat.config.run import RunConfig


def load_tokenizer(config: RunConfig) -> Any:  # noqa: ANN401 -- a tokenizer of transformers, or None
    """Load the tokenizer of the model; return None for a stub environment, which needs none."""
    if config.environment.name == "stub":
        return None
    from transformers import AutoTokenizer  # noqa: PLC0415 - seconds, for what a stub never uses

    return AutoTokenizer.from_pretrained(
        config.model.path,
        local_files_only=True,
        trust_remote_code=config.model.trust_remote_code,
    )
