"""Encodes prompts with pictures in a thread next to a worker's event loop."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from offbeat.environments.protocol import EncodedPrompt, EnvironmentUnavailable
from offbeat.messages.groups import Prompt
from offbeat.messages.media import Media, media_bytes
from offbeat.plugins.images.digits import drawn, is_drawn
from offbeat.plugins.images.errors import BadPicture
from offbeat.plugins.images.rows import get_pictures, names_pictures, picture_bytes, shown
from offbeat.plugins.images.section import ImagesConfig

if TYPE_CHECKING:
    from PIL.Image import Image

    from offbeat.plugins.images.processors import PictureProcessor

_MIB = 2**20


class PictureEncoder:
    """Reads, decodes and processes the pictures of prompts. The model's processor creates the ids.

    It handles one prompt at a time in a dedicated thread. Pictures need milliseconds to tenths of a
    second of CPU, while the event loop continues with other groups. The processor and its tokenizer
    belong to that thread.
    """

    def __init__(self, images: ImagesConfig, processor: "PictureProcessor") -> None:
        self._images, self._processor = images, processor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pictures")

    async def encode(self, prompt: Prompt) -> EncodedPrompt | None:
        """Return the first observation of a prompt with pictures, or None for a text prompt.

        Raises:
            BadPicture: A picture, or all of them together, cannot be used.
            WrongPlaces: The text does not have one place for each picture.
            StrayPlaceholder: The text has a picture token outside these places.
            EnvironmentUnavailable: The file system could not be read.
        """
        if not names_pictures(prompt.data):
            return None
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self.encode_now, prompt)

    def encode_now(self, prompt: Prompt) -> EncodedPrompt:
        """Encode a prompt synchronously, in the thread of ``encode`` or for checks before a run."""
        named = get_pictures(prompt.data)
        if len(named) > (most := self._images.max_pictures):
            problem = f"is one of {len(named)}; environment.images.max_pictures is {most}"
            raise BadPicture(shown(named[most]), problem)
        pictures = [self._picture(prompt, each) for each in named]
        text: Any = prompt.data.get("prompt", prompt.data)
        encoded = self._processor.encode(text, pictures)
        if encoded.media is not None:
            self._check_bytes(prompt, encoded.media)
        return encoded

    def close(self) -> None:
        """End the thread once it is idle."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _picture(self, prompt: Prompt, picture: object) -> "Image":
        from offbeat.plugins.images.decoding import decode_picture  # noqa: PLC0415 - loads Pillow

        if is_drawn(picture):
            return drawn(picture)
        try:
            content = picture_bytes(prompt, picture, int(self._images.max_file_mib * _MIB))
        except OSError as error:
            raise EnvironmentUnavailable(f"picture {shown(picture)!r:.200}: {error}") from error
        return decode_picture(shown(picture), content, self._images.max_pixels)

    def _check_bytes(self, prompt: Prompt, media: Media) -> None:
        nbytes = media_bytes(media)
        most = self._images.max_mib
        if nbytes > most * _MIB:
            problem = (
                f"needs {nbytes / _MIB:.4g} MiB as the model reads it, with all pictures of its "
                f"prompt; environment.images.max_mib is {most:g}"
            )
            raise BadPicture(shown(get_pictures(prompt.data)[0]), problem)
