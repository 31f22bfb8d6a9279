"""Downloads prompt files of datasets on the Hugging Face Hub.

Only the files that a recipe names are fetched and read. A dataset's scripts are never run. A
revision is resolved to its commit once, and the run records the commit. From then on, this commit
is read.
"""

# pyright: reportPrivateImportUsage=false, reportUnknownVariableType=false
# huggingface_hub leaves a few parameters untyped, and re-exports the errors of its HTTP client.

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Final

from offbeat.config.hub_path import FORM, READABLE, HubPath, hub_path, is_on_hub
from offbeat.config.mixture import prompt_paths
from offbeat.config.run import RunConfig
from offbeat.messages.failures import FixableError
from offbeat.messages.text import first_line, list_names

NO_COMMITS: Final[Mapping[str, str]] = MappingProxyType({})
"""No pinned commits: each path on the hub is read at its current commit."""

_SHOWN_FILES: Final = 12


class HubFilesError(FixableError):
    """Files of a dataset or a model on the hub cannot be fetched.

    Fix: correct name or pattern, or log in for gated files.
    """


class HubUnreachable(HubFilesError):
    """The hub cannot be reached, and the cache lacks files.

    Fix: run ``hf download`` on another machine, then set ``data.path`` or ``model.path`` to the
    copy.
    """


def fetch_commits(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Download the prompt files on the hub that a recipe names, and return the commit of each path.

    If ``known`` has a commit for a path, that commit is read.

    Raises:
        HubFilesError: A file cannot be fetched.
    """
    commits = dict[str, str]()
    for path in filter(is_on_hub, prompt_paths(config).values()):
        if path not in commits:
            commits[path] = known.get(path) or resolve_commit(path)
            hub_files(path, commits[path])
    return commits


def resolve_commit(path: str) -> str:
    """Return the commit to which the revision of a path resolves now.

    Raises:
        HubFilesError: The revision cannot be resolved.
    """
    # Imported late, here and below: most runs read only local files.
    from huggingface_hub import resolve_revision  # noqa: PLC0415

    wanted = _parse(path)
    with _dataset_errors(path, wanted):
        return resolve_revision(
            wanted.dataset, repo_type="dataset", revision=wanted.revision
        ).resolved


def hub_files(path: str, commit: str) -> list[Path]:
    """Return the files of a path at a commit, sorted by name. Cached files are not fetched again.

    Raises:
        HubFilesError: No file has such a name, or a file cannot be fetched.
    """
    from huggingface_hub import get_cached_repo_tree, snapshot_download  # noqa: PLC0415
    from huggingface_hub.utils import filter_repo_objects  # noqa: PLC0415

    wanted = _parse(path)
    dataset, pattern = wanted.dataset, wanted.pattern
    with _dataset_errors(path, wanted):
        folder = snapshot_download(
            dataset, repo_type="dataset", revision=commit, allow_patterns=[pattern]
        )
        # The listing names all files; the folder may hold only some of them.
        tree = get_cached_repo_tree(dataset, repo_type="dataset", revision=commit)
    names = sorted(file.path for file in tree)
    found = list(filter_repo_objects(names, allow_patterns=[pattern]))
    if not found:
        problem = f"no file of {dataset} at commit {commit} is named {pattern!r}"
        raise HubFilesError(path, problem, _files_there(names))
    return [Path(folder) / name for name in found]


def _parse(path: str) -> HubPath:
    wanted = hub_path(path)
    if wanted is None:
        raise HubFilesError(path, "names no files on the hub", f"Write {FORM}")
    return wanted


def _files_there(names: list[str]) -> str:
    readable = [name for name in names if name.endswith(READABLE)]
    if not readable:
        return f"It has no Parquet and no JSON Lines files, but: {list_names(names, _SHOWN_FILES) or 'none'}"
    return f"It has {list_names(readable, _SHOWN_FILES)}"


def _dataset_errors(path: str, wanted: HubPath) -> AbstractContextManager[None]:
    fetch = f"{wanted.dataset} --repo-type dataset --include '{wanted.pattern}'"
    fix = f"fetch them elsewhere with: hf download {fetch} --local-dir DIRECTORY, and name that directory"
    return hub_errors(path, f"dataset {wanted.dataset}", wanted.revision, fix)


@contextmanager
def hub_errors(
    path: str, repository: str, revision: str | None, offline_fix: str
) -> Generator[None]:
    """Turn the errors of the hub's client into ``HubFilesError``.

    Args:
        path: The name that the user wrote.
        repository: Kind and name of the repository, as in "dataset owner/name".
        revision: The requested branch, tag or commit.
        offline_fix: The advice for a machine without a network.
    """
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except errors.GatedRepoError as error:
        fix = "Accept its terms on its page, and set HF_TOKEN to a token of that account"
        raise HubFilesError(path, f"access to {repository} must be granted", fix) from error
    except errors.RepositoryNotFoundError as error:
        problem = f"the hub has no {repository}, or it is private"
        fix = "Correct the name, or set HF_TOKEN to a token that may read it"
        raise HubFilesError(path, problem, fix) from error
    except errors.RevisionNotFoundError as error:
        problem = f"{repository} has no revision {revision!r}"
        raise HubFilesError(path, problem, "Name a branch, a tag or a commit of it") from error
    except (
        OSError,
        ValueError,
        errors.HTTPError,
        errors.RevisionResolutionError,
        errors.CachedRepoTreeNotFoundError,
        errors.XetDownloadError,
    ) as error:
        problem = (
            f"the hub cannot be reached or is switched off by HF_HUB_OFFLINE, and the cache lacks "
            f"files ({type(error).__name__}: {first_line(error)})"
        )
        raise HubUnreachable(path, problem, f"Go online, or {offline_fix}") from error
