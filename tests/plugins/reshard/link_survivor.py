"""A process whose peer is lost while their group is formed: writes what it gets, and ends as any process does.

python -m tests.plugins.reshard.link_survivor ROUTE RANK      # ROUTE: of the store, msgpack in hex
"""

import sys

import msgspec

from offbeat.plugins.reshard.group import BrokenLink, PairGroup, meet, open_connection
from offbeat.plugins.reshard.messages import Route
from tests.support.wire_doubles import eager_gloo


def main(route: Route, rank: int) -> None:
    place = meet(route, "session", rank)
    groups = eager_gloo(route.host, route.timeouts.slack_s)
    try:
        with open_connection(lambda: PairGroup(place, groups)):
            sys.stdout.write("formed\n")
    except BrokenLink as broken:
        sys.stdout.write(f"BrokenLink: {broken}\n")


if __name__ == "__main__":
    main(msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Route), int(sys.argv[2]))
