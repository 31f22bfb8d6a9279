"""What generators say about the weights they serve."""

import msgspec


class EngineState(msgspec.Struct, frozen=True):
    """One engine's account of itself. ``version`` None: it holds no weights of this run."""

    name: str
    incarnation: str  # changes with every process life
    version: int | None
    digest: str | None
    running: int  # samples being decoded
    waiting: int  # requests not started
    busy_s: float  # time spent decoding since start
    tokens: int  # generated since start


class WeightsAck(msgspec.Struct, frozen=True):
    """An engine has verified and now serves these weights."""

    engine: str
    incarnation: str
    epoch: int
    version: int
    digest: str
    transfer_s: float  # receive and verify
    pause_s: float  # decoding stood still
