"""Binds the sockets of collective libraries to the network interface of the run's address.

gloo and NCCL open their own listening sockets and read the interface from the environment. If it is
not set, gloo asks the resolver for the machine's name, and NCCL uses the first interface that is
not loopback.
"""

from collections.abc import MutableMapping

import psutil

from offbeat.messages.failures import OffbeatError


class AddressNotLocal(OffbeatError):
    """This machine has no network interface with the address that Ray has registered for it.

    Fix: start Ray with ``--node-ip-address``.
    """

    address: str
    known: str

    def __str__(self) -> str:
        return (
            f"no network interface of this machine has the address {self.address} that Ray has "
            f"registered for it; it has {self.known}. Start Ray here with --node-ip-address set to "
            "one of them, so that trainer ranks and engines can connect to it"
        )


def find_interface(address: str) -> str:
    """Return the name of the network interface that has this address.

    Raises:
        AddressNotLocal: No interface has it.
    """
    found = {
        each.address.partition("%")[0]: name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family.name in ("AF_INET", "AF_INET6")
    }
    if address not in found:
        raise AddressNotLocal(address, ", ".join(sorted(found)))
    return found[address]


def bind_collectives(address: str, environment: MutableMapping[str, str]) -> None:
    """Make gloo and NCCL use this address's interface. Variables set by the user stay unchanged.

    Raises:
        AddressNotLocal: No interface has it.
    """
    name = find_interface(address)
    environment.setdefault("GLOO_SOCKET_IFNAME", name)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={name}")  # "=": exact name, not a prefix
