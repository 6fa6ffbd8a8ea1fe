"""What is sent makes another map equal, whatever happened, as deltas, as a snapshot, and as one after the other."""

import json

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachemap import CacheMap
from cachemap.changes import EVERY, CacheGroup, ChunkTier, Clear, Contents, Observe, Store
from cachemap.cluster.codec import (
    Damaged,
    Identity,
    Position,
    Snapshot,
    Unreadable,
    decode_delta,
    decode_header,
    decode_snapshot,
    encode_change,
    encode_delta,
    encode_snapshot,
)
from cachemap.cluster.journal import KEEP, LEAST_TAIL, TAIL, Journal
from cachemap.events.groups import MOST_INDEX
from cachemap.events.records import Blocks
from cachemap.table.blocks import u64

from .gateways import contents

MIB = 1 << 20
IDENTITY = Identity("m", 16, 36)
BLOCKS = st.integers(1, 40)
GROUPS = CacheGroup(0, 4), CacheGroup(300, EVERY), CacheGroup.of_states(MOST_INDEX), CacheGroup.of_parts(MOST_INDEX, 8)
CHUNKS = ChunkTier("cpu", 16), ChunkTier("disk", 4, own=True)
TIERS = st.sampled_from(["gpu", "gpu", "cpu", "disk", *(one.tier for one in (*GROUPS, *CHUNKS))])
HAPPENINGS = st.lists(
    st.one_of(
        st.tuples(st.just("store"), st.lists(BLOCKS, min_size=1, max_size=12), TIERS),
        st.tuples(st.just("remove"), st.lists(BLOCKS, min_size=1, max_size=12), TIERS),
        st.tuples(st.just("group"), st.integers(0, 2)),
        st.tuples(st.just("clear"), st.booleans()),
        st.tuples(st.just("observed"), st.booleans()),
        st.tuples(st.just("send")),
        st.tuples(st.just("snapshot")),
    ),
    max_size=60,
)


def attached(budget=MIB):
    table = CacheMap(budget)
    table.attach("r", None, True)
    return table


def happen(table, what, *details):
    if what == "store":
        numbers, tier = details
        heads = [(i, (n - 1) * 1_000_003) for i, n in enumerate(numbers)]
        table.store(0, [n * 1_000_003 for n in numbers], [n + 7 for n in numbers], tier, heads)
    elif what == "remove":
        table.remove(0, [n + 7 for n in details[0]], details[1])
    elif what == "group":
        table.add_group(0, CacheGroup(details[0], 4))
    elif what == "clear":
        table.clear(0, *details)
    else:
        table.observed(0, *details)


def over_the_wire(snapshot):
    return decoded(encode_snapshot(IDENTITY, snapshot))


def decoded(pieces, identity=IDENTITY):
    return decode_snapshot(identity, decode_header(pieces[0]), pieces[1:])


@settings(max_examples=200)
@given(HAPPENINGS)
def test_a_follower_equals_its_leader_after_anything(happenings):
    leader, follower, joiner = attached(), attached(), attached()
    journal = Journal(0, whole=False)
    leader.record(0, journal.add)
    for what, *details in [*happenings, ("send",), ("snapshot",)]:
        if what == "send":
            delta = journal.seal(Position(3, 1.5))
            if delta is not None:
                journal.sent(len(delta))
                read = decode_delta(b"\0" * 8 + delta)
                assert read.position == (3, 1.5) and read.term == journal.term
                for change in read.changes:
                    follower.change(0, change)
                assert contents(follower) == contents(leader)
        elif what == "snapshot":
            read = over_the_wire(Snapshot(5, 9, Position(None), leader.contents(0)))
            assert read[:3] == (5, 9, (None, 0.0))
            for _ in joiner.become(0, read.contents):
                pass
            assert contents(joiner) == contents(leader)
        else:
            happen(leader, what, *details)


@settings(max_examples=50)
@given(HAPPENINGS, st.integers(0, 59))
def test_a_map_made_equal_by_a_snapshot_goes_on_with_deltas(happenings, at):
    leader, follower = attached(), attached()
    happenings = [one for one in happenings if one[0] not in ("send", "snapshot")]
    for one in happenings[:at]:
        happen(leader, *one)
    happen(follower, "store", [1, 2, 50], "cpu")  # what a follower holds before does not matter
    for _ in follower.become(0, over_the_wire(Snapshot(1, 1, Position(), leader.contents(0))).contents):
        pass
    leader.record(0, lambda change: follower.change(0, change))
    for one in happenings[at:]:
        happen(leader, *one)
    assert contents(follower) == contents(leader)


def test_where_memory_is_short_a_follower_holds_no_more_than_the_engine_does():
    leader, follower = attached(), attached()
    leader.record(0, lambda change: follower.change(0, change))
    rng = np.random.default_rng(1)
    truth: dict[int, int] = {}
    for _ in range(60):
        hashes = [int(h) for h in rng.integers(1, 1 << 63, 1000)]
        leader.store(0, hashes, hashes)
        truth |= dict(zip(hashes, hashes, strict=True))
        gone = [int(k) for k in rng.choice(list(truth), 300, replace=False)]
        leader.remove(0, gone)
        for key in gone:
            del truth[key]
    assert leader.stats()["evicted"] and follower.stats()["evicted"]
    for one in (leader, follower):
        assert set(contents(one)["held"].values()) <= truth.keys()


