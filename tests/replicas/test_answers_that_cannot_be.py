"""What an engine answers to the gateway's own questions is bounded, whatever it answers."""

import asyncio
import gzip
import json
from contextlib import asynccontextmanager, suppress
from unittest.mock import patch

import pytest
from aiohttp import web
from aiohttp.client_proto import ResponseHandler

from replicas import State
from replicas.access import session_to
from replicas.adopt import MOST_LETTERS, MOST_NAME, probe
from replicas.answer import MOST_VALUES, Answer
from replicas.ask import BIG, MODELS_VALUES, MOST_BYTES, get
from replicas.engines.vllm.metrics import NAMES
from replicas.metrics import MOST_RANKS, parse
from replicas.watch import FACTS

MODELS = b'{"data":[{"id":"m"}]}'
DEEP = b'{"data":' + b"[" * 10_000


def listed(entries: list) -> bytes:
    return json.dumps({"data": entries}).encode()


@pytest.fixture
def served(serve):
    """`served(pages)` -> URL of an engine that answers so, with a body or a body and its headers, and 404 else."""

    async def served(pages):
        async def answer(request: web.Request) -> web.Response:
            assert request.headers["accept-encoding"] == "identity"
            page = {"/health": b"", "/v1/models": MODELS, **pages}.get(request.path)
            body, headers = page if isinstance(page, tuple) else (page, {})
            return web.Response(status=404 if body is None else 200, body=body, headers=headers)

        return await serve(answer)

    return served


@pytest.fixture
async def session():
    async with session_to("127.0.0.1") as session:
        yield session


@pytest.fixture
def found(served, session):
    """`found(pages)` -> what is known of that engine."""

    async def found(pages):
        return await probe(await served(pages), session, 20)

    return found


@pytest.mark.parametrize(
    ("body", "headers", "why"),
    [
        (gzip.compress(b" " * (1 << 25)), {"content-encoding": "gzip"}, "compressed"),
        (b" " * (MOST_BYTES + 1), {}, "8 MiB"),
        (DEEP, {}, "depth"),
        (b'{"data":' + b'{"a":' * 10_000, {}, "depth"),
        (b'{"data":[' + b"[]," * MODELS_VALUES + b"1]}", {}, "262,144 values"),
        (b'{"data":[{"id":"m"},{"id":"a\\ud800"}]}', {}, "surrogate"),
    ],
    ids=["gzip", "long", "deep", "deep maps", "many values", "half a pair"],
)
async def test_an_answer_that_cannot_be_is_a_fault_in_words(found, body, headers, why):
    facts = await found({"/v1/models": (body, headers)})
    assert facts.fault == "closed" and why in facts.error and not facts.serving
    assert facts.large or len(body) < BIG


def test_values_are_counted_before_they_are_read():
    answer = Answer(200, b'  {"version":"1","a":[' + b"[]," * MOST_VALUES + b"1]}")
    assert answer.json() == {} and "65,536 values" in answer.unreadable


async def test_an_engine_of_large_answers_is_asked_less_often_until_it_is_ready(served, fleet, comes):
    pages = {"/v1/models": b'{"data":[]}', "/version": b'{"a":"' + b"x" * BIG + b'"}'}
    replica = await comes(fleet.add(await served(pages)), State.WARMING)
    watch = fleet.engines[replica.id]
    assert watch._interval() == FACTS
    pages["/v1/models"] = MODELS
    await watch.prove()
    assert replica.state is State.READY and watch._interval() == fleet.interval


