"""The Redis keys of the shared cache map. Their values have only block hashes, tags of engine keys, and counters.

    hitherto:1:DEPLOYMENT:{LANE}:map2:REPLICA:newest              name of the newest incarnation
    hitherto:1:DEPLOYMENT:{LANE}:map2:REPLICA:INCARNATION:lease   token of the gateway that leads, 3 s
                                                         :head     number of the last delta
                                                         :deltas   stream of changes; entry n-0 is delta n
                                                         :snapshot list of pieces: header, then the blocks held
                                                         :request  a request by another gateway to the leader

An incarnation is one run of the engine process. The part in braces decides the key's hash slot in a Redis Cluster. All
keys of a replica are in one of 16 lanes (parts of the key space), so that one command can cover all replicas of a lane.
"""

import ipaddress
import re
import socket
from zlib import crc32

SCHEMA = 1  # the version of all keys that gateways share
FORMAT = 2  # the version of the map's deltas and snapshots
LANES = 16
KEEP_SECONDS = 24 * 3600  # how long unused keys stay; the keys of a leased replica are renewed with its lease
RESYNC, REWRITE = b"1", b"2"  # requests to a leader: read the engine's events again; write the data in Redis again
THIS_HOST = ("127.0.0.1", "::1", "0.0.0.0", "::")  # addresses that mean the machine of whoever connects
UNNAMED = "-"  # an incarnation whose start time is unknown
NAME = re.compile(r"[A-Za-z0-9.-]{1,64}")  # an incarnation's name; `tend.lua` deletes any other


def scope(replica: str) -> str:
    """Return a name for a replica that is the same in gateways on all hosts, however they spell the replica's address.

    Different addresses have different names. A loopback address becomes this machine's host name, with the address
    appended if it is an unusual one. `replica`: HOST:PORT, with a suffix if several data-parallel ranks share the port.
    """
    host, colon, port = replica.rpartition(":")
    if not colon:
        return replica
    host = host.removeprefix("[").removesuffix("]")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return f"{socket.gethostname() if host.rstrip('.').lower() == 'localhost' else host}:{port}"
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback or str(address) in THIS_HOST:
        usual = str(address) in THIS_HOST
        return f"{socket.gethostname()}{'' if usual else f'/{address}'}:{port}"
    return f"{f'[{address}]' if address.version == 6 else address}:{port}"


class Keys:
    """The Redis keys of one incarnation (run of the engine process) of one replica.

    `incarnation`: the run's id at this gateway. The keys have only the part of the id that is the same in all gateways:
    the process's start time, or its pid. The address after "@" is left out, as gateways may reach one engine at several
    addresses. If the id only counts what this gateway saw ("seen-..."), the keys have "-" instead (UNNAMED).
    """

    def __init__(self, deployment: str, replica: str, incarnation: str):
        name = incarnation.partition("@")[0]
        self.incarnation = name if NAME.fullmatch(name) and not name.startswith("seen-") else UNNAMED
        self.lane = crc32(scope(replica).encode()) % LANES
        self.replica = f"hitherto:{SCHEMA}:{deployment}:{{{self.lane}}}:map{FORMAT}:{scope(replica)}"
        base = f"{self.replica}:{self.incarnation}"
        self.newest = f"{self.replica}:newest"
        self.lease, self.head, self.deltas = f"{base}:lease", f"{base}:head", f"{base}:deltas"
        self.snapshot, self.request = f"{base}:snapshot", f"{base}:request"
