"""The type of ``sync.quantize``: null, or the name of a wire format that a plug-in here brings."""

from typing import TYPE_CHECKING

from offbeat.doors import plugins_of

if TYPE_CHECKING:
    WireFormatName = str | None
else:
    from typing import Literal

    _NAMES = tuple(plugins_of("wire_format"))
    WireFormatName = Literal[_NAMES] | None if _NAMES else None
