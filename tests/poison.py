"""What can befall a key in Redis: lost, of another type, cut, NaN, huge, of an older format. `poisons(client, key)` has
each as a name and what does it; all are applied at once, as by an operator's slip, another program, or eviction."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator

import redis

NAN, INFINITE = float("nan"), float("inf")
TEXTS = (b"", b"abc", b"nan", b"-1", b"1e308", b"9" * 400, b"123456789012", b"\xff\x00\n")
LOADS = (
    b"",
    b"x" * 7,
    *(struct.pack("<6d", *(6 * [number])) for number in (NAN, INFINITE, 1e300, -5.0, 0.5)),
    struct.pack("<6d", 7.0, 3.0, 900.0, 4.0, 80.0, 500.0),
)

Poison = tuple[str, Callable[[], object]]


def poisons(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    yield "deleted", lambda: client.delete(key)
    kind = client.type(key).decode()
    for other, make in _KINDS.items():
        if other != kind:
            yield f"a {other}", lambda make=make: (client.delete(key), make(client, key))
    yield from _WITHIN.get(kind, lambda client, key: ())(client, key)


def _strings(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    for text in TEXTS:
        yield f"set to {text[:12]!r}", lambda text=text: client.set(key, text)


def _hashes(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    for load in LOADS:
        yield (
            f"all fields set to {load[:12]!r}",
            lambda load=load: client.hset(key, mapping=dict.fromkeys([*client.hkeys(key), b"nobody:1"], load)),
        )
    yield "one field lost", lambda: client.hdel(key, *client.hkeys(key)[:1] or [b"none"])


def _sorted_sets(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    for score in (INFINITE, -INFINITE, 1e300):
        yield (
            f"all scores {score}",
            lambda score=score: client.zadd(key, dict.fromkeys([*client.zrange(key, 0, -1), b"nobody"], score)),
        )


def _lists(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    def header(**fields: object) -> None:
        client.lset(key, 0, json.dumps(json.loads(client.lindex(key, 0)) | fields))

    yield "its first piece garbage", lambda: client.lset(key, 0, b"{")
    yield "its last piece cut", lambda: client.lset(key, -1, client.lindex(key, -1)[:-3])
    yield "half of it gone", lambda: client.ltrim(key, 0, 0)
    yield "more than there was", lambda: client.rpush(key, b"x" * 1000)
    for fields in ({"schema": 0}, {"n": "abc"}, {"n": -1}, {"n": 1e300}, {"term": None}, {"sequence": "x"}, {"timestamp": NAN},
                   {"held": {"gpu": -1}}, {"held": {"moon": 0}}, {"held": []}, {"copies": {"gpu": 10**12}}, {"observed": 7}):  # fmt: skip
        yield f"its header says {fields}", lambda fields=fields: header(**fields)


def _streams(client: redis.Redis, key: bytes) -> Iterator[Poison]:
    def after(by: int, **fields: bytes) -> None:
        last = int(client.xinfo_stream(key)["last-generated-id"].partition(b"-")[0])
        client.xadd(key, fields, f"{last + by}-0")

    yield "an entry without its field", lambda: after(1, x=b"y")
    yield "an entry of garbage", lambda: after(1, d=b"\xff" * 50)
    yield "an entry cut short", lambda: after(1, d=b"\x00" * 11)
    yield "an entry far ahead", lambda: after(10**9, d=b"\x00" * 29)
    yield "the last number there can be", lambda: client.xadd(key, {"d": b""}, f"{2**64 - 1}-{2**64 - 1}")
    yield "emptied", lambda: client.xtrim(key, maxlen=0, approximate=False)


_KINDS = {
    "string": lambda client, key: client.set(key, "abc"),
    "list": lambda client, key: client.rpush(key, "abc"),
    "set": lambda client, key: client.sadd(key, "abc"),
    "hash": lambda client, key: client.hset(key, "abc", "abc"),
    "zset": lambda client, key: client.zadd(key, {"abc": 1}),
    "stream": lambda client, key: client.xadd(key, {"abc": "abc"}),
}
_WITHIN = {"string": _strings, "hash": _hashes, "zset": _sorted_sets, "list": _lists, "stream": _streams}
