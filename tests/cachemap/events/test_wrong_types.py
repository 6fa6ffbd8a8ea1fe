"""Events of wrong types: whatever an engine writes, its decoder refuses or passes over what does not fit, and the map
takes the rest. Beside it, on the same map, another engine whose blocks stay what they are."""

from array import array
from copy import deepcopy

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cachemap import CacheMap, chain_seed, hash_blocks
from cachemap.events import apply, records
from cachemap.events.apply import EventApplier
from cachemap.events.records import AGREEING, Blocks, EventError
from replicas.engines.sglang import SGLANG
from replicas.engines.vllm import VLLM

from ..publisher import BLOCK, decode, stored

TOKENS = list(range(BLOCK * 4))
CHAIN = hash_blocks(array("I", TOKENS).tobytes(), BLOCK, chain_seed("m", BLOCK))
DEEP = 0
for _ in range(200):
    DEEP = [DEEP]

WRONG = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=9),
    st.sampled_from([[], {}, [[]], [None], [{"a": []}], {"a": 1}, {"cache_salt": 3}, DEEP, "x" * 2000, 2**31, [[1, 2]] * 4]),
    st.lists(st.integers(-9, 2**33), max_size=20),
    st.lists(st.text(max_size=2), max_size=4),
).map(deepcopy)  # fmt: skip


def of_vllm():
    image = stored([3], TOKENS[:4], 2, extra_keys=[["m", ["image", 3]]], lora_name="m")
    window = stored([1, 2], [], None, group_idx=1, kv_cache_spec_kind="sliding_window", kv_cache_spec_sliding_window=8)
    copied = stored([1, 2], TOKENS[:8], None, medium="CPU")
    array_ = ["BlockStored", [4], 3, TOKENS[:4], BLOCK, None, "GPU", None, [None], 0, "full_attention", None]
    below = {**stored([9], TOKENS[:8], None, medium="cpu", group_idx=None), "block_size": 8}
    gone = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "group_idx": 0}
    return [
        1.5,
        [stored([1, 2], TOKENS[:8]), image, window, copied, array_, below, gone, ["BlockRemoved", [4], "CPU"]],
        0,
    ]


def of_sglang():
    pairs = {**stored([5], [[1, 2], [2, 3]], None), "block_size": 2, "cache_salt": "s"}
    salted = ["BlockStored", [7], None, TOKENS[:4], BLOCK, None, "GPU", {"cache_salt": "a", "session_id": "b"}]
    page = ["BlockStored", [-8], 7, [1], 1, None, "CPU_TIER1"]
    return {
        "ts": 1.5,
        "events": [pairs, stored([6], TOKENS[:4]), salted, page, ["BlockRemoved", [7]], ["AllBlocksCleared"]],
    }


def places(value, at=()):
    """Yield the path to each value inside a value, beginning with the value itself."""
    yield at
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        yield from places(one, (*at, key))


def spoilt(draw, value):
    """Return the value with something in it replaced, removed or repeated."""
    for _ in range(draw(st.integers(1, 3))):
        known = [*places(value)]
        at = known[draw(st.integers(0, len(known) - 1))]
        if not at:
            return draw(WRONG)
        inside = value
        for key in at[:-1]:
            inside = inside[key]
        how = draw(st.sampled_from(["other", "other", "gone", "twice"]))
        if how == "gone":
            del inside[at[-1]]
        elif how == "twice" and isinstance(inside, list):
            inside.insert(at[-1], deepcopy(inside[at[-1]]))
        else:
            inside[at[-1]] = draw(WRONG)
    return value


packed = msgspec.msgpack.encode
ENGINES = {"vLLM": (VLLM, of_vllm), "SGLang": (SGLANG, of_sglang)}


class House:
    """A map with a good engine, whose blocks are known, and one that sends anything."""

    def __init__(self, dialect):
        self.map = CacheMap(1 << 20)
        good, bad = self.map.attach("good", None, True), self.map.attach("bad", None, True)
        self.applier = EventApplier(self.map, good, "m", BLOCK)
        self.applier.apply(decode(msgspec.msgpack.encode([1.0, [stored([1, 2, 3, 4], TOKENS)], 0])).events)
        self.applier.flush()
        self.bad = EventApplier(self.map, bad, "m", BLOCK)
        self.decode = dialect.event_decoder(records)

    def tell(self, payload: bytes) -> list[str]:
        """Apply what can be read of a batch, and return why the rest cannot."""
        try:
            batch = self.decode(payload)
        except EventError as error:
            return [str(error)]
        self.bad.apply(batch.events)
        self.bad.flush()
        return batch.passed_over

    def check(self):
        assert self.map.match(CHAIN, 0.0).confirmed[0] == 4


