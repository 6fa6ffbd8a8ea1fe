"""Host memory behind the simulated engine's cache: what is found there is fetched, counted and told as vLLM does."""

import random
from dataclasses import replace

import pytest

from replicas.simulated.engine import Engine, EngineRequest, Removed, Stored
from replicas.simulated.profile import load_profile

SIZE = 16
PROFILE = replace(load_profile("gpu-8b"), num_blocks=9, cpu_blocks=32)  # 8 can be used


def ask(engine, name, chain, tokens=None, output=1):
    """Run one request alone: (cached tokens, seconds to its first token, events)."""
    keys = [(chain, number) for number in range((tokens or 97) // SIZE)]
    engine.add(EngineRequest(name, keys, tokens or 97, output))
    seconds, events = 0.0, []
    while step := engine.step():
        seconds += step.seconds
        events += step.events
        for out in step.outputs:
            if out.first:
                found = out.cached_tokens, seconds
    return *found, events


def told(events, kind, tier):
    return [key for event in events if type(event) is kind and event.tier == tier for key in event.keys]


def test_what_was_evicted_to_host_memory_is_fetched_in_the_time_that_takes():
    engine = Engine(PROFILE)
    _, computing, events = ask(engine, 1, "a")
    assert told(events, Stored, "cpu") == told(events, Stored, "gpu") == [("a", n) for n in range(6)]
    ask(engine, 2, "b")
    cached, seconds, events = ask(engine, 3, "a")
    assert cached == 6 * SIZE and engine.counters.prefix_hits + engine.counters.external_hits == cached
    held = engine.counters.prefix_hits // SIZE
    fetch = (6 - held) * SIZE * PROFILE.kv_bytes_per_token / 25e9
    one_token = PROFILE.step.seconds(1, 0.0, 0, 0, 0.0)
    assert seconds == pytest.approx(fetch + one_token, rel=1e-3) and seconds < computing
    assert told(events, Stored, "gpu") == [("a", n) for n in range(held, 6)] and not told(events, Stored, "cpu")


def test_a_prompt_that_is_fetched_to_its_end_computes_its_last_token():
    engine = Engine(PROFILE)
    ask(engine, 1, "a", 96)
    ask(engine, 2, "b", 96)
    cached, _, events = ask(engine, 3, "a", 96)
    assert cached == 96, "as vLLM's offloading connector counts it"
    stored = told(events, Stored, "gpu")
    assert len(stored) == len(set(stored)), "no block is told twice"


def test_host_memory_forgets_what_was_used_longest_ago():
    engine = Engine(replace(PROFILE, cpu_blocks=12))
    for number, chain in enumerate("abc"):
        _, _, events = ask(engine, number, chain)
    assert sorted(told(events, Removed, "cpu")) == [("a", n) for n in range(6)]
    assert ask(engine, 9, "a")[0] == 0


def test_chunks_are_found_whole_or_not_at_all():
    engine = Engine(replace(PROFILE, chunk_blocks=4))
    _, _, events = ask(engine, 1, "a")
    assert told(events, Stored, "cpu") == [("a", n) for n in range(4)]
    ask(engine, 2, "b", 127)
    ask(engine, 3, "c", 127)
    assert ask(engine, 4, "a")[0] == 64


def test_two_that_want_the_same_wait_for_one_fetch():
    engine = Engine(replace(PROFILE, num_blocks=17))
    ask(engine, 1, "a")
    for number in range(3):
        ask(engine, 10 + number, f"b{number}")
    for number in (2, 3):
        engine.add(EngineRequest(number, [("a", n) for n in range(6)], 97, 1))
    events, cached = [], []
    while step := engine.step():
        events += step.events
        cached += [output.cached_tokens for output in step.outputs]
    assert cached == [96, 96] and told(events, Stored, "gpu").count(("a", 5)) == 1


def test_who_leaves_while_it_fetches_leaves_nothing_behind():
    engine = Engine(PROFILE)
    ask(engine, 1, "a")
    ask(engine, 2, "b")
    engine.add(EngineRequest(3, [("a", n) for n in range(6)], 97, 1))
    engine.step()
    assert engine.waiting == 1 and engine.abort(3) and engine.step() is None
    assert engine.kv_usage == 0.0 and ask(engine, 4, "a")[0] == 96


@pytest.mark.parametrize("tiers", [{}, {"chunk_blocks": 3}])
def test_events_tell_what_host_memory_holds(tiers):
    """Whatever comes: replayed, they give the cache and host memory as they are, and no request hangs."""
    engine, rng = Engine(replace(PROFILE, num_blocks=41, **{"cpu_blocks": 60, **tiers})), random.Random(1)
    held, ended = {"cpu": set(), "gpu": []}, 0
    for number in range(600):
        chain, tokens = rng.randrange(9), rng.randrange(1, 300)
        engine.add(EngineRequest(number, [(chain, n) for n in range(tokens // SIZE)], tokens, rng.randrange(1, 40)))
        for _ in range(rng.randrange(6)):
            for event in (step := engine.step() or type("Idle", (), {"events": [], "outputs": []})).events:
                having = held[event.tier]
                if event.tier == "gpu":
                    for key in event.keys:
                        having.append(key) if type(event) is Stored else having.remove(key)
                elif type(event) is Stored:
                    having.update(event.keys)
                else:
                    assert having.issuperset(event.keys)
                    having.difference_update(event.keys)
            ended += sum(1 for output in step.outputs if output.finished)
    while step := engine.step():
        ended += sum(1 for output in step.outputs if output.finished)
        assert step.seconds >= 0
    assert ended == 600
    assert len(held["cpu"]) <= 60 and len(set(held["gpu"])) <= 40


def test_lmcache_finds_whole_chunks_from_the_beginning_of_a_prompt():
    engine = Engine(replace(PROFILE, num_blocks=12, cpu_blocks=12, chunk_blocks=4, lmcache=True))
    ask(engine, 1, "a", 160)  # two chunks and a half
    for name in "bc":
        ask(engine, name, name, 64)
    assert engine.found([("a", n) for n in range(10)], 160) == 4, "of a its second chunk went, before its first"
    cached, _, events = ask(engine, 2, "a", 160)
    assert cached == 64 and told(events, Stored, "cpu") == [("a", n) for n in range(4, 8)]
    ask(engine, 3, "d", 64)
    assert ask(engine, 4, "a", 64)[0] == 63, "a prompt's last token is computed, and not counted as found"
