"""Host names that move, have several addresses or none, followed by a real fleet over real sockets on 127.0.0.x."""

import socket
import threading

import pytest

from replicas import State
from replicas.names import resolve

from .conftest import answering

pytestmark = pytest.mark.usefixtures("impatient")

READY, FAILED = State.READY, State.FAILED
A, B, C = "127.0.0.2", "127.0.0.3", "127.0.0.4"


@pytest.fixture
def hosts(monkeypatch):
    """host name -> its addresses; everybody in this process resolves by it."""
    table, real = {}, socket.getaddrinfo

    def getaddrinfo(host, port, *args, **more):
        if host not in table:
            return real(host, port, *args, **more)
        if callable(table[host]):
            return table[host]()
        if not table[host]:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [entry for one in table[host] for entry in real(one, port, *args, **more)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return table


@pytest.fixture
def engines(serve):
    """`engines(address)` starts an engine that publishes on tcp://*; all on one port, as behind one name."""
    stops = {}

    async def start(address, started=1.0):
        asked = []
        pages = answering({
            "/health": "",
            "/v1/models": {"data": [{"id": "m", "max_model_len": 4096}]},
            "/version": {"version": "0.32.0"},
            "/metrics": f'process_start_time_seconds {started}\nvllm:cache_config_info{{block_size="16",num_gpu_blocks="64"}} 1.0\n',
            "/kv_event_sources": {"0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}},
        })  # fmt: skip

        async def answer(request):
            asked.append(request.headers["Host"])
            return await pages(request)

        url = await serve(answer, start.port, address)
        start.port, stops[address] = int(url.rpartition(":")[2]), serve.stop
        return asked

    start.port, start.stop = 0, lambda address: stops[address]()
    return start


@pytest.fixture
def comes(until):
    async def comes(replica, condition=lambda replica: True, state=READY):
        return await until(
            lambda: replica.state is state and condition(replica),
            lambda: f"{replica.state}, {replica.address}: {replica.reason}; {replica.problems}",
        )

    return comes


@pytest.fixture
def named(fleet, hosts, engines, comes):
    """`named(*addresses)` adds the engine of a host name that has these addresses, and waits until it is READY."""

    async def named(*addresses, fragment=""):
        hosts["gpu.test"] = list(addresses)
        replica = fleet.add(f"http://gpu.test:{engines.port}{fragment}")
        await comes(replica)
        return replica

    return named


async def test_a_name_that_moves_is_another_incarnation(fleet, hosts, engines, comes, named):
    await engines(A)
    asked = await engines(B)
    replica = await named(A)
    assert (replica.address, *replica.events[:2]) == (A, f"tcp://{A}:5557", f"tcp://{A}:5558")
    before = replica.incarnation
    hosts["gpu.test"] = [B]
    await engines.stop(A)
    await comes(replica, lambda one: one.address == B)
    assert replica.events[:2] == (f"tcp://{B}:5557", f"tcp://{B}:5558")
    assert replica.incarnation != before, "both began at the same time, and are two engines all the same"
    assert [new for _, _, new in fleet.seen][-2:] == [State.WARMING, READY]
    assert set(asked) == {f"gpu.test:{engines.port}"}, "the engine is asked under its name"


async def test_a_name_with_two_addresses_is_one_engine_and_the_operator_is_told(engines, comes, named):
    await engines(A)
    asked = await engines(B, started=2.0)
    replica = await named(B, A)  # in whatever order the name server likes
    assert replica.address == A and asked == [], "each gateway chooses the same one"
    (said,) = [one for one in replica.problems if "leads to other addresses as well (127.0.0.3)" in one]
    assert "its own address" in said
    before = replica.incarnation
    await engines.stop(A)
    await comes(replica, lambda one: one.address == B)
    assert replica.incarnation != before


async def test_a_name_is_resolved_once_while_its_engine_answers(fleet, hosts, engines, comes, until):
    probed, asked = await engines(A), []
    await engines(B, started=2.0)
    real = socket.getaddrinfo

    def answer():
        asked.append(A if not asked else B)
        return real(asked[-1], 0, type=socket.SOCK_STREAM)

    hosts["gpu.test"] = answer
    replica = fleet.add(f"http://gpu.test:{engines.port}")
    await comes(replica)
    before, seen = replica.incarnation, len(probed)
    await until(lambda: len(probed) > seen + 12)  # several full looks
    assert (replica.state, replica.address, replica.incarnation, asked) == (READY, A, before, [A])


async def test_a_name_server_that_hangs_holds_up_nothing_and_is_asked_once(fleet, hosts, engines, comes, named, until):
    await engines(A)
    replica = await named(A)
    asked, released = [], threading.Event()

    def hang():
        asked.append(1)
        released.wait(20)
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    hosts["gpu.test"] = hang
    await engines.stop(A)
    await until(lambda: asked and replica.state is FAILED)
    other = fleet.add(f"http://{B}:{engines.port}")
    await engines(B)
    await comes(other)
    await engines(A, started=2.0)
    await comes(replica, lambda one: one.address == A)
    assert asked == [1], "one question at a time"
    released.set()


async def test_a_name_that_is_unknown_says_so_and_is_tried_again(fleet, hosts, engines, comes):
    await engines(A)
    hosts["gpu.test"] = []
    replica = fleet.add(f"http://gpu.test:{engines.port}")
    await comes(replica, state=FAILED)
    assert "host name 'gpu.test' does not resolve" in replica.reason
    hosts["gpu.test"] = [A]
    await comes(replica, lambda one: one.address == A)


async def test_an_engine_that_has_two_names_has_a_problem(fleet, engines, comes, named, caplog):
    await engines(A)
    first = await named(A)
    other = fleet.add(f"http://{A}:{engines.port}")
    for one, another in ((first, other), (other, first)):
        said = f"may be the same engine as {another.id}: then its load and its cache count under each name"
        await comes(one, lambda one: any(said in problem for problem in one.problems))
        assert sum(said in record.getMessage() for record in caplog.records) == 1
    await fleet.remove(other.id)
    await comes(first, lambda one: not any("same engine" in problem for problem in one.problems))


async def test_the_address_family_that_answers_is_taken(engines, named):
    """localhost is both; an engine listens on one of them. Two families are most often one machine: no warning."""
    await engines("::1")
    replica = await named("::1", "127.0.0.1")
    assert replica.address == "::1" and replica.events.endpoint == "tcp://[::1]:5557"
    assert not any("leads to other addresses" in one for one in replica.problems)


async def test_event_endpoints_that_name_the_engines_host_lead_where_the_engine_is(engines, named):
    await engines(A)
    replica = await named(A, fragment="#events=tcp://gpu.test:7001,replay=tcp://events.test:7002")
    assert replica.events[:2] == (f"tcp://{A}:7001", "tcp://events.test:7002")


@pytest.mark.parametrize("host", ["a" * 64 + ".test", "a..b", "\udcff"])
async def test_a_host_nobody_can_ask_for_is_an_error_and_no_more(host):
    with pytest.raises(OSError):
        await resolve(host)
