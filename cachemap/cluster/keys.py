"""The keys in Redis. Their values have only block hashes, tags of engine keys, and counters.

    hitherto:1:DEPLOYMENT:{LANE}:map:REPLICA:life                 name of the replica's newest incarnation
    hitherto:1:DEPLOYMENT:{LANE}:map:REPLICA:INCARNATION:lease    token of the gateway that writes, 3 s
                                                        :head     number of the last delta
                                                        :deltas   stream of changes; entry n-0 is delta n
                                                        :snapshot list of pieces: header, then the blocks held
                                                        :wish     a request by another gateway to the one that writes

An incarnation is one run of the engine process. The part in braces decides the key's slot in a Cluster: all keys of a
replica are in one of 16 lanes, so that one command can cover all replicas of a lane.
"""

import ipaddress
import re
import socket
from zlib import crc32

SCHEMA = 1
LANES = 16
KEEP_SECONDS = 24 * 3600  # the time that unused keys stay; the keys of a leased replica are renewed with its lease
RESYNC, REWRITE = b"1", b"2"  # wishes: request the engine's events again; write the data in Redis again
THIS_HOST = ("127.0.0.1", "::1", "0.0.0.0", "::")  # addresses that mean the machine of whoever connects
UNNAMED = "-"  # an incarnation whose start time is unknown
NAME = re.compile(r"[A-Za-z0-9.-]{1,64}")  # an incarnation's name; `tend.lua` deletes any other


def scope(replica: str) -> str:
    """Return a name for a replica that gateways on all hosts agree on, however they spell the replica's address.

    Different addresses have different names. `replica`: HOST:PORT, with a suffix if several ranks share the port.
    """
    host, colon, port = replica.rpartition(":")
    return f"{_place(host.removeprefix('[').removesuffix(']'))}:{port}" if colon else replica


def _place(host: str) -> str:
    """Return a name for a host that does not depend on the machine where this runs.

    Loopback addresses become this machine's host name, with the address appended if it is an unusual one.
    """
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
    """Return the part of an incarnation's id that is the same in all gateways: the process's start time, or its pid.

    An id that counts what one gateway saw ("seen-...") gives UNNAMED. The address after "@" is left out, as gateways
    may reach one engine at several addresses.
    """
    name = incarnation.partition("@")[0]
    return name if NAME.fullmatch(name) and not name.startswith("seen-") else UNNAMED


class Keys:
    """The Redis keys of one incarnation (run of the engine process) of one replica."""

    def __init__(self, deployment: str, replica: str, incarnation: str):
        self.incarnation = life(incarnation)
        self.lane = crc32(scope(replica).encode()) % LANES
        self.replica = f"hitherto:{SCHEMA}:{deployment}:{{{self.lane}}}:map:{scope(replica)}"
        base = f"{self.replica}:{self.incarnation}"
        self.life = f"{self.replica}:life"
        self.lease, self.head, self.deltas = f"{base}:lease", f"{base}:head", f"{base}:deltas"
        self.snapshot, self.wish = f"{base}:snapshot", f"{base}:wish"
