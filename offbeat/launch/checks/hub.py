"""Downloads the prompt files on the hub before anything reads them."""

from collections.abc import Mapping
from functools import partial

from offbeat.config.run import RunConfig
from offbeat.environments.hub_files import fetch_commits
from offbeat.launch.bounded_call import bounded
from offbeat.messages.fixed_times import READ_PROMPTS_S


def fetched_commits(config: RunConfig, known: Mapping[str, str]) -> dict[str, str]:
    """Return the commit of each path on the hub, once its files are on this machine.

    A path in ``known`` is read at the commit there.

    Raises:
        HubFilesError: A file cannot be had.
        DeadlineExceeded: The hub is too slow, or has stopped answering.
    """
    fetch = partial(fetch_commits, config, known)
    return bounded(fetch, "download of the prompt files from the hub", READ_PROMPTS_S)
