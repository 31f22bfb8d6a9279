"""Address of this machine, under which other machines of the cluster reach it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import ray

from offbeat.messages.failures import StartFailed
from offbeat.weight_sync.rendezvous.interface import AddressNotLocal, interface_of


def node_address() -> str:
    """Return the address under which Ray knows this machine."""
    return ray.util.get_node_ip_address()


def reachable_address(process: str) -> str:
    """Return the address under which Ray knows this machine, where ``process`` will listen.

    Raises:
        StartFailed: No network interface here has it, so nobody could connect to it.
    """
    address = node_address()
    try:
        interface_of(address)
    except AddressNotLocal as error:
        raise StartFailed(process, str(error)) from error
    return address
