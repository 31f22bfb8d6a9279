"""Which network interface the sockets of gloo and NCCL are bound to."""

import pytest

from offbeat.weight_sync.rendezvous.interface import (
    AddressNotLocal,
    bind_collectives,
    find_interface,
)


def test_a_private_run_stays_on_loopback() -> None:
    loopback, environment = find_interface("127.0.0.1"), dict[str, str]()
    bind_collectives("127.0.0.1", environment)
    assert loopback.startswith("lo")
    assert environment == {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": f"={loopback}"}


def test_what_the_user_has_set_stays() -> None:
    environment = {"NCCL_SOCKET_IFNAME": "ib0"}
    bind_collectives("127.0.0.1", environment)
    assert environment["NCCL_SOCKET_IFNAME"] == "ib0"


def test_an_address_of_another_machine_is_refused_with_the_fix() -> None:
    with pytest.raises(AddressNotLocal, match=r"192\.0\.2\.1 .* 127\.0\.0\.1.*--node-ip-address"):
        find_interface("192.0.2.1")
