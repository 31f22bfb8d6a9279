"""Why an engine of this kind cannot be made."""

from offbeat.messages.failures import OffbeatError


class VllmMissing(OffbeatError):
    """The recipe asks for vLLM, and this Python does not have it."""

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return f"vLLM cannot be imported ({self.detail}). {INSTALL}"


class EngineArgsRefused(OffbeatError):
    """``generator.vllm.engine_args`` has something that vLLM or this package cannot take."""

    def __init__(self, name: str, problem: str, fix: str) -> None:
        super().__init__(name, problem, fix)
        self.name, self.problem, self.fix = name, problem, fix

    def __str__(self) -> str:
        return f"generator.vllm.engine_args.{self.name} {self.problem}. {self.fix}"


INSTALL = (
    "Install it with pip install 'offbeat[vllm]' on a machine with a GPU, in an environment of its "
    "own; without one, make run-vllm installs the CPU build"
)
