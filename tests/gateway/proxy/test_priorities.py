"""What engines are told of a request's class, between real sockets."""

import json
from contextlib import asynccontextmanager

import pytest

from gateway.proxy.admission.overload import Overload
from gateway.proxy.admission.priorities import LONGEST_READ
from policies import Classes, QosClass, Rule, Rules
from replicas.engines.vllm import VLLM

from ..http.talk import read_request
from .replies import ASKS, CHAT, COMPLETIONS, MESSAGES, RESPONSES, answers, post, reply
from .stack import stack

PREMIUM, FREE = QosClass("premium", 0.1, 100), QosClass("free", 0.6, 10)
CLASSES = Classes((PREMIUM, FREE), (Rule(PREMIUM, ("x-tier", "premium")), Rule(FREE)))


class Engine:
    """Keeps the bodies and the priorities in headers that it is sent."""

    def __init__(self):
        self.bodies, self.headers = [], []

    async def __call__(self, reader, writer):
        while True:
            head, body = await read_request(reader)
            self.bodies.append(json.loads(body))
            lines = [line.split(b": ", 1) for line in head.split(b"\r\n")[1:-2]]
            self.headers.append([value for name, value in lines if name.lower() == b"x-vllm-priority"])
            writer.write(reply())


@asynccontextmanager
async def classed(engine, classes=CLASSES, takes_priority=True):
    overload = Overload(classes, Rules(("observe",)), None) if classes else None
    async with stack(engine, overload=overload) as s:
        for backend in s.proxy.backends.values():
            backend.replica.takes_priority = takes_priority
        yield s


async def send(s, path=CHAT, headers=b"", **more):
    assert (await s.ask(post({**ASKS[path], **more}, path.encode(), headers)))[0] == 200


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, RESPONSES])
async def test_an_engine_that_takes_priorities_gets_that_of_the_class_the_lower_first(path):
    engine = Engine()
    async with classed(engine) as s:
        await send(s, path, b"x-tier: premium\r\n")
        await send(s, path)
        assert [one["priority"] for one in engine.bodies] == [0, 90]
        assert [{**one, "priority": 0} for one in engine.bodies] == [{**ASKS[path], "priority": 0}] * 2


async def test_a_clients_own_priority_does_not_pass_the_classes():
    engine = Engine()
    async with classed(engine) as s:
        await send(s, priority=-1000)
        assert [one["priority"] for one in engine.bodies] == [90]


@pytest.mark.parametrize(
    "own",
    [
        b'{"priority":-1000,"input":"hello"}',
        b'{"input":"hello","priorit\\u0079":-1000}',
        b'{"temperature":NaN,"priority":-1000}',  # Python reads it
        b'{"priority":0,"priority":-1000} ',
    ],
)
@pytest.mark.parametrize("path", [b"/pooling", b"/v1/embeddings", b"/invocations", b"/v1/chat/completions/batch"])
@pytest.mark.parametrize("takes_priority", [True, False])
async def test_nor_where_its_body_is_not_read(path, own, takes_priority):
    engine = Engine()
    async with classed(engine, takes_priority=takes_priority) as s:
        for headers, priority in ((b"", 90), (b"x-tier: premium\r\n", 0)):
            await s.ask(post(own, path, headers))
            assert engine.bodies[-1]["priority"] == priority


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, "/score", "/invocations"])
async def test_a_body_in_which_no_priority_can_be_written_is_refused(path, encoding):
    """Python reads these encodings, and so vLLM does."""
    engine = Engine()
    async with classed(engine) as s:
        talker = await s.talk()
        body = json.dumps({"model": "m", "messages": [], "priority": -1000}).encode(encoding)
        status, _, answer = await talker.ask(post(body, path.encode()))
        assert (status, engine.bodies) == (400, []) and b"must be a JSON object in UTF-8" in answer


LONG = 3 * LONGEST_READ


