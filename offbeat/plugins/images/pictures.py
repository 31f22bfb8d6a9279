"""Pictures of a prompt in the form for a vision tower: resized, normalised and cut.

Legend: I pictures, V values over all pictures.
"""

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np

from offbeat.messages.failures import SchemaError
from offbeat.messages.media import Media

if TYPE_CHECKING:
    from numpy.typing import NDArray

VALUES: Final = "media_values"
SIZES: Final = "media_sizes"
KIND: Final = "media_kind"
_DTYPES: Final = {VALUES: "float32", SIZES: "int32", KIND: "int32"}
_SIDES: Final = 3  # of a picture: channels, height, width; of a grid: t, h, w


class MediaKind(enum.StrEnum):
    """Layout in which a family of models reads pictures. The set is closed."""

    PIXELS = "pixels"  # whole pictures or tiles: Idefics3, SmolVLM, Gemma 3
    PATCHES = "patches"  # flattened patches of a grid: Qwen2-VL and its successors


_KINDS: Final = tuple(MediaKind)


class Pictures(msgspec.Struct, frozen=True, eq=False):
    """Typed view of the media of one prompt: its pictures, in the order of their placeholders."""

    kind: MediaKind
    values: "NDArray[np.float32]"
    """[V]: the pictures end to end. ``pixels``: [channels, height, width] each. ``patches``:
    [t * h * w, values of a patch] each. All patches have the same number of values."""
    sizes: "NDArray[np.int32]"
    """[I, 3]. ``pixels``: channels, height and width. ``patches``: the grid t, h, w."""

    @classmethod
    def of(cls, media: Media) -> Self:
        """Return the pictures as views of their columns.

        Raises:
            SchemaError: A column is missing, has a different type or shape, or contradicts the
                others.
        """
        for name, dtype in _DTYPES.items():
            if name not in media:
                raise SchemaError(name, "missing", f"with {', '.join(_DTYPES)}, or none of them")
            if media[name].dtype != dtype:
                raise SchemaError(name, f"dtype {media[name].dtype}", dtype)
            if media[name].ndim != 1:
                raise SchemaError(name, f"shape {media[name].shape}", "one axis")
        if unknown := media.keys() - _DTYPES.keys():
            raise SchemaError(min(unknown), "not declared", f"one of {', '.join(_DTYPES)}")
        _check(media)
        return cls(_KINDS[int(media[KIND][0])], media[VALUES], media[SIZES].reshape(-1, _SIDES))

    @property
    def media(self) -> dict[str, "NDArray[Any]"]:
        """Return the columns that hold the pictures."""
        return {
            VALUES: np.asarray(self.values),
            SIZES: np.asarray(self.sizes).reshape(-1),
            KIND: np.array([_KINDS.index(self.kind)], np.int32),
        }

    def between(self, first: int, end: int) -> Self:
        """Return pictures ``first`` to ``end`` as views of the same memory."""
        elements = self.sizes.astype(np.int64).prod(1)
        # Values per pixel and channel, or per patch
        each = len(self.values) // int(elements.sum())
        bounds: list[int] = np.concatenate([[0], np.cumsum(elements * each)]).tolist()
        return type(self)(
            self.kind, self.values[bounds[first] : bounds[end]], self.sizes[first:end]
        )


def merge(media: Sequence[Media]) -> Media:
    """Concatenate the pictures of several prompts.

    Raises:
        SchemaError: As ``Pictures.of``.
        TypeError: Their layouts differ.
    """
    pictures = [Pictures.of(each) for each in media]
    if len(kinds := {each.kind for each in pictures}) > 1:
        raise TypeError(f"pictures of {' and '.join(sorted(kinds))} cannot be one batch")
    values = np.concatenate([each.values for each in pictures])
    sizes = np.concatenate([each.sizes for each in pictures])
    return Pictures(pictures[0].kind, values, sizes).media


def _check(media: Media) -> None:
    """Check typed columns of pictures against each other."""
    kinds, sizes = media[KIND].tolist(), media[SIZES]
    if len(kinds) != 1 or not 0 <= kinds[0] < len(_KINDS):
        want = ", ".join(f"{code} ({kind})" for code, kind in enumerate(_KINDS))
        raise SchemaError(KIND, f"{kinds[:8]}", f"one of {want}")
    if not len(sizes) or len(sizes) % _SIDES or int(sizes.min()) < 1:
        raise SchemaError(SIZES, f"{sizes.tolist()[:8]}", "three sides above 0 per picture")
    # Python integers, because a product of three int32 may overflow 64 bits
    sides = sizes.tolist()
    want = sum(a * b * c for a, b, c in zip(sides[::3], sides[1::3], sides[2::3], strict=True))
    got = len(media[VALUES])
    if _KINDS[kinds[0]] is MediaKind.PATCHES:
        if not got or got % want:
            raise SchemaError(VALUES, f"{got} values", f"a multiple of {want}, the patches")
    elif got != want:
        raise SchemaError(VALUES, f"{got} values", f"{want}, by {SIZES}")
