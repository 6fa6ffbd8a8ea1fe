"""Names in Redis. Nothing is stored under them but block hashes, fingerprints of engine keys, and counters.

    hitherto:1:DEPLOYMENT:{LANE}:map:REPLICA:life                 its newest incarnation
    hitherto:1:DEPLOYMENT:{LANE}:map:REPLICA:INCARNATION:lease    token of the gateway that writes, 3 s
                                                        :head     number of the last delta
                                                        :deltas   stream; entry n-0 is delta n
                                                        :snapshot list of pieces: header, then what is held
                                                        :wish     a gateway that mirrors asks for something

What is in braces decides the place in a Cluster: all of a replica's keys lie together, in one of 16 lanes, so that one
command can speak of all replicas of a lane.
"""

import ipaddress
import re
import socket
from zlib import crc32

SCHEMA = 1
LANES = 16
KEEP_SECONDS = 24 * 3600  # keys of replicas nobody asks for any more; those in use are renewed with the lease
RESYNC, REWRITE = b"1", b"2"  # wishes: to read the engine's events anew; to write what lies in Redis anew
THIS_HOST = ("127.0.0.1", "::1", "0.0.0.0", "::")  # what whoever connects there takes for its own machine
UNNAMED = "-"  # an incarnation of which is not known when it began
NAME = re.compile(r"[A-Za-z0-9.-]{1,64}")  # of an incarnation; `tend.lua` deletes any other


def scope(replica: str) -> str:
    """A replica's name that means the same on every host, however its address is spelled; different addresses have
    different ones. `replica` is HOST:PORT with whatever names one of several ranks behind the port."""
    host, colon, port = replica.rpartition(":")
    return f"{_place(host.removeprefix('[').removesuffix(']'))}:{port}" if colon else replica


def _place(host: str) -> str:
    """A host as all hosts call it: this one by its name, with the address where that is another than the usual loopback
    ones."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return socket.gethostname() if host.rstrip(".").lower() == "localhost" else host
    address = getattr(address, "ipv4_mapped", None) or address
    if str(address) in THIS_HOST:
        return socket.gethostname()
    if address.is_loopback:
        return f"{socket.gethostname()}/{address}"
    return f"[{address}]" if address.version == 6 else str(address)


def life(incarnation: str) -> str:
    """An incarnation as all gateways name it: by when the process began, or its pid. A count of what one gateway
    happened to see is no name, and no part of one is the address behind "@": gateways may reach one engine at
    several."""
    name = incarnation.partition("@")[0]
    return name if NAME.fullmatch(name) and not name.startswith("seen-") else UNNAMED


class Keys:
    """The keys of one incarnation of one replica."""

    def __init__(self, deployment: str, replica: str, incarnation: str):
        self.incarnation = life(incarnation)
        self.lane = crc32(scope(replica).encode()) % LANES
        self.replica = f"hitherto:{SCHEMA}:{deployment}:{{{self.lane}}}:map:{scope(replica)}"
        base = f"{self.replica}:{self.incarnation}"
        self.life = f"{self.replica}:life"
        self.lease, self.head, self.deltas = f"{base}:lease", f"{base}:head", f"{base}:deltas"
        self.snapshot, self.wish = f"{base}:snapshot", f"{base}:wish"
