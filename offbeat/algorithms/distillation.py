"""On-policy distillation: a teacher's logprobs of the sampled tokens as a part of the advantage.

The logprob of each token that the policy drew is compared with the teacher's. In expectation over
tokens of the policy, ``old - teacher`` is the reverse KL of the next token, so its negative as an
advantage descends it. Only a token's own difference enters its advantage: discount 0.
arXiv:2306.13649 (GKD) and arXiv:2306.08543 (MiniLLM) have the divergence.
"""

from dataclasses import replace

from torch import Tensor

from offbeat.algorithms.metrics import PartialMetric
from offbeat.algorithms.tokens import LOG_RATIO_LIMIT, ValidTokens, token_mean
from offbeat.config.sections.loss import PolicyGradientLossConfig


def distilled(tokens: ValidTokens, config: PolicyGradientLossConfig) -> ValidTokens:
    """Return tokens whose advantage is ``reward_coef * A + coef * (teacher - old)``.

    Without a teacher they are unchanged. The difference is clamped to ``LOG_RATIO_LIMIT``: it has no
    gradient, but a token that the teacher would never write must not decide the whole step.
    """
    if tokens.teacher_N is None:
        return tokens
    taught_N = -config.teacher_coef * _gap(tokens, tokens.teacher_N)
    rewarded_N = config.teacher_reward_coef * tokens.advantages_N
    return replace(tokens, advantages_N=rewarded_N + taught_N)


def teacher_metrics(tokens: ValidTokens) -> dict[str, PartialMetric]:
    """Return the reverse KL to the teacher, estimated from the sampled tokens; none without one."""
    if tokens.teacher_N is None:
        return {}
    return {"train/teacher_kl": token_mean(_gap(tokens, tokens.teacher_N), tokens.mask_N)}


def _gap(tokens: ValidTokens, teacher_N: Tensor) -> Tensor:
    """Return the clamped log-ratio of policy and teacher [N], without gradient."""
    gap_N = tokens.old_N.detach() - teacher_N
    return gap_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
