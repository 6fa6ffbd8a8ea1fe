"""Events of real engines: what blocks are called, how they are written, and what happens when some are lost."""

import asyncio
import itertools
import json

import httpx
import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from cachemap import chain_seed
from gateway.prompt.pipeline import Pipeline

from ..cachemap.publisher import Publisher
from ..redis_server import Proxy
from .engines import gateway
from .traffic import WORDS, caught_up, drive, events, mixed, plain, share_equal, unsalted, wrong
from .witness import Witness

pytestmark = pytest.mark.exact

TEXT = " ".join(WORDS) * 6
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
TALK = [
    {"role": "system", "content": TEXT},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "So."},
]
BODIES = [
    ("/v1/completions", {"prompt": TEXT}),
    ("/v1/completions", {"prompt": TEXT + " ünïcødé 漢字 🙂" * 9}),
    ("/v1/completions", {"prompt": list(range(300, 420))}),
    ("/v1/completions", {"prompt": TEXT, "cache_salt": "tenant"}),
    ("/v1/completions", {"prompt": TEXT, "model": "red"}),
    ("/v1/completions", {"prompt": TEXT, "model": "red", "cache_salt": "tenant"}),
    ("/v1/completions", {"prompt": TEXT, "model": "red", "cache_salt": "red"}),
    ("/v1/chat/completions", {"messages": [*TALK, {"role": "user", "content": TEXT}]}),
    ("/v1/chat/completions", {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True}),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": TEXT}]}], "stream": True},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [*TALK, {"role": "user", "content": TEXT}],
            "tools": [TOOL],
            "tool_choice": "none",
            "model": "blue",
        },
    ),
]


def names(events: list[dict], model: str) -> set[int]:
    """What blocks are called by what the events say of them, block by block, with the engine's hashes for links
    only."""
    called: dict[int | bytes, int] = {}
    for event in events:
        if event["type"] != "BlockStored":
            continue
        size, adapter, parent = event["block_size"], event["lora_name"], event["parent_block_hash"]
        salts = ((event["extra_keys"] or [None])[0] or [])[1 if adapter else 0 :]
        name = chain_seed(model, size, adapter, salts[0] if salts else None) if parent is None else called[parent]
        for i, key in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][i * size : (i + 1) * size]
            name = called[key] = xxh3_64_intdigest(b"".join(token.to_bytes(4, "little") for token in tokens), name)
    return set(called.values())


@pytest.mark.parametrize("which", [0, 1], ids=["integers", "bytes"])
async def test_blocks_have_the_same_name_in_events_and_prompts(engines, which, witness_of):
    engine = engines[which]
    pipeline = Pipeline(engine.model, "tiny", engine.block_size)
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        await reset(engine)
        witness = witness_of(engine)
        before = len(witness.events)
        for path, body in BODIES:
            answer = await client.post(path, json={"model": "tiny", "max_tokens": 2, **body})
            assert answer.status_code == 200, (body, answer.text)
    await asyncio.to_thread(witness.settled)
    stored = [event for event in witness.events[before:] if event["type"] == "BlockStored"]
    assert {type(key) for event in stored for key in event["block_hashes"]} == {(int, bytes)[which]}
    told = names(stored, "tiny")
    asked = set()
    for path, body in BODIES:
        prompt = pipeline.prepare(
            path, json.dumps({"model": "tiny", "max_tokens": 2, **body}).encode(), {}, frozenset(("red", "blue"))
        )
        assert prompt.mode == "exact" and len(prompt.hashes) >= 3, (body, prompt.note)
        missing = [i for i, block in enumerate(prompt.hashes) if block not in told]
        assert not missing, (body, missing, len(prompt.hashes))
        asked |= set(prompt.hashes)
    assert told == asked, f"{len(told - asked)} blocks of the engine are no prompt's"


# The fields of events as arrays, in the order they had. The older had no extra keys: no telling salts apart.
OLD, OLDER = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name", "extra_keys"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}, {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}  # fmt: skip


class Translator:
    """Says again what a witness heard, from sockets of its own, live and with replay: as vLLM did until 0.23, each
    event an array that begins with its type."""

    def __init__(self, witness: Witness, fields: dict[str, tuple[str, ...]]):
        self.witness, self.fields, self.publisher = witness, fields, Publisher()
        self.publisher.serve_replay()
        self._task = asyncio.ensure_future(self._translate())

    def as_arrays(self, payload: bytes) -> bytes:
        at, events, rank = msgspec.msgpack.decode(payload)
        return msgspec.msgpack.encode(
            [at, [[event["type"], *(event[name] for name in self.fields[event["type"]])] for event in events], rank]
        )

    async def _translate(self) -> None:
        publisher = self.publisher
        while True:
            while publisher.next < len(self.witness.batches):
                number = publisher.next
                payload = publisher.record[number] = self.as_arrays(self.witness.batches[number])
                publisher.next += 1
                await publisher.publish_raw([b"kv", number.to_bytes(8, "big"), payload])
            await asyncio.sleep(0.001)

    async def close(self) -> None:
        self._task.cancel()
        await self.publisher.close()


