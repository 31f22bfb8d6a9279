"""Checks of an agent: what its conversations are encoded with, and how many episodes run at once."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# transformers leaves its configs and its loading functions untyped.

from collections.abc import Iterator

from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, error, ok, warning

_SUBJECT = "agent"


def check_agent(config: RunConfig) -> Iterator[Finding]:
    """Check the chat template of the model, and the processes against the samples of a group."""
    environment = config.environment
    if not environment.is_agent:
        return
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            config.model.path,
            local_files_only=True,
            trust_remote_code=config.model.trust_remote_code,
        )
    except (OSError, ValueError):
        return  # reported by the checks of the model
    if not tokenizer.chat_template:
        yield error(
            _SUBJECT,
            f"the tokenizer of {config.model.path} has no chat template: no conversation can be encoded",
            "Take a model that was trained on conversations, or add chat_template.jinja to it.",
        )
        return
    episodes = environment.workers * environment.reward_workers * environment.episodes_at_once
    seen = f"{episodes} episodes run at once; a group has {config.samples_per_group}"
    if episodes < config.samples_per_group:
        yield warning(
            _SUBJECT,
            f"{seen}, so most of rollout.deadline_s may pass before the last of them begins",
            "Raise environment.reward_workers: the processes of an agent mostly wait for the model.",
        )
    else:
        yield ok(_SUBJECT, seen)
