"""Errors between encoder ranks and language ranks."""

from offbeat.messages.failures import OffbeatError


class ProvenanceMismatch(OffbeatError):
    """Pictures of an encoder rank that differ from the pictures that its lanes read.

    Fix: report it.
    """

    rank: int
    missing: int  # pictures that a lane reads but the rank did not get
    surplus: int  # pictures that the rank got but no lane reads

    def __str__(self) -> str:
        return (
            f"trainer rank {self.rank} encodes for lanes that need the pictures of "
            f"{self.missing} groups which it did not get, and it got pictures of {self.surplus} "
            "groups that none needs. The groups were sent to ranks other than the ones that "
            "trainer.encoder says"
        )


class BridgeMismatch(OffbeatError):
    """Unexpected message between an encoder rank and a language rank.

    Fix: report it.
    """

    rank: int
    sender: int
    got: str
    want: str

    def __str__(self) -> str:
        return (
            f"trainer rank {self.rank} got {self.got} from rank {self.sender}, but expected "
            f"{self.want}. If this error recurs, leave trainer.encoder out"
        )
