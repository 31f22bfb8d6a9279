"""Writes the HTML file: the page's code and style, and the packed data. It loads nothing else.

The only text of a run in the HTML is the title, which is escaped. Data travels as base64 and enters
the document as text nodes. The content security policy names the only script and the only style by
digest, so injected markup could neither run nor load anything.

Also packs the page's data into base64: a JSON tree with binary numeric columns.

No byte of a run can be read as HTML in this form. ``web/data.js`` reads it.

    gzip( u32 length of the head | head: JSON | columns )

In the tree a column is ``{"$": [kind, offset, count]}``. Columns of four-byte numbers are stored
byte plane by byte plane: all first bytes, then all second bytes. This halves the compressed size of
slowly varying numbers.
"""

import base64
import gzip
import hashlib
import html
import struct
from importlib.resources import files
from typing import Any, Final, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]
_KEPT_BITS: Final = 12  # bits of a float's mantissa: four significant digits; a chart shows three
_KINDS: Final = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f4": "<f4"}


def packed(tree: object) -> str:
    """Return the tree as base64 text. It may contain arrays anywhere. NaN is kept."""
    columns = bytearray()
    head = msgspec.json.encode(_with_references(tree, columns))
    blob = struct.pack("<I", len(head)) + head + bytes(columns)
    # gzip's time stamp is 0, so that the same run gives the same page.
    return base64.b64encode(gzip.compress(blob, 9, mtime=0)).decode()


def _with_references(tree: object, columns: bytearray) -> object:
    if isinstance(tree, np.ndarray):
        return _reference(cast("AnyArray", tree), columns)
    if isinstance(tree, dict):
        members = cast("dict[str, object]", tree)
        return {key: _with_references(value, columns) for key, value in members.items()}
    if isinstance(tree, list | tuple):
        items = cast("list[object]", tree)
        return [_with_references(item, columns) for item in items]
    return tree


def _reference(column: AnyArray, columns: bytearray) -> dict[str, list[str | int]]:
    kind = f"{column.dtype.kind}{column.dtype.itemsize}"
    if column.dtype.kind == "f":
        kind, column = "f4", _rounded(column)
    stored = np.ascontiguousarray(column, dtype=_KINDS[kind])
    place: list[str | int] = [kind, len(columns), len(stored)]
    if stored.itemsize == 1:
        columns += stored.tobytes()
    else:
        planes = stored.view(np.uint8).reshape(-1, stored.itemsize).T
        columns += np.ascontiguousarray(planes).tobytes()
    return {"$": place}


def _rounded(column: AnyArray) -> NDArray[np.float32]:
    """Round to ``_KEPT_BITS`` of the mantissa, because bits that no chart shows compress badly."""
    dropped = 23 - _KEPT_BITS
    with np.errstate(over="ignore"):
        values = column.astype(np.float32)
    finite = np.isfinite(values)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + (1 << (dropped - 1))) >> dropped) << dropped
    rounded = nearest.astype(np.uint32).view(np.float32)
    return np.where(finite & np.isfinite(rounded), rounded, values)


_WEB: Final = files("offbeat.plugins.report") / "web"
SCRIPTS: Final = (
    "vendor/uPlot.iife.min.js",
    "dom.js",
    "data.js",
    "state.js",
    "charts.js",
    "cards.js",
    "timeline.js",
    "heat.js",
    "panels.js",
    "groups.js",
    "story.js",
    "same.js",
    "failures.js",
    "compare.js",
    "metrics.js",
    "main.js",
)
"""Scripts in the order of the page. Later files use names of earlier files."""
STYLES: Final = ("vendor/uPlot.min.css", "page.css")


def page(facts: dict[str, Any]) -> str:
    """Return the page of ``document.document``'s tree as one HTML file."""
    named = ", ".join(f"{run['name']} ({run['run_id']})" for run in facts["runs"])
    title = html.escape(" ".join(named.split()))  # one line, whatever the recipe holds
    script, style = script_text(), style_text()
    policy = (
        f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · offbeat</title>\n<style>{style}</style></head>\n"
        f"{body_text()}\n"
        f'<script type="text/plain" id="data">{packed(facts)}</script>\n'
        f"<script>{script}</script></body></html>\n"
    )


def script_text() -> str:
    """Return the page's code, all files as one script."""
    return "\n".join(read_web(name).rstrip() for name in SCRIPTS) + "\n"


def style_text() -> str:
    """Return the page's style."""
    return "\n".join(read_web(name).rstrip() for name in STYLES) + "\n"


def body_text() -> str:
    """Return the body's open tag and its sections, which the scripts fill."""
    return read_web("body.html").rstrip()


def read_web(name: str) -> str:
    """Return a file of the page's code or style."""
    return (_WEB / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
