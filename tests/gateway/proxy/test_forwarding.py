"""Who gets ids in place of text: engines shown to take them, and to make the same."""

import asyncio
import json
from array import array
from contextlib import asynccontextmanager

import pytest

from gateway.prompt.forward import LEAST_TOKENS
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.exactness import token_ids
from gateway.proxy.exactness.token_ids import CONFIRMATIONS
from replicas.engines.vllm.versions import version_quirks
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually, read_request
from .replies import answers, chunk, post, reply
from .stack import stack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = "all the world is a stage and all the men and women merely players " * 50


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "m", 16)


class Engine:
    """As far as tokens go, an engine: it makes them with a pipeline of its own, or takes those it is given."""

    def __init__(self, pipeline, takes=True, tells=True, miscounts=0, other=False, refuses=0, tries=200):
        self.pipeline, self.takes, self.tells, self.miscounts, self.other = pipeline, takes, tells, miscounts, other
        self.refuses, self.tries = refuses, tries  # statuses for ids of a long prompt, and for trials
        self.pieces = None  # between the two pieces of an answer, where it has two
        self.bodies: list[bytes] = []  # of clients' requests
        self.headers: list[bytes] = []
        self.trials = 0

    async def __call__(self, reader, writer):
        while True:
            head, body = await self.request(reader)
            status, told = self.answer(head.split()[1].decode(), body, head)
            data = json.dumps(told).encode()
            if self.pieces and status == 200:
                await self.write_in_pieces(writer, data, json.loads(body).get("stream"))
                continue
            writer.write(reply(data, b"%d X" % status))
            await writer.drain()

    async def write_in_pieces(self, writer, data: bytes, streams: bool):
        """Chunks that the gateway reads one by one."""
        kind = b"text/event-stream" if streams else b"application/json"
        first = b'data: {"choices":[{"delta":{"content":"x"}}]}\n\n' if streams else data[:20]
        rest = b"data: " + data + b"\n\ndata: [DONE]\n\n" if streams else data[20:]
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nTransfer-Encoding: chunked\r\n\r\n" % kind + chunk(first))
        await self.pieces()
        writer.write(chunk(rest) + b"0\r\n\r\n")
        await writer.drain()

    async def request(self, reader) -> tuple[bytes, bytes]:
        return await read_request(reader)

    def answer(self, path: str, body: bytes, head: bytes):
        said = json.loads(body)
        transfer = said.pop("kv_transfer_params", None) or {}
        given = said["prompt"] if path == COMPLETIONS else transfer.get("prompt_token_ids")
        given = given if isinstance(given, list) else None
        trial = "return_token_ids" in said or (given is not None and len(given) == 1)
        self.headers.append(head)
        if trial:
            self.trials += 1
            if self.tries != 200:
                return self.tries, {"error": {}}
        else:
            self.bodies.append(body)
        if given and self.refuses and (trial is (self.refuses == 422)):
            return self.refuses, {"error": {"message": "no ids, please"}}
        ids = given
        if not given or not self.takes:
            text = {"prompt": "some text"} if given and path == COMPLETIONS else {}
            ids = array("I", self.pipeline.prepare(path, json.dumps(said | text).encode()).token_ids).tolist()
        if self.other and not given:
            ids = [*ids[:40], 5, *ids[41:]]
        told = {"prompt_token_ids": ids} if self.tells and "return_token_ids" in said else {}
        usage = {"usage": {"prompt_tokens": len(ids) + self.miscounts, "completion_tokens": 1}}
        return 200, {"choices": [{"index": 0, **told}], **told, **usage}

    @property
    def sent_ids(self) -> list[bool]:
        return [b"prompt_token_ids" in body or b'"prompt": [' in body for body in self.bodies]


def request(path=CHAT, turn=0, text=WORDS, **more) -> bytes:
    text = f"Request {turn}. {text}"
    said = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return json.dumps({"model": "m", "max_tokens": 5, **said, **more}).encode()


async def ask(s, body: bytes, path=CHAT, extra=b"") -> int:
    return (await s.ask(post(body, path.encode(), extra)))[0]


def served(s, index=0):
    return list(s.proxy.backends.values())[index]


async def settled(s):
    """All trials that were begun are over."""
    await eventually(lambda: s.idle() and all(one.forwarding.checking is None for one in s.proxy.backends.values()))


async def asked(s, *request, **more) -> int:
    """As `ask`, and wait until the trial that follows is over."""
    status = await ask(s, *request, **more)
    await settled(s)
    return status


