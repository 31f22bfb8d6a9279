"""Errors that prevent the start of a vLLM engine."""

from offbeat.messages.failures import FixableError, OffbeatError


class VllmMissing(OffbeatError):
    """vLLM, which the recipe needs, is missing from this Python environment.

    Fix: install vLLM as the message says, or use ``generator.backend=embedded``.
    """

    detail: str

    def __str__(self) -> str:
        return f"vLLM cannot be imported ({self.detail}). {INSTALL}"


class EngineArgsRefused(FixableError):
    """``generator.vllm.engine_args`` has an argument that vLLM or this package cannot accept.

    Fix: remove the argument, or use the key that the message names.
    """

    form = "generator.vllm.engine_args.{} {}. {}"


class RopeDiffers(OffbeatError):
    """A model for which the rotary frequencies of vLLM and the trainer would differ.

    Fix: use the embedded engine, or another model.
    """

    max_model_len: int
    bound: int
    original: int

    def __str__(self) -> str:
        fix = "Use generator.backend=embedded"
        if self.original == self.bound:
            fix = f"Set generator.max_model_len to {self.bound} or less, or use generator.backend=embedded"
        return (
            f"rope_type=dynamic with generator.max_model_len={self.max_model_len}, "
            f"max_position_embeddings={self.bound} and an original length of {self.original}: vLLM would "
            f"compute different frequencies than the trainer. {fix}"
        )


class PicturesUnserved(OffbeatError):
    """An image-text model of a family for which vLLM computes no pictures here.

    Fix: use the embedded engine, or a family of docs/vllm.md.
    """

    model_type: str
    served: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"model_type={self.model_type}: vLLM serves image-text models of {', '.join(self.served)} "
            "here, and the pictures of a different family were never compared with the trainer's. Use "
            "generator.backend=embedded"
        )


INSTALL = (
    "Install it with pip install 'offbeat[vllm]' on a machine with a GPU, in a separate "
    "environment; without a GPU, make run-vllm installs the CPU build"
)
