import socket

import pytest

from replicas.launch.ports import is_free, pick

HOST = "127.0.0.1"


def test_picked_ports_are_free_distinct_and_out_of_the_kernels_way():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        ephemeral = int(file.read().split()[0])
    first = pick(20, HOST, set(), seed=1)
    assert len(set(first)) == 20
    assert all(is_free(HOST, port) and port < ephemeral for port in first)
    assert not set(first) & set(pick(20, HOST, set(first), seed=1))


def test_a_port_with_a_listener_is_not_free():
    with socket.create_server((HOST, 0)) as server:
        assert not is_free(HOST, server.getsockname()[1])


def test_runs_of_ports_are_consecutive_and_do_not_overlap():
    middle = pick(1, HOST, set(), seed=1)[0] + 5
    firsts = pick(3, HOST, {middle}, seed=1, run=10)
    runs = [set(range(first, first + 10)) for first in firsts]
    assert len(set.union(*runs)) == 30 and middle not in set.union(*runs)
    assert all(is_free(HOST, port) for run in runs for port in run)


def test_more_than_there_are():
    with pytest.raises(OSError, match="no 1 free ports"):
        pick(1, HOST, set(range(65536)))
