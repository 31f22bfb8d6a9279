"""Downloads a model of the Hugging Face Hub once, into the cache of this machine.

Only files that are staged are downloaded, at one commit. The client continues an interrupted
download by itself.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportMissingTypeArgument=false
# pyright: reportUnknownParameterType=false, reportUntypedBaseClass=false
# huggingface_hub re-exports the errors of its HTTP client; tqdm declares no types.

import io
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from offbeat.messages.failures import OffbeatError
from offbeat.messages.text import first_line
from offbeat.staging.manifest import NothingToStage, left_out_pickles, staged_names
from offbeat.staging.progress import ProgressMeter

FORM: Final = "OWNER/NAME[@REVISION]"
_NAME: Final = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([^@\s]+))?")


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub, at a branch, tag or commit."""

    name: str  # OWNER/NAME
    revision: str | None  # None: the default branch


def hub_model(text: str) -> HubModel | None:
    """Return the parts of a name of ``FORM``, with or without hf://; None for any other.

    A slash inside REVISION is written %2F.
    """
    found = _NAME.fullmatch(text)
    if found is None:
        return None
    name, revision = found.groups()
    return HubModel(name, unquote(revision) if revision else None)


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """The directory of a model in the cache, and what of the hub's was not downloaded."""

    folder: Path
    pickles: tuple[str, ...]


def downloaded(model: HubModel, meter: ProgressMeter) -> DownloadedModel:
    """Return a model in the cache, once all of its files are there.

    Raises:
        NothingToStage: The model, or its files, cannot be had.
    """
    # Imported where it is used: most models are staged from a directory.
    from huggingface_hub import HfApi, snapshot_download  # noqa: PLC0415

    meter.begin("listing", model.name, 0)
    with _as_nothing_to_stage(model):
        commit = HfApi().model_info(model.name, revision=model.revision).sha
        names = HfApi().list_repo_files(model.name, revision=commit)
        wanted = staged_names(model.name, names)
        meter.begin("downloading", model.name, 0)
        folder = snapshot_download(
            model.name,
            revision=commit,
            allow_patterns=wanted,
            tqdm_class=_counting_into(meter),
        )
    return DownloadedModel(Path(folder), left_out_pickles(names))


def _counting_into(meter: ProgressMeter) -> type[Any]:
    """Return a class of progress bars that shows nothing and counts into ``meter``."""
    from tqdm.auto import tqdm  # noqa: PLC0415

    class CountingBar(tqdm):
        """Progress bar of a download, without a display."""

        def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - those of tqdm
            # A disabled bar would not count.
            super().__init__(*args, **{**options, "file": io.StringIO(), "leave": False})

        def update(self, n: float | None = 1) -> bool | None:
            meter.advance(int(n or 0))
            return super().update(n)

    return CountingBar


@contextmanager
def _as_nothing_to_stage(model: HubModel) -> Generator[None]:
    """Raise the errors of the hub's client as one that says what to do."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except OffbeatError:
        raise
    except errors.GatedRepoError as error:
        fix = "Accept its terms on its page, and set HF_TOKEN to a token of that account"
        raise NothingToStage(model.name, "access to it has to be granted", fix) from error
    except errors.RepositoryNotFoundError as error:
        problem = "there is no such directory here, and no such model on the hub, or it is private"
        fix = "Correct the name, or set HF_TOKEN to a token that may read it"
        raise NothingToStage(model.name, problem, fix) from error
    except errors.RevisionNotFoundError as error:
        problem = f"it has no revision {model.revision!r}"
        raise NothingToStage(model.name, problem, "Name a branch, a tag or a commit") from error
    except (OSError, ValueError, errors.HTTPError, errors.XetDownloadError) as error:
        problem = f"the hub cannot be reached ({type(error).__name__}: {first_line(error)})"
        fix = f"Go online, or fetch it elsewhere with hf download {model.name}, and name that directory"
        raise NothingToStage(model.name, problem, fix) from error
