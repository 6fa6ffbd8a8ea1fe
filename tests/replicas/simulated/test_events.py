"""KV events on real ZMQ sockets: what is published, when, and how it is replayed."""

import asyncio
import contextlib

import msgspec
import pytest
import zmq
import zmq.asyncio

from replicas.simulated.engine import Cleared
from replicas.simulated.profile import StepTime

from .conftest import cached_tokens

PROMPT = list(range(1000, 1050))  # three full blocks of 16


@contextlib.contextmanager
def connected(kind: int, port: int):
    """A ZMQ socket that is connected to this port."""
    context = zmq.asyncio.Context()
    socket = context.socket(kind)
    socket.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield socket
    finally:
        socket.close(linger=0)
        context.term()


@contextlib.asynccontextmanager
async def subscribed(stack):
    """`read(n)` -> the next n batches as (number, [time, events, rank]), numbered from the subscription on.

    ZMQ tells nobody when a subscription has arrived: batches are sent until one comes through."""

    async def read(count: int) -> list:
        batches = []
        async with asyncio.timeout(10):
            while len(batches) < count:
                got, number, payload = await socket.recv_multipart()
                assert got == b""
                if (number := int.from_bytes(number, "big") - stack.first) >= 0:
                    batches.append((number, msgspec.msgpack.decode(payload)))
        return batches

    with connected(zmq.SUB, stack.publisher.port) as socket:
        socket.subscribe(b"")
        async with asyncio.timeout(10):
            while not await socket.poll(10):
                stack.publisher.publish([Cleared()], None)
        stack.first = stack.publisher.sequence
        yield read


async def replayed(stack, start: int = 0) -> list:
    """Batches from `start` on, numbered as `subscribed` does."""
    batches = []
    with connected(zmq.DEALER, stack.publisher.replay_port) as socket:
        await socket.send_multipart([b"", (stack.first + start).to_bytes(8, "big")])
        async with asyncio.timeout(10):
            while (answer := await socket.recv_multipart())[2] != b"\xff" * 8:
                assert answer[0] == b""
                number, payload = int.from_bytes(answer[2], "big"), answer[3]
                batches.append((number - stack.first, msgspec.msgpack.decode(payload)))
    assert answer == [b"", b"", b"\xff" * 8, b""]
    return batches


async def complete(stack, prompt=PROMPT, **more):
    return await stack.post("/v1/completions", **{"prompt": prompt, "max_tokens": 1, **more})


async def test_stored_blocks_carry_tokens_and_parents(run_stack):
    async with run_stack() as stack, subscribed(stack) as read:
        await complete(stack, PROMPT[:40])
        said = await complete(stack, PROMPT, max_tokens=20, ignore_eos=True, return_token_ids=True)
        (first, one), (second, two), (third, three) = await read(3)
        assert [first, second, third] == [0, 1, 2]
        (event,) = one[1]
        assert one[2] == 0 and one[0] > 1.7e9
        assert {**event, "block_hashes": None} == {
            "type": "BlockStored",
            "block_hashes": None,
            "parent_block_hash": None,
            "token_ids": PROMPT[:32],
            "block_size": 16,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
            "extra_keys": [None, None],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        # The second request hits two blocks: only its third is new, then one that its output fills.
        assert two[1][0]["parent_block_hash"] == event["block_hashes"][1]
        assert two[1][0]["token_ids"] == PROMPT[32:48]
        assert three[1][0]["parent_block_hash"] == two[1][0]["block_hashes"][0]
        assert three[1][0]["token_ids"] == (PROMPT + said["choices"][0]["token_ids"])[48:64]


async def test_events_are_out_before_the_answer(run_stack):
    async with run_stack(step=StepTime(prefill=1.0)) as stack, subscribed(stack):
        for number in range(5):
            published = stack.publisher.sequence
            await complete(stack, list(range(100 * number, 100 * number + 40)))
            assert stack.publisher.sequence == published + 1


async def test_adapter_and_salt_in_extra_keys(run_stack):
    async with run_stack(lora=["tuned"]) as stack, subscribed(stack) as read:
        await complete(stack, model="tuned", cache_salt="s")
        await complete(stack, cache_salt="s")
        (_, one), (_, two) = await read(2)
        assert one[1][0]["extra_keys"] == [["tuned", "s"], ["tuned"], ["tuned"]]
        assert (one[1][0]["lora_name"], one[1][0]["lora_id"]) == ("tuned", 1)
        assert two[1][0]["extra_keys"] == [["s"], None, None]
        assert not {*one[1][0]["block_hashes"]} & {*two[1][0]["block_hashes"]}


async def test_evictions_and_a_reset(run_stack):
    async with run_stack(num_blocks=8, max_model_len=112) as stack, subscribed(stack) as read:
        for start in (0, 1000):
            await complete(stack, list(range(start, start + 70)))  # four full blocks each, seven there are
        (_, one), (_, two) = await read(2)
        kinds = [event["type"] for event in two[1]]
        assert kinds == ["BlockRemoved"] * 2 + ["BlockStored"]
        tail = one[1][0]["block_hashes"][:1:-1]
        assert [event["block_hashes"] for event in two[1][:2]] == [[hash] for hash in tail]
        assert two[1][0] == {"type": "BlockRemoved", "block_hashes": tail[:1], "medium": "GPU", "group_idx": 0}
        async with stack.session.post(stack.url + "/reset_prefix_cache") as response:
            assert response.status == 200
        await complete(stack)
        ((_, three),) = await read(1)
        assert three[1][0] == {"type": "AllBlocksCleared"} and three[1][1]["type"] == "BlockStored"


async def test_replay_from_any_number(run_stack):
    async with run_stack() as stack, subscribed(stack) as read:
        for start in range(0, 500, 100):
            await complete(stack, list(range(start, start + 40)))
        live = await read(5)
        assert await replayed(stack) == live
        assert await replayed(stack, 3) == live[3:]
        assert await replayed(stack, 9) == []


async def test_lost_and_reordered_batches(run_stack):
    async with run_stack() as stack, subscribed(stack) as read:

        async def each(numbers) -> None:
            for number in numbers:
                await complete(stack, list(range(100 * number, 100 * number + 40)))

        await stack.post("/faults", drop_events=2)
        await each(range(3))
        assert [number for number, _ in await read(1)] == [2]
        assert [number for number, _ in await replayed(stack)] == [0, 1, 2]
        await stack.post("/faults", reorder_events=1)
        await each(range(3, 6))
        assert [number for number, _ in await read(3)] == [4, 3, 5]


async def test_sources_and_an_engine_without_events(run_stack):
    async with run_stack() as stack:
        source = (await stack.get("/kv_event_sources"))["0"]
        assert source["endpoint"] == f"tcp://*:{stack.publisher.port}" and source["topic"] == ""
        assert source["replay_endpoint"] == f"tcp://*:{stack.publisher.replay_port}"
    async with run_stack(events=False) as stack:
        assert await stack.get("/kv_event_sources") == {}
        assert (await complete(stack))["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("size", [4, 32])
async def test_other_block_sizes(run_stack, size):
    async with run_stack(block_size=size) as stack, subscribed(stack) as read:
        await complete(stack)
        ((_, batch),) = await read(1)
        assert batch[1][0]["block_size"] == size
        assert len(batch[1][0]["block_hashes"]) == len(batch[1][0]["token_ids"]) // size == len(PROMPT) // size
        assert cached_tokens(await complete(stack)) == (len(PROMPT) - 1) // size * size