@pytest.mark.parametrize(
    "own",
    [
        b'{"input":"%b","priority":-1000}' % (b"a" * LONG),
        b'{"input":"%b","priorit\\u0079":-1000}' % (b"a" * LONG),
        b'{"input":"%b","pri\\u006Frity":-1000}' % (b"a" * LONG),
        b'{"\\u0070\\u0072\\u0069\\u006f\\u0072\\u0069\\u0074\\u0079":-1000,"input":"%b"}' % (b"\\u4e2d" * LONG),
    ],
)
async def test_a_long_body_is_searched_and_not_read(own, monkeypatch):
    """Reading 12 MiB takes the event loop 20 ms and more."""
    engine = Engine()
    read = []
    monkeypatch.setattr("gateway.proxy.admission.priorities.decode", lambda body: read.append(len(body)))
    async with classed(engine) as s:
        await s.ask(post(own, b"/score"))
        assert engine.bodies[-1]["priority"] == 90 and not read


async def test_an_engine_that_takes_no_priorities_gets_none_but_in_place_of_a_clients_own():
    engine = Engine()
    async with classed(engine, takes_priority=False) as s:
        for path in (CHAT, MESSAGES):
            await send(s, path)
        assert engine.bodies == [ASKS[CHAT], ASKS[MESSAGES]] and engine.headers == [[], []]
        await send(s, priority=-1000)
        assert engine.bodies[-1]["priority"] == 90


async def test_where_the_api_has_no_priority_a_header_tells_it():
    engine = Engine()
    async with classed(engine) as s:
        await send(s, MESSAGES)
        await send(s, MESSAGES, b"x-tier: premium\r\n")
        await send(s, CHAT)
        assert engine.headers == [[b"90"], [b"0"], []]
        assert engine.bodies == [ASKS[MESSAGES], ASKS[MESSAGES], {**ASKS[CHAT], "priority": 90}]


async def test_an_engine_without_such_a_header_gets_none(monkeypatch):
    monkeypatch.setattr(VLLM.__class__, "priority_header_paths", ())
    engine = Engine()
    async with classed(engine) as s:
        await send(s, MESSAGES)
        assert (engine.bodies, engine.headers) == ([ASKS[MESSAGES]], [[]])


async def test_an_engine_gets_none_where_all_classes_are_of_one_priority():
    engine = Engine()
    async with classed(engine, Classes((QosClass("one"), QosClass("other")))) as s:
        await send(s)
        assert engine.bodies == [ASKS[CHAT]]


SPEAK_OF_PRIORITY = [b'{"input":"my \\u0070riority"}', b'{"input":["priority"]}', b"--x\r\npriority\r\n--x--"]
LONG_TEXTS = [text * (LONG // len(text)) for text in (b"a", b"\\u4e2d", b"\\u00e9", b'my \\"priority\\" ')]
UTF_16 = json.dumps({"model": "m", "input": "x"}).encode("utf-16")


@pytest.mark.parametrize(
    ("path", "body", "classes"),
    [
        *((b"/pooling", body, CLASSES) for body in SPEAK_OF_PRIORITY),
        *((b"/score", b'{"input":"%b"}' % text, CLASSES) for text in LONG_TEXTS),
        (b"/v1/audio/transcriptions", b"\xff\xfe--form--", CLASSES),
        (b"/v1/audio/translations", b"\xff\xfe--form--", CLASSES),
        (b"/score", UTF_16, None),
    ],
    ids=[
        "text",
        "list",
        "form",
        "long",
        "escapes",
        "accents",
        "quotes",
        "sound",
        "sound of another tongue",
        "no classes",
    ],
)
async def test_a_body_that_says_no_priority_passes_as_it_is(path, body, classes):
    """Forms too, whatever they begin with; without classes, also what no priority could be written in."""
    seen = []
    async with classed(answers(seen=seen), classes) as s:
        assert (await s.ask(post(body, path)))[0] == 200
        assert [given for _, given in seen] == [body]
