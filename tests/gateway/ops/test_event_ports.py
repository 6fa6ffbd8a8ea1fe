"""Remedies name ports that work for every engine of a host, and ports that a dead one holds are named."""

import re
import socket

import pytest

from gateway.ops.event_ports import EventPorts
from replicas.event_source import EventSource
from replicas.problems import Problem
from replicas.replica import parse_url

from .examined import TRIED, doctor_lines, examine, free_port

pytestmark = pytest.mark.usefixtures("settings")
OFF = Problem("off", 'start it with "endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"')


def ports(problem: Problem) -> list[int]:
    return [int(port) for port in re.findall(r"tcp://\*:(\d+)", problem.remedy)]


def test_engines_of_one_host_get_ports_of_their_own_and_those_of_another_the_usual_ones():
    known = EventPorts()
    known.add("gpu1", [EventSource("tcp://gpu1:5559", "tcp://gpu1:5560", ""), None])
    assert ports(known.remedy(OFF, "http://gpu1:8000", "gpu1", 1)) == [5557, 5558]
    assert ports(known.remedy(OFF, "http://gpu1:8001", "gpu1", 2)) == [5561, 5563], "each rank adds its number to both"
    assert ports(known.remedy(OFF, "http://gpu1:8002", "gpu1", 1)) == [5565, 5566]
    assert ports(known.remedy(OFF, "http://gpu1:8000", "gpu1", 1)) == [5557, 5558], "the same whenever it is said"
    assert ports(known.remedy(OFF, "http://gpu2:8000", "gpu2", 1)) == [5557, 5558]
    other = Problem("else", "write the endpoint as tcp://*:PORT")
    assert known.remedy(other, "http://gpu1:8000", "gpu1", 1) == other


def test_doctor_gives_two_engines_of_this_machine_different_event_ports(capsys, fake):
    first, second = fake(TRIED), fake(TRIED)
    _, out = doctor_lines(capsys, "--replica-url", first, second)
    said = re.findall(r'"endpoint":"tcp://\*:(\d+)","replay_endpoint":"tcp://\*:(\d+)"', out)
    assert len({port for pair in said for port in pair}) == 4, out


def test_event_ports_that_outlived_their_engine_are_named_and_those_of_a_living_one_are_not(capsys):
    with socket.create_server(("127.0.0.1", 0)) as left, socket.create_server(("127.0.0.1", 0)) as other:
        held, alive = left.getsockname()[1], other.getsockname()[1]
        url = f"http://127.0.0.1:{free_port()}"
        code, found = examine(
            capsys, "--replica-url", f"{url}#events=tcp://127.0.0.1:{held},replay=tcp://127.0.0.1:{free_port()}"
        )
        level, said = found["event ports"]
        assert (
            code == 1 and level == "warn" and f"but {held} of 127.0.0.1 is taken" in said and f"sport = :{held}" in said
        )
        assert "EngineCore" in said and "kill -9" in said and str(alive) not in said
    code, found = examine(capsys, "--replica-url", f"{url}#events=tcp://127.0.0.1:{held}")
    assert code == 1 and "event ports" not in found, "nobody holds it"


async def test_ports_of_an_engine_that_answers_are_its_own():
    known = EventPorts()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        address = parse_url(f"http://127.0.0.1:{free_port()}#events=tcp://127.0.0.1:{port}")
        assert await known.held(address.source, "127.0.0.1") == [port]
        known.add("127.0.0.1", [EventSource(f"tcp://127.0.0.1:{port}", None, "")])
        assert await known.held(address.source, "127.0.0.1") == []
