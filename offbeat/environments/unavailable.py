"""Defines the error by which user code says that another moment will do."""


class EnvironmentUnavailable(Exception):
    """Raised by an environment or an async reward whose service is down: a sandbox, a judge.

    The prompt is not at fault: the group is retried with growing waits, within
    ``rollout.infrastructure_retries``. It does not count against the engine. An async reward is
    first called again itself, ``environment.reward_retries`` times and not before
    ``retry_after_s``.
    """

    def __init__(self, problem: str = "", *, retry_after_s: float = 0.0) -> None:
        super().__init__(problem)
        self.retry_after_s = retry_after_s
