"""Actors set the logging of their process up; here the process is that of the tests."""

import pytest

from tests.support.own_logging import own_logging

_own_logging = pytest.fixture(autouse=True)(own_logging)
