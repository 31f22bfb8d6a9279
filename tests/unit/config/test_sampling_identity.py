"""Groups have one name per set of sampling settings."""

from typing import Any

from offbeat.config.mixture import sampling_identity
from offbeat.config.run import RunConfig


def identity(**sampling: Any) -> str:
    values = {"steps": 1, "model": {"path": "m"}, "environment": {"name": "arithmetic"}}
    return sampling_identity(
        RunConfig.model_validate({**values, "generator": {"sampling": sampling}})
    )


def test_each_sampling_key_changes_the_name() -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"temperature": 0.7},
        {"top_p": 0.9},
        {"top_k": 20},
        {"min_p": 0.05},
        {"max_new_tokens": 7},
        {"stop_token_ids": [5]},
        {"stop": ["</answer>"]},
        {"stop": ["</answer>", "x"]},
    ]
    assert len({identity(**change) for change in changes}) == len(changes)


def test_filters_and_stop_strings_that_are_off_leave_the_name_of_groups_stored_without_them() -> (
    None
):
    assert identity() == identity(top_k=0, min_p=0.0, stop=[]) == "374f0af1177a"
