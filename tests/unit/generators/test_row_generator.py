"""The generator of a run that trains on the rows of a file."""

import pytest

from offbeat.generators.rows import RowGenerator, make_empty_release
from offbeat.messages.fences import Fence

pytestmark = pytest.mark.real_clock

FENCE = Fence("run", 1)


async def test_a_file_serves_each_version_at_once_and_needs_no_weights() -> None:
    rows = RowGenerator()
    assert (await rows.state(FENCE)).version is None
    release = make_empty_release(3)
    assert (release.nbytes, release.chunks, release.manifest) == (0, (), None)
    ack = await rows.load_weights(FENCE, 7, release)
    assert (ack.epoch, ack.version, ack.digest) == (7, 3, release.digest)
    state = await rows.state(FENCE)
    assert (state.version, state.digest) == (3, release.digest)
    assert state.incarnation == ack.incarnation


def test_two_versions_without_weights_have_two_digests() -> None:
    assert make_empty_release(1).digest != make_empty_release(2).digest
