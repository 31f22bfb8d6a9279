"""Setup of processes."""

import gc

import pytest

from offbeat.telemetry.logs import pause_collections


def test_no_collection_searches_what_was_made_in_a_pause() -> None:
    gc.unfreeze()
    try:
        with pause_collections():
            was_enabled, made = gc.isenabled(), [[] for _ in range(10)]
        frozen = gc.get_freeze_count()
        assert not was_enabled
        assert gc.isenabled()
        assert frozen > len(made)
    finally:
        gc.unfreeze()


def test_collections_go_on_after_an_import_that_fails() -> None:
    try:
        with pytest.raises(ImportError), pause_collections():
            raise ImportError
        assert gc.isenabled()
    finally:
        gc.unfreeze()


def test_collections_stay_off_where_they_were_off() -> None:
    gc.disable()
    try:
        with pause_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()
