"""Address of this machine, under which other machines of the cluster reach it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# Ray declares functions without the types of their parameters.

import ray


def node_address() -> str:
    """Return the address under which Ray knows this machine."""
    return ray.util.get_node_ip_address()