def test_thirteen_bytes_a_block():
    table = attached()
    hashes = list(range(1, 20_001))
    table.store(0, hashes, hashes)
    pieces = encode_snapshot(IDENTITY, Snapshot(1, 1, Position(), table.contents(0)))
    assert sum(map(len, pieces)) < 13 * 20_000 + 300


@pytest.mark.parametrize(
    ("identity", "why"),
    [
        (Identity("other", 16, 36), "model m, here it is other"),
        (Identity("m", 32, 36), "block size 16, here it is 32"),
        (Identity("m", 16, 35), "tag bits 36, here it is 35; give all gateways the same cache_budget"),
    ],
)
def test_a_snapshot_of_another_kind_of_gateway_is_refused(identity, why):
    pieces = encode_snapshot(IDENTITY, Snapshot(1, 1, Position(), Contents(True, {}, {})))
    with pytest.raises(Unreadable, match=why):
        decoded(pieces, identity)


def test_what_the_engines_blocks_are_is_told_also_where_prompts_are_hashed_in_others():
    pieces = encode_snapshot(IDENTITY, Snapshot(1, 1, Position(), Contents(True, {}, {}), Blocks(128, 1, 16)))
    assert decoded(pieces).blocks == decode_header(pieces[0]).blocks == (128, 1, 16)
    with pytest.raises(Unreadable):
        decoded(pieces, IDENTITY._replace(block_size=128))
    header = json.loads(pieces[0])
    for odd in (None, 7, [1, 2, 3, 4], [128, 0, -1], ["128", 0, 0], [1 << 40, 0, 0], {}, [True, 0, 0], [128, 17, 0]):
        with pytest.raises(Damaged):
            decode_header(json.dumps(header | {"blocks": odd}).encode())


def test_damage_is_found():
    table = attached()
    table.store(0, [1, 2, 3], [4, 5, 6])
    pieces = encode_snapshot(IDENTITY, Snapshot(1, 1, Position(), table.contents(0)))
    header = json.loads(pieces[0])
    for broken in (
        [pieces[0], pieces[1][:-1]],
        [pieces[0], b"\1" + pieces[1][1:]],
        [b"{}"],
        [b"[" * 100_000],
        [b'{"x":' + b"[" * 100_000],
        [b"nothing", b""],
        *([json.dumps(header | odd).encode(), *pieces[1:]] for odd in (
            {"format": 1}, {"n": -1}, {"n": True}, {"n": 1 << 63}, {"sequence": -1}, {"timestamp": "x"}, {"observed": 1},
            {"held": {"gpu": 1 << 62}}, {"held": {"tape": 3}}, {"held": {"gpu": 2}}, {"copies": {"gpu": -1}}, {"held": []},
        )),
    ):  # fmt: skip
        with pytest.raises(Damaged):
            decoded(broken)
    good = encode_delta(1, 0, Position(3, 1.5), [encode_change(Clear())])
    store = msgspec.msgpack.decode(encode_change(Store("gpu", *map(u64, ([1, 2], [3, 4])), [(0, 0)])))
    assert decode_delta(b"\0" * 8 + good).changes == [Clear()]
    changes = [[9], [0, *store[1:4]], [*store[:4], b"abc"], [*store[:3], store[3] * 2, store[4]], [0, "tape", *store[2:]],
               [*store[:3], bytes(16), store[4]], [*store[:2], b"\2" + bytes(11), *store[3:]], [1, "gpu", b"abc"], 7]  # fmt: skip
    deep = b"\0" * 8 + b"\x96" + good[1:] + b"\x91" * 100_000
    for broken in (b"", deep, b"\0" * 29, good, b"\0" * 8 + good[:-1], *(
        b"\0" * 8 + msgspec.msgpack.encode([1, 0, 3, 1.5, [one]]) for one in changes
    )):  # fmt: skip
        with pytest.raises(Damaged):
            decode_delta(broken)


def test_a_snapshot_is_due_when_the_tail_has_grown_and_a_little_of_it_stays():
    journal = Journal(0, whole=False)
    blocks, n = 100_000, 0
    while not journal.due(blocks):
        journal.sent(5000)
        n += 1
    assert TAIL * blocks < journal.tail_bytes < TAIL * blocks + 6000 and journal.n == n
    first = journal.first_to_keep(blocks)
    journal.trimmed(first)
    assert 1 < first <= n and KEEP * blocks - 6000 < journal.tail_bytes <= KEEP * blocks
    assert not journal.due(blocks) and not Journal(0, False).due(0)
    small = Journal(0, False)
    small.sent(LEAST_TAIL)
    assert small.due(5)


def test_what_waits_too_long_becomes_a_snapshot():
    journal = Journal(7, whole=False)
    table = attached(64 * MIB)
    table.record(0, journal.add)
    table.store(0, list(range(1, 100_001)), list(range(100_000)))
    assert journal.whole and journal.due(0) and journal.seal(Position()) is None
    journal.whole = False  # the snapshot is on its way
    table.store(0, list(range(200_001, 300_001)), list(range(200_000, 300_000)))
    journal.anew(8)
    assert journal.whole  # what came meanwhile was too much as well: another one
    journal.whole = False
    journal.anew(9)
    journal.add(Clear())
    journal.add(Clear(below=False))
    journal.add(Observe(False))
    assert [type(one) for one in decode_delta(b"\0" * 8 + journal.seal(Position())).changes] == [Clear, Clear, Observe]