@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data())
def test_whatever_a_batch_has_in_it_the_map_takes_the_rest_of_it(name, data):
    dialect, valid = ENGINES[name]
    house = House(dialect)
    for _ in range(2):  # what one batch left may meet what the next one has
        house.tell(packed(spoilt(data.draw, valid())))
        house.check()


@given(st.data())
@example(None)
def test_what_is_right_beside_a_wrong_event_is_taken(data):
    house = House(VLLM)
    wrong = [stored([8], TOKENS[:4], lora_name={"a": 1})] if data is None else [data.draw(WRONG)]
    house.tell(msgspec.msgpack.encode([1.5, [stored([1, 2], TOKENS[:8]), *wrong, stored([3], TOKENS[8:12], 2)], 0]))
    assert house.map.match(CHAIN, 0.0).confirmed == [4, 3]


@pytest.mark.parametrize("name", ENGINES)
def test_all_of_a_valid_batch_is_read(name):
    dialect, valid = ENGINES[name]
    assert House(dialect).tell(packed(valid())) == []


def test_a_batch_written_as_a_map_says_the_same():
    timestamp, events, rank = of_vllm()
    as_map = decode(msgspec.msgpack.encode({"ts": timestamp, "events": events, "data_parallel_rank": rank, "new": [1]}))
    assert as_map == decode(msgspec.msgpack.encode([timestamp, events, rank])) and len(as_map.events) == len(events)


@pytest.mark.parametrize("nested", [b"\x91", b"\x81\xa1a", b"\x92\x00\x91"], ids=["arrays", "maps", "events"])
def test_what_is_too_deep_is_refused(nested):
    with pytest.raises(EventError):
        decode(b"\x92\x01" + nested * 100_000 + b"\xc0")


@pytest.mark.parametrize("name", ENGINES)
@given(data=st.data(), most=st.integers(1, 3))
def test_events_in_pieces_come_to_the_same(name, data, most):
    dialect, valid = ENGINES[name]
    whole, parts = House(dialect), House(dialect)
    events = dialect.event_decoder(records)(packed(valid())).events
    events = [events[i] for i in data.draw(st.lists(st.integers(0, len(events) - 1), max_size=8))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(apply, "MOST_PIECE", most)
        for piece in apply.in_pieces(events):
            parts.bad.apply(piece)
    whole.bad.apply(events)
    for house in (whole, parts):
        house.bad.flush()
    of = [house.map.contents(1) for house in (whole, parts)]
    found = [{tier: sorted(zip(*map(list, pair))) for tier, pair in one.held.items()} for one in of]
    assert found[0] == found[1] and of[0].copies == of[1].copies


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"token_ids": [[1, 1]] * 30_000}, "Expected `int`, got `array` - at `$.token_ids[0]`"),
        ({"token_ids": [1] * (1 << 20 | 1)}, "Expected `array` of length <= 1048576 - at `$.token_ids`"),
        ({"block_hashes": [1] * (1 << 20 | 1)}, "Expected `array` of length <= 1048576 - at `$.block_hashes`"),
        ({"extra_keys": [[[]] * 300_000]}, "extra_keys of more than 262144 lists"),
        ({"lookahead_token_ids": [[1]] * (1 << 20)}, "lookahead_token_ids of more than 1048576 bytes"),
        (
            {"lookahead_token_ids": [[1]] * (1 << 16 | 1)},
            "lookahead_token_ids are not at most 65536 lists of 1 to 16 tokens",
        ),
        ({"lora_name": dict.fromkeys("ab" * 64, 0) | {str(i): 0 for i in range(64)}}, "length <= 64"),
    ],
)
def test_more_values_than_may_be_decoded_in_one_call_are_refused_before_that(fields, why):
    """Decoding holds the interpreter lock: 2.7 million pairs held up all clients for seconds."""
    batch = decode(packed([1.0, [stored([1], TOKENS[:BLOCK], **fields), stored([2], TOKENS[:BLOCK])], 0]))
    assert [one.keys for one in batch.events] == [[2]] and why in batch.passed_over[0]


def test_more_tokens_behind_a_block_than_any_engine_has_are_never_part_of_its_name():
    """Believed, they were looped over for every prompt: with a million of them a short chat took 25 s."""
    house = House(VLLM)
    for length, passed_over in (
        (17, ["BlockStored: lookahead_token_ids are not at most 65536 lists of 1 to 16 tokens"] * AGREEING),
        (16, []),
    ):
        events = [stored([1], TOKENS[:BLOCK], lookahead_token_ids=[[1] * length])] * AGREEING
        assert house.tell(packed([1.0, events, 0])) == passed_over
        assert house.bad.stored_as.ahead == (0 if passed_over else 16)
    (event,) = decode(packed([1.0, [stored([1], TOKENS[:BLOCK])], 0])).events
    house.bad.apply([event._replace(lookahead=bytes(4 * 17))] * AGREEING)
    house.bad.believe(Blocks(BLOCK, 17))
    assert house.bad.stored_as.ahead == 0
