"""The loss of a step as the trainer receives it: the recipe's keys, and values set by sampling."""

from dataclasses import dataclass, field

from offbeat.config.run import RunConfig
from offbeat.config.sections.loss import ClippedPgLossConfig, LossConfig


@dataclass(frozen=True, slots=True)
class LossSpec:
    """The loss of one step. Every number it depends on is here."""

    config: LossConfig = field(default_factory=ClippedPgLossConfig)
    temperature: float = 1.0  # logprobs are of softmax(logits / temperature)
    minibatches: int = 1  # parts that the groups of the step are divided into
    epochs: int = 1  # times that each part is trained

    @classmethod
    def of(cls, run: RunConfig) -> "LossSpec":
        """Return the recipe's loss. A missing constant is set to the token budget of a call."""
        loss, sampling = run.algorithm.loss, run.generator.sampling
        if loss.normalize == "constant" and loss.constant_tokens is None:
            loss = loss.model_copy(update={"constant_tokens": sampling.max_new_tokens})
        algorithm = run.algorithm
        return cls(loss, sampling.temperature, algorithm.minibatches, algorithm.epochs)

    @property
    def optimizer_steps(self) -> int:
        """Return the number of optimizer steps per step of the run."""
        return self.minibatches * self.epochs
