"""The core finds pictures by a name, and imports none of their modules."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from offbeat.environments.media_prompts import MediaPlugin, find_media
from offbeat.messages.media import NoMedia
from offbeat.models.media_rules import TEXT_ONLY, media_rules
from offbeat.plugins.images.plugin import MEDIA
from tests.support.image_text_models import make

PLUGIN: MediaPlugin = MEDIA


@pytest.mark.parametrize("media", [find_media(), NoMedia()])
def test_the_option_has_everything_that_the_core_asks_for_also_where_it_is_absent(
    media: object,
) -> None:
    names = {name for name in (*vars(MediaPlugin), *MediaPlugin.__annotations__) if name[0] != "_"}
    assert names
    assert {name for name in names if not hasattr(media, name)} == set()


def test_a_model_of_another_family_reads_text_only() -> None:
    assert media_rules(make("idefics3").config).reads_media
    assert media_rules(SimpleNamespace(model_type="llava")) is TEXT_ONLY
    assert "reads only text" in TEXT_ONLY.problem([1], {}, is_history=False)


def test_the_option_loads_no_library_of_models_before_it_is_asked_to_compute() -> None:
    heavy = "{'torch', 'transformers', 'PIL', 'pyarrow'}"
    script = (
        f"import sys, offbeat.plugins.images.plugin; sys.exit(bool({heavy} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