async def asked_in_turn(s, count):
    for turn in range(count):
        await asked(s, request(turn=turn))


FIRST = 1 + CONFIRMATIONS  # bodies of a kind that go as received: one that makes it known, and those to be confirmed
TEXT, IDS = [False] * FIRST, True


async def confirmed(s, turn=100, path=CHAT, **more) -> None:
    """Every replica has confirmed bodies of this kind (of those that take turns, each gets as many)."""
    for number in range(FIRST * len(s.proxy.backends)):
        assert await asked(s, request(path, turn + number, **more), path) == 200


@asynccontextmanager
async def behind(engine, *others, **options):
    async with stack(engine, *others, **{"pipeline": engine.pipeline, "policy": "round_robin", **options}) as s:
        for backend in s.proxy.backends.values():
            backend.replica.max_model_len = 16384
        yield s


@asynccontextmanager
async def alone(engine, **options):
    async with behind(engine, **options) as s:
        yield s, engine


@asynccontextmanager
async def known(pipeline):
    """An engine that has confirmed plain bodies."""
    async with alone(Engine(pipeline)) as (s, engine):
        await confirmed(s)
        yield s, engine


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_ids_are_sent_once_a_sample_of_bodies_was_shown_to_be_taken_and_the_same(pipeline, path):
    async with alone(Engine(pipeline)) as (s, engine):
        await confirmed(s, path=path)
        assert engine.trials == CONFIRMATIONS + 1  # and whether it uses ids at all
        for turn in range(3):
            assert await asked(s, request(path, turn), path) == 200
        assert engine.sent_ids == [*TEXT, IDS, IDS, IDS]
        assert engine.trials == CONFIRMATIONS + 1
        assert served(s).replica.takes_ids == f"{path}: yes"
        assert s.metrics.long_prompts.values == {(served(s).id, "text"): FIRST, (served(s).id, "ids"): 3}
        assert s.metrics.token_id_checks.values == {(served(s).id, "same"): CONFIRMATIONS}
        as_sent = json.loads(engine.bodies[-1])
        given = as_sent["prompt"] if path == COMPLETIONS else as_sent["kv_transfer_params"]["prompt_token_ids"]
        assert given == array("I", pipeline.prepare(path, request(path, 2)).token_ids).tolist()
        assert b"content-length: %d" % len(engine.bodies[-1]) in engine.headers[-1].lower()


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
SAID = [
    {"role": "user", "content": WORDS},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "Go on."},
]
CALLED = [
    *SAID[:1],
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "x"},
]
KINDS = [
    (CHAT, {}), (COMPLETIONS, {}), (COMPLETIONS, {"add_special_tokens": False}), (CHAT, {"tools": TOOLS}), (CHAT, {"messages": SAID}),
    (CHAT, {"messages": CALLED}), (CHAT, {"messages": CALLED, "tools": TOOLS}), (CHAT, {"messages": [{**SAID[0], "name": "n"}]}),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS}]}]}),
    (CHAT, {"messages": [{"role": "system", "content": WORDS}, SAID[2]]}), (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": True}}), (CHAT, {"reasoning_effort": "low"}), (CHAT, {"documents": [{"text": "x"}]}),
    (CHAT, {"messages": SAID[:2], "continue_final_message": True, "add_generation_prompt": False}),
]  # fmt: skip


async def test_each_kind_of_body_is_confirmed_by_itself(pipeline):
    """Which kinds there are: template, tools or none, roles and fields of messages, variables."""
    kinds = [pipeline.prepare(path, request(path, **more)).kind for path, more in KINDS]
    assert all(kinds) and len(set(zip((path for path, _ in KINDS), kinds, strict=True))) == len(KINDS)
    async with known(pipeline) as (s, engine):
        for path, more in KINDS:
            await asked(s, request(path, **more), path)
        assert engine.sent_ids == [*TEXT, IDS, *[False] * (len(KINDS) - 1)]


