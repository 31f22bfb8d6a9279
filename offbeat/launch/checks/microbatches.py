"""Check of the token budget of a microbatch against the longest row."""

from collections.abc import Iterator

from offbeat.config.limits import microbatch_tokens
from offbeat.config.run import RunConfig
from offbeat.launch.checks.finding import Finding, warning


def check_microbatches(config: RunConfig) -> Iterator[Finding]:
    """Warn of a budget below the longest row: a row is never cut, so less than one changes nothing."""
    if config.trainer.backend == "stub":
        return
    budget, longest = microbatch_tokens(config.trainer), config.generator.max_model_len
    if budget < longest:
        yield warning(
            "microbatches",
            f"trainer.max_tokens_per_microbatch={config.trainer.max_tokens_per_microbatch} holds {budget} tokens, and "
            f"the longest row has generator.max_model_len={longest}: a row is never cut, so one that is "
            "longer is a microbatch of its own, which takes the memory of all its tokens",
            f"Set it to hold {longest} or more, or lower generator.max_model_len where memory is short.",
        )
