"""Checks receipts at commit: whether a group may be trained. Pure."""

import math
import operator

from offbeat.messages.groups import Receipt, RolloutTask


def refusal(  # noqa: C901, PLR0911, PLR0912 - one return per reason
    receipt: Receipt, task: RolloutTask, oldest_version: int, trainer_version: int
) -> str | None:
    """Return why this receipt must not enter the buffer, or None if it may.

    Args:
        receipt: Receipt of the producer.
        task: The rollout that was requested.
        oldest_version: Version that the engine had acked at dispatch. No token can be older.
        trainer_version: Current version. No token can be newer.
    """
    if (receipt.prompt_index, receipt.attempt) != (task.prompt_index, task.attempt):
        return (
            f"answer for prompt {receipt.prompt_index} attempt {receipt.attempt}, asked for "
            f"prompt {task.prompt_index} attempt {task.attempt}"
        )
    if receipt.environment != task.prompt.environment:
        return (
            f"of environment {receipt.environment!r}, and prompt {task.prompt_index} is one of "
            f"{task.prompt.environment!r}"
        )
    if receipt.sampling != task.sampling:
        return (
            f"sampled under other settings ({receipt.sampling or 'unknown'}) than those asked for "
            f"({task.sampling or 'unknown'})"
        )
    sizes = _sizes(receipt)
    if sizes != {task.samples}:
        return f"group of {sorted(sizes)} samples, asked for {task.samples}"
    if not all(map(math.isfinite, receipt.rewards)):
        return f"rewards {receipt.rewards} are not all finite"
    for _, values in receipt.rewards_by_name:
        if not all(value is None or math.isfinite(value) for value in values):
            return f"rewards by name {receipt.rewards_by_name} are not all finite"
    if min(receipt.response_tokens) < 1 or min(receipt.prompt_tokens) < 1:
        return "a sample without tokens"
    for spans, tokens in zip(receipt.version_spans, receipt.response_tokens, strict=True):
        covered, is_any_empty = 0, False
        for _, count in spans:
            covered += count
            is_any_empty = is_any_empty or count < 1
        if covered != tokens:
            return f"version spans {spans} do not cover {tokens} response tokens"
        if is_any_empty:
            return f"version spans {spans} with one of no token"
    tokens = receipt.response_tokens
    if any(not 1 <= n <= most for n, most in zip(receipt.branches, tokens, strict=False)):
        return f"{receipt.branches} branches of samples with {tokens} response tokens"
    valid_tokens = receipt.valid_tokens
    if min(valid_tokens) < 0 or any(map(operator.gt, valid_tokens, tokens)):
        return f"{receipt.valid_tokens} valid tokens of {receipt.response_tokens}"
    if masked := _refusal_of_masked(receipt, task):
        return masked
    if receipt.payload_bytes < 0 or len(receipt.kept_kv) not in (0, task.samples):
        return (
            f"payload of {receipt.payload_bytes} bytes, kept_kv of {len(receipt.kept_kv)} samples"
        )
    if (oldest := receipt.oldest_version) < oldest_version:
        return f"tokens of version {oldest}: the engine had acked {oldest_version}"
    if (newest := receipt.newest_version) > trainer_version:
        return f"tokens of version {newest}: the trainer has made only {trainer_version}"
    return None


def _sizes(receipt: Receipt) -> set[int]:
    """Return the sample counts of a receipt's columns: a single number if the receipt is whole."""
    rewards = receipt.rewards
    required = (
        rewards,
        receipt.prompt_tokens,
        receipt.response_tokens,
        receipt.valid_tokens,
        receipt.finish_reasons,
        receipt.version_spans,
    )
    unless_empty = (
        receipt.truncated_turns or rewards,
        receipt.statuses or rewards,
        receipt.failures or rewards,
        receipt.retries or rewards,
        receipt.turns or rewards,
        receipt.answers or rewards,
        receipt.branches or rewards,
        receipt.texts or rewards,
        receipt.refused_requests or rewards,
    )
    by_name = [values for _, values in receipt.rewards_by_name]
    return {*map(len, required), *map(len, unless_empty), *map(len, by_name)}


def _refusal_of_masked(receipt: Receipt, task: RolloutTask) -> str | None:
    """Return the problem of a receipt's masked samples, or nothing. Its sizes are right."""
    counted = receipt.samples - receipt.masked_samples
    if counted < task.min_valid_samples:
        return f"{counted} valid samples of {task.samples}; {task.min_valid_samples} are required"
    if not receipt.statuses:
        return None
    tokens = zip(receipt.valid_tokens, receipt.valid, strict=True)
    if any(count and not valid for count, valid in tokens):
        return f"masked samples with tokens to train: {receipt.valid_tokens} of {receipt.statuses}"
    return None
