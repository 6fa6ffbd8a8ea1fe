"""Redis URLs, the names of replicas in Redis, and connections to the server of a key."""

import ipaddress
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachemap.cluster import parse, without_password
from cachemap.cluster.connect import ANSWER_SECONDS, RedisClients, RedisConnection, connect
from cachemap.cluster.keys import NAME, Keys, scope
from tests.gateway.http.talk import eventually

ME = {"username": "me", "password": "secret", "db": 3}


@pytest.mark.parametrize(
    ("url", "kind", "hosts", "master", "options", "shown"),
    [
        ("redis://me:secret@h:7000/3", "single", [("h", 7000)], "", ME, "h:7000 (single)"),
        ("redis://h", "single", [("h", 6379)], "", {}, "h:6379 (single)"),
        ("REDIS://h", "single", [("h", 6379)], "", {}, "h:6379 (single)"),
        ("rediss://h?ssl_ca_certs=/ca", "single", [("h", 6379)], "", {"ssl_ca_certs": "/ca"}, "h:6379 (single)"),
        ("redis+sentinel://:secret@a:1,b/main/3", "sentinel", [("a", 1), ("b", 26379)], "main",
         {"password": "secret", "db": 3}, "a:1,b:26379 (sentinel main)"),
        ("rediss+cluster://a,[::1]:5", "cluster", [("a", 6379), ("::1", 5)], "", {}, "a:6379,::1:5 (cluster)"),
        ("unix://me:secret@/run/r.sock?db=3", "unix", [], "", {"path": "/run/r.sock", **ME}, "/run/r.sock (unix socket)"),
    ],
)  # fmt: skip
def test_a_url_of_each_kind(url, kind, hosts, master, options, shown):
    one = parse(url)
    assert one[:3] == (kind, hosts, master) and str(one) == shown
    assert {name: one.options[name] for name in options} == options


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://h", "write redis://HOST:PORT"),
        ("redis+magic://h", "write redis://HOST:PORT"),
        ("redis+sentinel://h:1", "name of the primary is missing"),
        ("redis+cluster://h/3", "only database 0"),
        ("redis://a,b", "several hosts need"),
        ("redis://h:port", "'h:port' is not HOST:PORT"),
        ("redis://", "is not HOST:PORT"),
        ("redis://h?protocol=3", "protocol cannot be set"),
        ("redis://h?socket_timeout=60", "socket_timeout cannot be set"),
        ("redis://h?decode_responses=yes", "decode_responses cannot be set"),
        ("redis://:********@h", "the password is hidden here"),
        ("unix://", "the socket's absolute path is missing"),
        ("unix://run/redis.sock", "the socket's absolute path is missing; write unix:///"),
        ("unix:///run/redis.sock?protocol=3", "protocol cannot be set"),
    ],
)
def test_a_wrong_url_says_what_is_right(url, why):
    with pytest.raises(ValueError, match=why):
        parse(url)


@pytest.mark.parametrize("password", ["s3c/ret", "s3c#ret", "s3c?ret", "s3c@ret", "s3c:ret"])
def test_a_password_is_never_shown(password):
    url = f"redis://me:{password}@h:1/2"
    try:
        assert password not in str(parse(url))
    except ValueError as error:
        assert "s3c" not in str(error) and "ret" not in str(error).replace("secret", "") and "%2F" in str(error)
    assert without_password(url) == "redis://me:********@h:1/2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/2", "redis://h:1/2"),
        ("redis://me@h", "redis://me@h"),
        ("unix://me:secret@/run/redis.sock", "unix://me:********@/run/redis.sock"),
        ("rediss+sentinel://:x@a:1,b/main?sentinel_password=y&ssl_ca_certs=/c",
         "rediss+sentinel://:********@a:1,b/main?sentinel_password=********&ssl_ca_certs=/c"),
    ],
)  # fmt: skip
def test_a_url_without_its_password_says_the_rest(url, shown):
    assert without_password(url) == shown


UNLIKE = (
    "localhost-a localhost-b 127.gpu.example 127.example 0.0.0.0.example localhost.gpu.example [2001:db8::1] 10.127.0.1"
)
LOOPBACK = "localhost LOCALHOST localhost. 127.0.0.1 [::1] [0:0::1] 0.0.0.0 [::] [::ffff:127.0.0.1] [::FFFF:7f00:1]"


