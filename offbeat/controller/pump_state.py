"""State that one pump owns and others read or wait for."""

from offbeat.controller.errors import TrainerLost
from offbeat.controller.observable_state import ObservableState
from offbeat.messages.weights import WeightRelease


class PromptSupply(ObservableState):
    """State of the prompt source as the rollout pump has found it."""

    is_exhausted: bool = False
    """The prompt source is at its end: no fresh group can come."""


class TrainerStatus(ObservableState):
    """Calls of the trainer in progress, and a loss that another pump than the train pump found."""

    open_calls: int = 0
    """Calls without a reply; every reply is progress."""
    lost: TrainerLost | None = None

    def check(self) -> None:
        """Raise the loss that was found, if there is one.

        Raises:
            TrainerLost: Another pump has found that the trainer is gone or unusable.
        """
        if self.lost is not None:
            raise self.lost


class SyncState(ObservableState):
    """Current release of the weights, the request for the next one, and the gate of rollouts."""

    requested_version: int | None = None
    """Version to publish; None once its snapshot is made."""
    is_busy: bool = False
    """A release is being made, or engines load it."""
    release: WeightRelease | None = None
    """The newest release of this lineage."""
    is_lost: bool = False
    """The release can no longer be fetched."""
    is_gate_open: bool = True
    """Rollouts may be dispatched."""

    @property
    def is_there(self) -> bool:
        """Return whether there is a release for an engine to load."""
        return self.release is not None and not self.is_lost

    @property
    def is_settled(self) -> bool:
        """Return whether nothing is requested or being made, and the release can be fetched."""
        return self.requested_version is None and not (self.is_busy or self.is_lost)


class EvaluationState(ObservableState):
    """The version to score, and the evaluations that failed in this incarnation."""

    requested_version: int | None = None
    """Version to score; None once it is being scored."""
    newest_due: int = 0
    """Newest version whose evaluation has been requested, or was due before this incarnation."""
    is_busy: bool = False
    """A version is being scored."""
    failed_count: int = 0
    failure: str = ""
    """Why the last failed evaluation failed."""