async def reset(engine) -> None:
    """Empty its cache, and make it say so: it does with its next step."""
    async with httpx.AsyncClient(base_url=engine.url, timeout=60) as client:
        (await client.post("/reset_prefix_cache")).raise_for_status()
        (
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "next step", "max_tokens": 1})
        ).raise_for_status()


@pytest.mark.parametrize("which", [0, 1], ids=["integers", "bytes"])
@pytest.mark.parametrize("fields, make", [(OLD, mixed), (OLDER, unsalted)], ids=["8 fields", "7 fields"])
async def test_events_as_arrays(engines, which, fields, make, witness_of):
    """What an older vLLM would have sent, while requests go to this one."""
    engine = engines[which]
    if fields is OLDER:  # salted blocks would be taken for others
        await reset(engine)
    witness = witness_of(engine)
    translator = Translator(witness, fields)
    try:
        url = f"{engine.url}#events={translator.publisher.endpoint},replay={translator.publisher.replay}"
        async with gateway(url, model=engine.model) as process:
            outcomes = await drive(process, 40, make, talks=6, seed=3, between=lambda _: caught_up(process, witness))
    finally:
        await translator.close()
    assert share_equal(outcomes) == 1, wrong(outcomes)
    assert sum(one.cached > 0 for one in outcomes) > 10


async def test_a_gateway_that_comes_late_knows_what_was_cached_before(engines):
    body = {"model": "tiny", "prompt": "asked before there was a gateway " * 20, "max_tokens": 1}
    async with httpx.AsyncClient(timeout=60) as client:
        (await client.post(engines[0].url + "/v1/completions", json=body)).raise_for_status()
    async with gateway(*engines) as process:
        answer = await process.client.post("/v1/completions", json=body)
    cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 100 and int(answer.headers["x-hitherto-cached-tokens"]) == cached
    assert answer.headers["x-hitherto-replica"] == engines[0].url.removeprefix("http://")


@pytest.mark.parametrize(
    "noticed, found_by", [(False, b"and replayed"), (True, b"events come again")], ids=["short", "long"]
)
async def test_batches_lost_with_a_connection_are_replayed(engine, witness_of, noticed, found_by):
    """After a short time the next batch shows a gap. Before a long one is over the replica is known to be silent, and
    its cache is guessed until batches come again."""
    witness = witness_of(engine)
    async with Proxy(int(engine.events.rpartition(":")[2])) as proxy:
        url = f"{engine.url}#events=tcp://127.0.0.1:{proxy.port},replay={engine.replay}"
        async with gateway(url, model=engine.model) as process:
            await drive(process, 15, mixed, seed=11)
            await caught_up(process, witness)
            before = (await events(process))["batches_replayed"]
            proxy.cut()
            await drive(process, 3, mixed, seed=12)
            async with asyncio.timeout(60):
                for seed in itertools.count(1000):
                    if not noticed or b"no block was reported" in b"".join(process.log):
                        break
                    await drive(process, 1, mixed, talks=1, seed=seed)
            proxy.mend()
            async with asyncio.timeout(30):
                for seed in itertools.count(100):
                    await drive(process, 1, plain, talks=1, seed=seed)
                    (shown,) = (await process.status())["replicas"]
                    if "replayed" in shown["events_reason"] and (await events(process))["batches_replayed"] > before:
                        break
            await caught_up(process, witness)
            after = await drive(process, 30, mixed, seed=13, between=lambda _: caught_up(process, witness))
    assert share_equal(after) == 1, wrong(after)
    assert found_by in b"".join(process.log)


async def test_a_cache_that_was_reset_holds_nothing(engine, witness_of):
    witness = witness_of(engine)
    bodies = [{"model": "tiny", "prompt": f"prompt {i} " * 120, "max_tokens": 1} for i in range(4)]
    async with gateway(engine) as process:

        async def ask(body) -> tuple[int, int]:
            answer = await process.client.post("/v1/completions", json=body)
            return int(answer.headers["x-hitherto-cached-tokens"]), answer.json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]

        for body in bodies:
            await ask(body)
        predicted, cached = await ask(bodies[0])
        assert predicted == cached > 100
        async with httpx.AsyncClient() as client:
            (await client.post(engine.url + "/reset_prefix_cache")).raise_for_status()
        # the engine tells with its next step, so the request that makes it is predicted from what was
        assert await ask(bodies[0]) == (cached, 0)
        await caught_up(process, witness)
        assert [await ask(body) for body in bodies] == [(cached, cached), (0, 0), (0, 0), (0, 0)]
        assert [await ask(body) for body in bodies] == [(cached, cached)] * 4