@pytest.mark.parametrize("more", [
    {"chat_template_kwargs": {"persona": "x" * 100}}, {"chat_template_kwargs": {"nested": {"a": 1}}},
    {"messages": [{"role": "user", "content": WORDS, "a_field_of_next_year": 1}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": WORDS, "next_year": 1}]}]},
    {"messages": [{"role": "observer", "content": WORDS}]},
])  # fmt: skip
async def test_bodies_of_no_kind_go_as_received_and_nothing_is_asked_about_them(pipeline, more):
    async with alone(Engine(pipeline)) as (s, engine):
        for turn in range(CONFIRMATIONS + 1):
            await asked(s, request(turn=turn, **more))
        assert not any(engine.sent_ids) and engine.trials == 0 and served(s).forwarding.kinds == {}


async def test_the_same_body_again_is_no_further_confirmation(pipeline):
    async with alone(Engine(pipeline)) as (s, engine):
        for _ in range(FIRST + 2):
            await asked(s, request())
        assert engine.trials == 2 and not any(engine.sent_ids)


async def test_what_is_known_of_kinds_is_bounded(pipeline, monkeypatch):
    monkeypatch.setattr(token_ids, "MOST_KINDS", 4)
    async with alone(Engine(pipeline)) as (s, engine):
        for number in range(8):
            await asked(s, request(chat_template_kwargs={"number": number}))
        assert len(served(s).forwarding.kinds) == 4


@pytest.mark.parametrize("faults, why", [
    ({"takes": False}, "does not use ids"),
    ({"tells": False}, "does not tell the ids it makes"),
    ({"other": True}, "differ from ours at 40"),
    ({"refuses": 422}, "refuses ids with status 422"),
])  # fmt: skip
async def test_an_engine_that_will_not_have_them_gets_all_as_received(pipeline, faults, why, caplog):
    async with alone(Engine(pipeline, **faults)) as (s, engine):
        for turn in range(CONFIRMATIONS + 3):
            assert await asked(s, request(turn=turn)) == 200
        assert engine.bodies == [request(turn=turn) for turn in range(CONFIRMATIONS + 3)]
        assert engine.trials <= 2
        assert why in served(s).replica.takes_ids and why in caplog.text
        assert s.metrics.ids_refused.total() == 1


async def test_a_trial_that_is_not_answered_says_nothing_and_is_made_again_after_a_pause(pipeline, monkeypatch):
    async with alone(Engine(pipeline, tries=500)) as (s, engine):
        await asked_in_turn(s, 3)
        assert engine.trials == 1 and engine.sent_ids == [False] * 3 and s.metrics.ids_refused.total() == 0
        assert s.metrics.token_id_checks.values == {(served(s).id, "unanswered"): 1}
        engine.tries = 200
        for kind in served(s).forwarding.kinds.values():
            kind.pause = 0.0
        await confirmed(s)
        await ask(s, request())
        assert engine.sent_ids[3:] == [*[False] * CONFIRMATIONS, IDS, IDS]


async def test_one_in_so_many_is_checked(pipeline, monkeypatch):
    monkeypatch.setattr(token_ids, "CHECK_EVERY", 4)
    async with known(pipeline) as (s, engine):
        await asked_in_turn(s, 9)
        assert engine.sent_ids[FIRST:] == [IDS, IDS, IDS, False, IDS, IDS, IDS, False, IDS]
        assert s.metrics.token_id_checks.values == {(served(s).id, "same"): CONFIRMATIONS + 2}


async def test_the_first_difference_ends_it_for_all_replicas_until_that_one_is_another_process(
    pipeline, monkeypatch, caplog
):
    """Whose mistake it is cannot be told, and the gateway's would reach them all."""
    monkeypatch.setattr(token_ids, "CHECK_EVERY", 4)
    first, second = Engine(pipeline), Engine(pipeline)
    async with behind(first, second) as s:
        await confirmed(s)
        first.other = True
        await asked_in_turn(s, 20)
        assert first.sent_ids == [*TEXT, IDS, IDS, IDS, *[False] * 7]
        assert second.sent_ids[: len(TEXT) + 3] == first.sent_ids[: len(TEXT) + 3] and not any(second.sent_ids[-6:])
        one, other = served(s), served(s, 1)
        assert s.metrics.token_id_checks.values[one.id, "different"] == 1 and s.metrics.ids_refused.total() == 1
        assert "differ from ours at 40" in one.replica.takes_ids and "user" in caplog.text
        assert other.replica.takes_ids == f"{CHAT}: no, replica {one.id} makes other ids"
        first.other, one.incarnation = False, "another"
        s.proxy.changed()
        await ask(s, request(turn=50))
        await asked(s, request(turn=51))
        assert "no" not in other.replica.takes_ids.split()
        await confirmed(s)
        await asked_in_turn(s, 2)
        assert first.sent_ids[-1] and second.sent_ids[-1]


async def test_a_replica_that_differed_holds_nobody_back_when_it_is_removed(pipeline):
    first, second = Engine(pipeline, other=True), Engine(pipeline)
    async with behind(first, second) as s:
        await confirmed(s)
        assert not any(first.sent_ids + second.sent_ids)
        s.proxy.remove(served(s).id)
        await confirmed(s, turn=200)
        await ask(s, request())
        assert second.sent_ids[-1]


@pytest.mark.parametrize(
    ("reads", "more"), [("one", {}), ("several", {"stream": False}), ("several", {"stream": True})]
)
@pytest.mark.parametrize("text", [WORDS, "short"])
async def test_the_first_contradicting_count_ends_it(pipeline, text, reads, more, caplog):
    async with known(pipeline) as (s, engine):
        engine.miscounts = 1

        async def until_read():
            await s.exchange(lambda attempt: attempt.pieces or attempt.withheld)

        engine.pieces = until_read if reads == "several" else None
        assert await ask(s, request(turn=2, text=text, **more)) == 200
        if reads == "several":
            await eventually(s.idle)
        engine.miscounts, engine.pieces = 0, None
        for turn in range(3, 6):
            await asked(s, request(turn=turn))
        assert engine.sent_ids[-3:] == [False, False, False]
        assert "its usage says" in served(s).replica.takes_ids and "its usage says" in caplog.text
        assert s.metrics.ids_refused.total() == 1


async def test_one_client_with_many_kinds_of_bodies_writes_one_line_in_the_log(pipeline, caplog):
    async with alone(Engine(pipeline)) as (s, engine):
        engine.miscounts = 1
        for number in range(20):
            await ask(s, request(turn=number, chat_template_kwargs={"n": number}))
        assert caplog.text.count("no replica gets the token ids of these bodies") == 1


OFF = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.mark.parametrize("text", [WORDS, "short"])
async def test_a_count_of_a_body_that_its_client_steers_ends_it_for_bodies_of_its_kind(pipeline, text, caplog):
    first, second = Engine(pipeline), Engine(pipeline)
    async with behind(first, second) as s:
        await confirmed(s)
        await confirmed(s, turn=200, **OFF)
        assert first.sent_ids == second.sent_ids == [*TEXT, *TEXT]
        first.miscounts = second.miscounts = 1
        await ask(s, request(turn=2, text=text, **OFF))
        first.miscounts = second.miscounts = 0
        await confirmed(s, turn=300, **OFF)  # which is not to be
        assert not any(first.sent_ids[-FIRST:] + second.sent_ids[-FIRST:])
        await asked_in_turn(s, 2)
        assert first.sent_ids[-1] and second.sent_ids[-1]
        assert "enable_thinking=False" in caplog.text and not s.metrics.ids_refused.total()
        one = next(backend for backend in s.proxy.backends.values() if backend.id in caplog.text)
        one.incarnation = "another"
        s.proxy.changed()
        await confirmed(s, turn=400, **OFF)
        for turn in range(4):
            await ask(s, request(turn=500 + turn, **OFF))
        assert first.sent_ids[-1] and second.sent_ids[-1]


async def test_other_ids_of_a_kind_that_its_client_steers_end_it_for_that_kind(pipeline):
    async with known(pipeline) as (s, engine):
        engine.other = True
        for turn in range(3):
            await asked(s, request(turn=turn, **OFF))
        engine.other = False
        assert s.metrics.token_id_checks.values[served(s).id, "different"] == 1
        await confirmed(s, turn=200, **OFF)
        await ask(s, request(turn=300, **OFF))
        await ask(s, request(turn=301))
        assert engine.sent_ids[-2:] == [False, True] and served(s).replica.takes_ids == f"{CHAT}: yes"


VAIN = [{"documents": []}, {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"a": None}}]
NEVER_FORWARDED = [
    {"field_of_next_year": 1},
    {"chat_template_kwargs": {"nested": {"a": 1}}},
    {"messages": [{"role": "user", "content": "x", "a_field_of_next_year": 1}]},
]
CUT = {"truncate_prompt_tokens": 30}  # the engine leaves out another part


@pytest.mark.parametrize(
    ("more", "text", "ends"),
    [
        *((more, text, True) for more in VAIN for text in (WORDS, "short")),
        *((more, WORDS, False) for more in (*NEVER_FORWARDED, CUT)),
    ],
)
async def test_a_wrong_count_ends_it_where_a_body_says_in_vain_how_it_is_rendered_and_not_where_it_is_never_forwarded(
    pipeline, more, text, ends
):
    async with known(pipeline) as (s, engine):
        engine.miscounts = 3
        assert await ask(s, request(turn=2, text=text, **more)) == 200
        engine.miscounts = 0
        await ask(s, request(turn=3))
        assert engine.sent_ids[-1] is not ends and s.metrics.ids_refused.total() == ends
        assert ends or more is CUT or s.metrics.prompt_mismatches.total() == 1


async def test_a_request_refused_with_ids_is_answered_as_received_and_ends_it(pipeline):
    async with known(pipeline) as (s, engine):
        engine.refuses = 400  # ids of long prompts, though it took the trial's
        for turn in range(1, 4):
            assert await asked(s, request(turn=turn)) == 200
        assert engine.sent_ids == [*TEXT, IDS, False, False, False]
        assert engine.bodies[FIRST + 1] == request(turn=1)
        assert "refused a request with ids" in served(s).replica.takes_ids
        assert s.faults == [] and s.metrics.retries.values == {("ids",): 1}


async def test_the_clients_own_fault_is_told_by_the_request_as_received_and_ends_nothing(pipeline):
    async with known(pipeline) as (s, engine):
        honest, engine.answer = (
            engine.answer,
            lambda path, body, head: (engine.bodies.append(body), (400, {"error": {}}))[1],
        )
        assert await ask(s, request(turn=1, temperature=-1)) == 400
        assert engine.bodies[-1] == request(turn=1, temperature=-1)
        engine.answer = honest
        await ask(s, request(turn=2))
        assert engine.sent_ids == [*TEXT, IDS, False, IDS]


async def test_another_process_behind_the_address_is_shown_anew(pipeline):
    async with alone(Engine(pipeline, takes=False)) as (s, engine):
        await ask(s, request())
        await asked(s, request())
        assert "does not use ids" in served(s).replica.takes_ids
        engine.takes, served(s).incarnation = True, "another"
        await confirmed(s)
        await ask(s, request())
        assert engine.sent_ids == [False, False, *TEXT, IDS]


async def test_a_retry_elsewhere_is_as_received(pipeline):
    first, second = Engine(pipeline), Engine(pipeline)
    async with behind(first, second) as s:
        await confirmed(s)
        await asked_in_turn(s, 2)
        assert first.sent_ids == second.sent_ids == [*TEXT, IDS]
        for engine in (first, second):  # whichever is asked first fails

            def fail_once(path, body, head, engine=engine):
                if len(first.bodies) + len(second.bodies) == 2 * (FIRST + 1):
                    engine.bodies.append(body)
                    return 503, {"error": {}}
                return Engine.answer(engine, path, body, head)

            engine.answer = fail_once
        assert await ask(s, request(turn=9)) == 200
        assert sorted([first.sent_ids[-1], second.sent_ids[-1]]) == [False, IDS]


async def test_what_is_sent_again_on_a_fresh_connection_is_as_received(pipeline):
    class Dies(Engine):
        ended = 0

        async def request(self, reader):
            head, body = await super().request(reader)
            if self.bodies and b"prompt_token_ids" in body and b"one two three" not in body and not self.ended:
                self.ended += 1
                raise ConnectionResetError
            return head, body

    engine = Dies(pipeline)
    async with behind(engine) as s:
        await confirmed(s)
        assert await ask(s, request(turn=1)) == 200
        assert engine.ended == 1 and engine.bodies[FIRST:] == [request(turn=1)]
        assert s.metrics.retries.values == {("reconnect",): 1}
        assert await ask(s, request(turn=2)) == 200
        assert engine.sent_ids == [*TEXT, False, IDS]


async def test_what_would_not_fit_the_context_is_left_to_the_engine_to_judge(pipeline):
    async with known(pipeline) as (s, engine):
        tokens = pipeline.prepare(CHAT, request()).tokens
        for length, limit in [(tokens + 5, 5), (tokens + 4, 5), (tokens + 1, None), (tokens, None), (None, 5)]:
            served(s).replica.max_model_len = length
            more = {} if limit else {"max_tokens": None}
            await ask(s, request(**more))
        assert engine.sent_ids[FIRST:] == [True, False, True, False, False]


async def test_never_means_never(pipeline):
    engine = Engine(pipeline)
    async with behind(engine, tokenize_once=False) as s:
        await asked_in_turn(s, 3)
        assert engine.trials == 0 and engine.bodies == [request(turn=turn) for turn in range(3)]


async def test_short_prompts_try_nothing(pipeline):
    engine = Engine(pipeline)
    assert pipeline.prepare(CHAT, request(text="short")).tokens < LEAST_TOKENS
    async with behind(engine) as s:
        for _ in range(3):
            await ask(s, request(text="short"))
        await settled(s)
        assert engine.trials == 0 and s.metrics.long_prompts.total() == 0


async def test_the_trial_brings_the_clients_key(pipeline):
    async with alone(Engine(pipeline)) as (s, engine):
        await ask(s, request(turn=1))
        engine.headers.clear()
        await asked(s, request(), extra=b"Authorization: Bearer secret\r\n")
        assert len(engine.headers) == 3
        assert all(b"bearer secret" in head.lower() for head in engine.headers)


async def test_a_trial_in_flight_ends_with_the_replica(pipeline):
    asked, release = asyncio.Event(), asyncio.Event()

    class Slow(Engine):
        async def request(self, reader):
            head, body = await super().request(reader)
            if b"return_token_ids" in body:
                asked.set()
                await release.wait()
            return head, body

    async with behind(Slow(pipeline)) as s:
        await ask(s, request(turn=1))
        await ask(s, request())
        await asyncio.wait_for(asked.wait(), 5)
        backend = served(s)
        checking = backend.forwarding.checking
        s.proxy.remove(backend.id)
        await eventually(checking.done)
        release.set()
        assert backend.replica.takes_ids == "not tried yet"


def with_a_date(turn: int) -> bytes:
    """vLLM since 0.32 drops this line of Claude Code's, which changes with each request; before, it was a part of the
    prompt."""
    system = {"role": "system", "content": f"x-anthropic-billing-header: cc_version={turn}\nBe kind."}
    return request(turn=turn, messages=[system, {"role": "user", "content": f"{turn} {WORDS}"}])


async def test_what_was_confirmed_is_void_when_prompts_are_made_in_another_way():
    """The gateway follows the version of another engine: this one never confirmed ids that are made so."""
    ours, theirs = Pipeline(sim_model_dir(), "m", 16), Pipeline(sim_model_dir(), "m", 16)
    for one in (ours, theirs):
        one.follow(version_quirks("0.31.0"))
    engine = Engine(theirs)
    async with behind(engine, pipeline=ours) as s:
        for turn in range(FIRST + 1):
            await asked(s, with_a_date(turn))
        assert engine.sent_ids[-1]
        before = ours.prepare(CHAT, with_a_date(9))
        ours.follow(version_quirks("0.32.0"), at_once=False)
        assert ours.prepare(CHAT, with_a_date(9)).tokens != before.tokens
        await ask(s, with_a_date(9))
        assert not engine.sent_ids[-1] and served(s).replica.takes_ids != f"{CHAT}: yes"


async def test_ids_made_before_the_way_changed_are_neither_sent_nor_held_against_the_engine():
    ours = Pipeline(sim_model_dir(), "m", 16)
    engine = Engine(ours)
    async with behind(engine) as s:
        await confirmed(s)
        prepare = ours.prepare_parsed

        def overtaken(*given):
            prompt = prepare(*given)
            prompt.tokens += 1
            ours.follow(version_quirks("0.31.0"))
            return prompt

        ours.prepare_parsed = overtaken
        await asked(s, request(turn=50))
        assert not engine.sent_ids[-1] and s.metrics.ids_refused.total() == 0


async def test_kinds_that_never_come_again_are_not_asked_about_and_push_no_other_out(pipeline, monkeypatch):
    monkeypatch.setattr(token_ids, "MOST_KINDS", 4)
    async with known(pipeline) as (s, engine):
        trials = engine.trials
        for number in range(8):
            await ask(s, request(chat_template_kwargs={"user_name": f"user {number}"}))
            await asked(s, request(turn=number))
        assert engine.trials == trials and engine.sent_ids[FIRST:] == [False, IDS] * 8


async def test_a_kind_whose_check_is_not_answered_holds_no_other_back(pipeline):
    async with alone(Engine(pipeline)) as (s, engine):
        engine.tries = 500
        for turn in range(2):
            await asked(s, request(turn=turn, tools=TOOLS))
        engine.tries = 200
        await confirmed(s)
        await ask(s, request())
        assert engine.sent_ids[-1]


async def test_headers_of_a_trace_pass_as_they_are_without_a_receiver():
    sent, seen = b"traceparent: 00-anything-at-all-01\r\ntraceparent: twice\r\ntracestate: a=1\r\n", []
    async with stack(answers(seen=seen)) as made:
        talker = await made.talk()
        for extra in (sent, b""):
            await talker.say(post(extra=extra))
            await talker.response()
    assert sent in seen[0][0] and b"traceparent" not in seen[1][0]
