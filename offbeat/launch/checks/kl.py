"""Check of the KL penalty in the loss."""

from collections.abc import Iterator

from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import PolicyGradientLossConfig
from offbeat.launch.checks.finding import Finding, warning


def check_kl(config: RunConfig) -> Iterator[Finding]:
    """Warn of a KL penalty whose gradient is zero on average, so that it holds the policy to nothing."""
    loss = config.algorithm.loss
    if (
        isinstance(loss, PolicyGradientLossConfig)
        and loss.kl_coef
        and loss.kl_kind == "k1"
        and loss.kl_gradient == "estimator"
    ):
        yield warning(
            "algorithm",
            f"algorithm.loss.kl_coef={loss.kl_coef:g} with kl_kind=k1 and kl_gradient=estimator: the "
            "gradient of k1 over tokens of the policy is zero on average, so it adds noise and pulls "
            "nowhere",
            "Set algorithm.loss.kl_gradient to unbiased, kl_kind to k2 or k3, or move the penalty into "
            "the reward: algorithm.loss.kl_reward_coef.",
        )
