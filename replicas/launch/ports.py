"""The search for free TCP ports for engines."""

import random
import socket


def is_free(host: str, port: int) -> bool:
    """Return whether a server could listen on this port now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen()
        except OSError:
            return False
    return True


def pick(count: int, host: str, taken: set[int], seed: int | None = None, run: int = 1) -> list[int]:
    """Find `count` ranges of free TCP ports, and return the first port of each range.

    `host`: where the ports have to be free. `taken`: ports that must not be used. `seed`: makes the search repeatable.
    `run`: the number of consecutive ports in a range.
    All ports are below the kernel's ephemeral range, whose ports may be given to outgoing connections while an engine
    restarts. The search begins at a random port, so that two gateways on one machine rarely collide. Raises OSError if
    there are not enough free ports.
    """
    top = _ephemeral_start()
    port = random.Random(seed).randrange(15_000, top - 1)
    found: list[int] = []
    free = 0  # free ports in a row
    for _ in range(top - 15_000):
        free = free + 1 if port not in taken and is_free(host, port) else 0
        if free == run:
            found.append(port - run + 1)
            free = 0
        if len(found) == count:
            return found
        port += 1
        if port == top:
            port, free = 15_000, 0
    raise OSError(f"no {count * run} free ports between 15000 and {top} on {host}")


def _ephemeral_start() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            return min(max(int(file.read().split()[0]), 20_000), 60_000)
    except OSError:
        return 32_768