def test_a_loopback_address_is_called_by_the_hosts_name_and_no_other_host_is():
    for host in UNLIKE.split():
        assert scope(f"{host}:8000") == f"{host}:8000"
    for host in LOOPBACK.split():
        assert scope(f"{host}:8000-dp1") == f"{socket.gethostname()}:8000-dp1"
    another = f"{socket.gethostname()}/127.1.2.3:8000"
    assert scope("127.1.2.3:8000") == scope("[::ffff:127.1.2.3]:8000") == another


def spellings(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> list[str]:
    """Return the spellings of one address that people and programs use."""
    if address.version == 4:
        mapped = ipaddress.IPv6Address(0xFFFF << 32 | int(address))
        return [str(address), f"[::ffff:{address}]", f"[{mapped.exploded}]", f"[{str(mapped).upper()}]"]
    parts = [int(address) >> 16 * place & 0xFFFF for place in range(7, -1, -1)]
    full, short = (":".join(f"{part:{width}x}" for part in parts) for width in ("04", ""))
    return [f"[{text}]" for text in (str(address), address.exploded, full, full.upper(), short)]


ADDRESSES = st.one_of(
    st.ip_addresses(),
    st.builds(ipaddress.IPv6Address, st.integers(0, 300)),
    st.builds(lambda low: ipaddress.IPv4Address(127 << 24 | low), st.integers(0, 300)),
)  # fmt: skip
# where one process listens, whatever it is called
USUAL = {ipaddress.ip_address(one) for one in ("127.0.0.1", "::1", "0.0.0.0", "::")}


@given(ADDRESSES, ADDRESSES)
def test_all_spellings_of_an_address_are_one_name_and_no_two_addresses_are(one, other):
    names = [{scope(f"{host}:8000-dp1") for host in spellings(address)} for address in (one, other)]
    assert len(names[0]) == len(names[1]) == 1
    one, other = (getattr(address, "ipv4_mapped", None) or address for address in (one, other))
    assert (names[0] == names[1]) == (one == other or {one, other} <= USUAL)


def test_names_mean_the_same_on_every_host():
    assert scope("10.0.0.7:8000") == "10.0.0.7:8000"
    assert scope("127.0.0.1:8000") == scope("localhost:8000") != "127.0.0.1:8000"
    one, other = Keys("d", "10.0.0.7:8000", "17.25"), Keys("d", "10.0.0.7:8000", "seen-3")
    assert one.lane == other.lane and one.newest == other.newest and one.lease != other.lease
    # counts mean something to one gateway only
    assert other.incarnation == Keys("d", "10.0.0.7:8000", "").incarnation == "-"
    names = {
        "17.25@10.0.0.7": "17.25",
        "17.25@fe80::1%eth0": "17.25",
        "pid-12": "pid-12",
        "seen-3@::1": "-",
        "x" * 65: "-",
    }
    for told, named in names.items():
        assert Keys("d", "10.0.0.7:8000", told).incarnation == named and NAME.fullmatch(named)
    for key in (one.lease, one.head, one.deltas, one.snapshot, one.request, one.newest):
        assert key.startswith(f"hitherto:1:d:{{{one.lane}}}:map2:")


async def test_a_key_that_moves_gives_the_connection_back_to_the_server_that_had_it(redis_server):
    first, second = (connect(parse(redis_server.url)) for _ in range(2))

    class Moving:
        served_by, failures = first, 0

        async def to(self, key):
            return self.served_by

    ways = Moving()
    line = RedisConnection(ways, "key")
    for ways.served_by in (first, second):
        assert await line.ask([("ECHO", "a"), ("ECHO", "b")]) == [b"a", b"b"]
    given_back = await first.connection_pool.get_connection()
    assert (given_back is line._connection, given_back.socket_timeout) == (False, ANSWER_SECONDS)
    assert len(first.connection_pool._in_use_connections) == 1
    await first.connection_pool.release(given_back)
    for client in (first, second):
        await client.aclose()


async def test_a_connection_that_the_server_closed_or_that_may_lead_to_the_old_primary_is_made_anew(redis_server):
    """A failover may leave the old primary's connection open, or close it while nothing is asked."""
    ways, who = RedisClients(parse(redis_server.url)), [("CLIENT", "ID")]
    line = RedisConnection(ways, "key")
    try:
        first = await line.ask(who)
        assert await line.ask(who) == first
        ways.failed()  # says who asked for something else
        second = await line.ask(who)
        assert second != first and await line.ask(who) == second
        with redis_server.client() as client:
            assert client.client_kill_filter(_id=second[0]) == 1
        await eventually(line._connection._reader.at_eof)
        assert await line.ask(who) != second
    finally:
        await ways.aclose()
