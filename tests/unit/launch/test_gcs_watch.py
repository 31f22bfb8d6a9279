"""How long the driver waits for a control service that is gone."""

import pytest

from offbeat.launch.gcs_watch import JOINED_LIMIT_S, GcsLost, GcsWatch


class Service:
    """A control service and the time: each look takes none."""

    def __init__(self) -> None:
        self.now_s, self.is_there, self.looks = 0.0, True, list[tuple[str, int]]()

    def clock(self) -> float:
        return self.now_s

    def reach(self, host: str, port: int) -> None:
        self.looks.append((host, port))
        if not self.is_there:
            raise ConnectionRefusedError("Connection refused")

    def watch(self, limit_s: float, address: str = "10.0.0.1:6379") -> GcsWatch:
        return GcsWatch(address, limit_s, reach=self.reach, clock=self.clock)

    def after(self, seconds: float, watch: GcsWatch) -> None:
        """Let the time pass, a look twice a second."""
        for _ in range(int(seconds * 2)):
            self.now_s += 0.5
            watch.check()


def test_a_service_that_is_gone_for_good_ends_the_run_before_ray_ends_the_process() -> None:
    service = Service()
    watch = service.watch(JOINED_LIMIT_S)
    service.after(100, watch)
    service.is_there = False
    with pytest.raises(
        GcsLost, match=r"GCS\) at 10\.0\.0\.1:6379 has not answered for 4\d s: Conn"
    ):
        service.after(60, watch)
    assert service.now_s < 150
    assert not watch.answers


def test_a_service_that_comes_back_in_time_is_forgiven_each_time() -> None:
    service = Service()
    watch = service.watch(10)
    for _ in range(5):
        service.is_there = False
        service.after(9, watch)
        assert not watch.answers
        service.is_there = True
        service.after(3, watch)
        assert watch.answers


def test_it_is_looked_at_every_other_second() -> None:
    service = Service()
    service.after(100, service.watch(10))
    assert len(service.looks) == 50


def test_an_address_of_the_sixth_version_is_taken_apart() -> None:
    service = Service()
    service.watch(10, "[::1]:6379").check()
    assert service.looks == [("::1", 6379)]
