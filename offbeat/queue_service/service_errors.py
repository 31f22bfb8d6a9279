"""Failures of the service itself; those of the queue are in ``offbeat.queue_service.errors``."""

from offbeat.messages.failures import OffbeatError


class ServiceBug(OffbeatError):
    """The service raised what nobody expected while answering."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind, self.detail = kind, detail

    def __str__(self) -> str:
        return f"the transfer queue raised {self.kind}: {self.detail}. This is a bug of the queue"


class ClientClosed(OffbeatError):
    """A call on a client after its ``close``."""

    def __init__(self, queue: str, during: str) -> None:
        super().__init__(queue, during)
        self.queue, self.during = queue, during

    def __str__(self) -> str:
        return f"cannot {self.during}: this client of {self.queue} is closed. Connect another one"


class SnapshotFailed(OffbeatError):
    """A snapshot could not be written or taken up. What was there before still is."""

    def __init__(self, directory: str, detail: str) -> None:
        super().__init__(directory, detail)
        self.directory, self.detail = directory, detail

    def __str__(self) -> str:
        return f"snapshot {self.directory}: {self.detail}"
