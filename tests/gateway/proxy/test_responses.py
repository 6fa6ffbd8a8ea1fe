"""Stored responses: what is said of one reaches the replica that has it, known or not, or is 404 from all."""

import json

import pytest

from gateway.http.messages import Request
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.responses import stored as responses
from gateway.proxy.responses.stored import referred_to

from ..http.talk import read_request
from .replies import SSE_HEAD, answers, chunk, post, reply
from .stack import stack

NOT_FOUND = b'{"error":{"message":"Response with id \'resp_1\' not found.","code":404}}'
CREATED = b'event: response.created\ndata: {"response":{"id":"resp_1","object":"response"},"sequence_number":0}\n\n'


class Engine:
    """Keeps what it made: `made` are ids it will give its next responses, `seen` what it was asked."""

    def __init__(self, *made, stream=False):
        self.made, self.kept, self.seen, self.stream = list(made), set(), [], stream

    async def script(self, reader, writer):
        while True:
            head, body = await read_request(reader)
            method, target = head.split()[:2]
            self.seen.append(target)
            path = target.partition(b"?")[0].split(b"/")
            about = path[3] if len(path) > 3 else json.loads(body).get("previous_response_id", "").encode()
            if about and about not in self.kept:
                status, answer = b"404 Not Found", NOT_FOUND
            elif method == b"POST" and target == b"/v1/responses":
                self.kept.add(id := self.made.pop(0))
                status, answer = b"200 OK", b'{"id":"%b","output":[{"id":"msg_7"}]}' % id
            else:
                status, answer = b"200 OK", b'{"id":"%b"}' % about
            if self.stream and method == b"POST":
                writer.write(SSE_HEAD + chunk(CREATED) + b"0\r\n\r\n")
            else:
                writer.write(reply(answer, status))


def get(path=b"/v1/responses/resp_1"):
    return b"GET %b HTTP/1.1\r\nHost: x\r\n\r\n" % path


def create(**fields):
    return post({"model": "m", "input": "hi", **fields}, path=b"/v1/responses")


async def ask(talk, request):
    status, headers, body = await talk.ask(request)
    return status, headers.get("x-hitherto-replica"), body


@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_said_of_a_response_goes_to_its_maker(stream):
    engines = [Engine(b"resp_1", b"resp_2", stream=stream) for _ in range(3)]
    async with stack(*(one.script for one in engines)) as s:
        talk = await s.talk()
        _, maker, _ = await ask(talk, create())
        for request in (
            get(),
            get(b"/v1/responses/resp_1?stream=true"),
            create(previous_response_id="resp_1"),
            post(b"", path=b"/v1/responses/resp_1/cancel"),
        ):
            status, replica, _ = await ask(talk, request)
            assert (status, replica) == (200, maker)
        assert sorted(len(one.seen) for one in engines) == [0, 0, 5]


@pytest.mark.parametrize(
    "request_", [get(), create(previous_response_id="resp_1"), post(b"", path=b"/v1/responses/resp_1/cancel")]
)
async def test_a_response_that_passed_elsewhere_is_found_and_noted(request_):
    engines = [Engine() for _ in range(6)]
    engines[4].kept.add(b"resp_1")
    engines[4].made.append(b"resp_2")
    async with stack(*(one.script for one in engines), retries=0) as s:
        talk = await s.talk()
        status, replica, _ = await ask(talk, request_)
        assert (status, replica) == (200, list(s.proxy.backends)[4])
        asked = sum(len(one.seen) for one in engines)
        assert (await ask(talk, get()))[:2] == (200, replica)
        assert sum(len(one.seen) for one in engines) == asked + 1
        assert s.faults == []  # not to have one is no illness


async def test_not_to_have_a_response_uses_no_attempt_up():
    """Two have it not, the third fails, and the fourth has it: that is one failure, and one more try is allowed."""
    engines = [Engine() for _ in range(4)]
    engines[3].kept.add(b"resp_1")

    fails = answers(b"{}", b"500 Oh")
    scripts = [engines[0].script, engines[1].script, fails, engines[3].script]
    async with stack(*scripts, retries=1) as s:
        status, replica, _ = await ask(await s.talk(), get())
        assert (status, replica) == (200, list(s.proxy.backends)[3])
        assert [len(one.seen) for one in engines] == [1, 1, 0, 1]


async def test_what_nobody_has_is_the_engines_own_404():
    engines = [Engine() for _ in range(3)]
    async with stack(*(one.script for one in engines)) as s:
        talk = await s.talk()
        assert (await ask(talk, get()))[::2] == (404, NOT_FOUND)
        assert [len(one.seen) for one in engines] == [1, 1, 1]


async def test_when_the_maker_is_gone_the_others_are_asked():
    engines = [Engine(b"resp_1"), Engine(b"resp_1")]
    async with stack(*(one.script for one in engines)) as s:
        talk = await s.talk()
        _, maker, _ = await ask(talk, create())
        s.proxy.remove(maker)
        assert (await ask(talk, get()))[::2] == (404, NOT_FOUND)


async def test_only_so_many_are_noted(monkeypatch):
    monkeypatch.setattr(responses, "MOST", 2)
    engine = Engine(*(b"resp_%d" % number for number in range(5)))
    async with stack(engine.script) as s:
        talk = await s.talk()
        for _ in range(5):
            await ask(talk, create())
        assert [number for number in range(5) if s.proxy.placing.responses.maker(f"resp_{number}")] == [3, 4]


@pytest.mark.parametrize(
    ("target", "body", "expected"),
    [
        (b"/v1/responses/resp_1", b"", "resp_1"),
        (b"/v1/responses/resp_1/input_items?after=x", b"", "resp_1"),
        (b"/v1/responses/", b"", None),
        (b"/v1/responses", b'{"previous_response_id" : "resp_9"}', "resp_9"),
        (b"/v1/responses", b'{"previous_response_id": null}', None),
        (b"/v1/responses", b'{"previous_response_id": 9}', None),
        (b"/v1/responses", json.dumps({"input": "x", "previous_response_id": "resp_9"}).encode(), "resp_9"),
        (b"/v1/responses", json.dumps({"input": '"previous_response_id": "resp_9"'}).encode(), None),
        (b"/v1/responses", json.dumps({"input": "x", "metadata": {"previous_response_id": "resp_9"}}).encode(), None),
        (b"/v1/responses_of_mine", b"", None),
        (b"/v1/responses/render", b"", None),
        (b"/v1/responses/" + b"r" * 200, b"", "r" * 200),
        (b"/v1/responses/" + b"r" * 201, b"", None),
    ],
)
def test_which_response_a_request_is_about(target, body, expected):
    request = Request("POST", target, [], body, False, True)
    prompt = Pipeline(None, "m", 16).prepare(request.path, body or b"{}")
    assert (referred_to(request) or prompt.previous_response) == expected


def test_of_many_responses_those_made_or_asked_for_last_are_kept(monkeypatch):
    monkeypatch.setattr(responses, "MOST", 3)
    kept = responses.Responses()
    for number in (1, 2, 1, 3, 1, 4, 1):
        kept.answered("r0", f"resp_{number}", False, b"")
    assert [*kept._stored] == ["resp_3", "resp_4", "resp_1"]
