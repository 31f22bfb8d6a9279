"""Checks that the model's image processor makes what its config reads, on pictures of its own."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from offbeat.images.errors import PLACE
from offbeat.launch.checks.finding import Finding, error, ok
from offbeat.messages.text import first_line
from offbeat.multimodal.prompt_tokens import MediaTokens

if TYPE_CHECKING:
    from PIL.Image import Image

    from offbeat.images.processors import PictureProcessor

_SUBJECT: Final = "pictures"
_SIDES: Final = ((640, 480), (300, 500), (64, 64))
"""Width and height of the pictures: a photo, an upright one, one that is smaller than most models read."""


def check_processor(
    path: str, processor: "PictureProcessor", tokens: MediaTokens
) -> Iterator[Finding]:
    """Run the processor on pictures of its own, and the rules of the model's config on the result.

    They differ where files of two models lie in one directory: another picture size, size of a
    patch, or number of tokens of a picture.
    """
    made = list[str]()
    for width, height in _SIDES:
        shown = f"{width} x {height} pixels"
        try:
            encoded = processor.encode(PLACE, [_gradient(width, height)])
        except Exception as raised:  # noqa: BLE001 - of the files of the model, which may hold anything
            seen = (
                f"the image processor of model.path={path} raised {type(raised).__name__} on a "
                f"picture of {shown}: {first_line(raised)}"
            )
            yield error(_SUBJECT, seen, "Restore the files of the model's processor.")
            return
        if problem := tokens.problem_of_prompt(encoded.token_ids, encoded.media):
            seen = (
                f"the image processor of model.path={path} does not fit its config.json: a prompt "
                f"with a picture of {shown} {problem}"
            )
            fix = "Take both from one model: preprocessor_config.json, processor_config.json, config.json."
            yield error(_SUBJECT, seen, fix)
            return
        made.append(f"{len(encoded.token_ids)} of {width} x {height}")
    yield ok(
        _SUBJECT, f"the processor fits the model's config; tokens with a picture: {', '.join(made)}"
    )


def _gradient(width: int, height: int) -> "Image":
    from PIL import Image  # noqa: PLC0415 -- of an extra

    across, down = Image.linear_gradient("L").rotate(90), Image.linear_gradient("L")
    whole = Image.merge("RGB", (across, down, down.rotate(180)))
    return whole.resize((width, height))
