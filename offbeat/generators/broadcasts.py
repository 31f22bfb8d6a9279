"""An engine's part in broadcasts, in a thread of its own: requests are served meanwhile.

torch and the transport are imported when the first one comes: a run on another transport needs
neither.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from offbeat.weight_sync.manifest import Bytes, Manifest
from offbeat.weight_sync.transports.messages import Route

T = TypeVar("T")


class Broadcasts:
    """Fetches releases that are sent to several engines at once."""

    def __init__(self, member: str) -> None:
        self._member = member
        self._receiver: Any = None

    async def fetch(
        self, route: Route, epoch: int, members: tuple[str, ...], manifest: Manifest
    ) -> tuple[Bytes, ...]:
        """All chunks of a release, each as it was sent.

        A fetch that is cancelled stops at its next chunk, or when that is too late.

        Raises:
            TransferFailed: The sender is gone or gave up, or this engine was too slow.
            TransferRefused: A chunk is not what the manifest says.
        """
        from offbeat.weight_sync.receiver import Collected  # noqa: PLC0415 -- see above
        from offbeat.weight_sync.transports.gloo_receiver import GlooReceiver  # noqa: PLC0415

        if self._receiver is None:
            self._receiver = GlooReceiver(self._member)
        receiver, collected, given_up = (
            self._receiver,
            Collected(epoch, manifest),
            threading.Event(),
        )
        try:
            await in_thread(
                f"broadcast {epoch}",
                lambda: receiver.receive(route, epoch, members, manifest, collected.take, given_up),
            )
        except asyncio.CancelledError:
            given_up.set()
            raise
        return tuple(collected.chunks)


async def in_thread(name: str, work: Callable[[], T]) -> T:
    """The result of blocking work, in a new thread that the process does not wait for at its end.

    Cancelled, it leaves the work to end by itself, and nobody reads what comes of it.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def run() -> None:
        try:
            value = work()
        except Exception as error:  # noqa: BLE001 -- raised where the result is awaited
            _tell(loop, answer, lambda error=error: answer.set_exception(error))
        else:
            _tell(loop, answer, lambda: answer.set_result(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await answer


def _tell(
    loop: asyncio.AbstractEventLoop, answer: asyncio.Future[T], tell: Callable[[], None]
) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(lambda: None if answer.done() else tell())