@asynccontextmanager
async def raw(begin: bytes, unit: bytes, times: int, end: bytes = b""):
    """An engine that answers so, byte for byte; `sent` is how many units were taken from it."""
    sent = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(begin)
            for _ in range(times):
                writer.write(unit)
                await writer.drain()
                sent.append(unit)
            writer.write(end)
            await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server, session_to("127.0.0.1") as session:
        yield session, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/health", sent


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "unit"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"", b"HTTP/1.1 103 Early Hints\r\nlink: <a>\r\n\r\n"),
        (CHUNKED, b"1\r\na\r\n"),
        (CHUNKED + b"1;", b"a"),
        (b"", OK),
    ],
    ids=["100", "103", "one-byte chunks", "chunk extension", "answers to nothing"],
)
async def test_an_answer_that_is_hardly_body_ends_early(begin, unit):
    """The parser of such bytes held up the whole process for seconds, so that no deadline was seen to pass."""
    parsed = []

    def count(self, data):
        parsed.append(len(data))
        received(self, data)

    received = ResponseHandler.data_received
    with patch.object(ResponseHandler, "data_received", count):
        async with raw(begin, unit * ((1 << 20) // len(unit)), 16) as (session, url, sent):
            answer = await get(session, url, 20)
    assert (answer.fault, "hardly more than heads" in answer.error) == ("closed", True) or unit is OK
    assert sum(parsed) < 1 << 15 and max(parsed) <= 1 << 12 and len(sent) < 16


async def test_a_body_in_small_chunks_is_read():
    unit = b"18\r\n%s\r\n" % (b" " * 24) * 1000
    async with raw(CHUNKED, unit, 300, b"0\r\n\r\n") as (session, url, _):
        answer = await get(session, url, 20)
        assert not answer.fault and len(answer.body) == 300 * 24_000


async def test_an_answer_as_long_as_may_be_is_read(served, session):
    url = await served({"/v1/models": listed([{"id": f"model {number}"} for number in range(20_000)])})
    facts = await probe(url, session, 20)
    assert facts.serving and len(facts.models) == 10_000 and "10,000 names" in facts.problems["models"].what
    assert len((await get(session, url + "/v1/models", 20)).json()["data"]) == 20_000


async def test_names_and_numbers_that_cannot_be_are_not_taken(found):
    entries = [{"id": "x" * (MOST_NAME + 1)}, {"id": "m", "root": "y" * 10_000, "max_model_len": 10**30}]
    page = b'\nvllm:cache_config_info{block_size="16",num_gpu_blocks="%s"} 1.0\n' % (b"9" * 5000)
    facts = await found({"/v1/models": listed(entries), "/metrics": page})
    assert list(facts.models) == ["m"] and (facts.root, facts.max_model_len) == (None, None)
    assert (facts.block_size, facts.num_blocks) == (16, None)
    facts = await found({"/v1/models": listed(entries[:1])})
    assert not facts.serving and "ids that are no text of at most 1,024 characters" in facts.error


def ranks(count: int) -> bytes:
    return b"".join(b'\nvllm:num_requests_running{engine="%d"} 1.0' % number for number in range(count))


async def test_an_engine_of_too_many_ranks_counts_as_one_and_it_is_said(found):
    facts = await found({"/metrics": ranks(1000)})
    assert len(facts.events()) == 1 and "1,000 data-parallel ranks" in facts.problems["ranks"].what
    assert len(parse(ranks(MOST_RANKS), 0.0, NAMES).ranks) == MOST_RANKS


async def test_ranks_told_in_another_way_are_bounded_too(found):
    told_by_sglang = {"page_size": 1, "max_total_num_tokens": 10**30, "dp_size": 10**9}
    facts = await found({"/server_info": json.dumps(told_by_sglang).encode()})
    assert len(facts.events()) == 1 and "ranks" in facts.problems and facts.num_blocks is None


def test_a_page_of_a_million_lines_is_read_to_a_bound():
    lines = b'vllm:num_requests_running{engine="7"} 1.0\n' * 1_000_000
    assert parse(lines, 0.0, NAMES).running == 4096


async def test_long_names_are_taken_up_to_so_many_letters(found):
    facts = await found({"/v1/models": listed([{"id": f"{number:1000}"} for number in range(1_000)])})
    assert sum(map(len, facts.models)) - MOST_LETTERS in range(1_000) and facts.serving
    assert "the others are not known" in str(facts.problems["models"])


def test_a_label_without_an_end_is_read_once():
    words = b"a" * 10_000  # each letter of which once began a search to the end of the line
    page = b"\n".join([b"vllm:cache_config_info{%b} 1" % words] * 500)
    page += b'\nvllm:cache_config_info{block_size="16",%b="",num_gpu_blocks="9"} 1' % (b"b" * (1 << 16))
    assert parse(page, 0.0, NAMES).block_size is None


def test_each_rank_has_its_own_figures_on_the_longest_page():
    numbers = range(MOST_RANKS)
    lines = [f'vllm:num_requests_running{{engine="{number}"}} {number}' for number in numbers] * 16
    config = 'vllm:cache_config_info{engine="%d",block_size="%d",num_gpu_blocks="9"} 1'
    lines += [config % (number, 16 + number) for number in numbers]
    ranks = parse("\n".join(lines).encode(), 0.0, NAMES).ranks
    assert [(one.running, one.block_size) for one in ranks] == [(16 * number, 16 + number) for number in numbers]
