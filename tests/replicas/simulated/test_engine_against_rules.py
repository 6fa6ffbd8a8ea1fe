"""The engine, which looks at requests only when something happens to them, against the rules step by step."""

from hypothesis import given, settings
from hypothesis import strategies as st

from replicas.simulated.engine import Cleared, Engine, EngineRequest, Removed, Stored
from replicas.simulated.profile import Profile, StepTime

from . import reference

limits = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(9, 40),
        "block_size": st.integers(1, 5),
        "max_num_seqs": st.integers(1, 6),
        "max_num_batched_tokens": st.integers(6, 30),
    }
)
# What arrives before a step: (text, where it turns into its own, prompt tokens, output tokens), or an abort of the nth.
arrivals = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(1, 40), st.integers(1, 25)), max_size=2)
script = st.lists(st.tuples(arrivals, st.one_of(st.none(), st.integers(0, 30))), min_size=1, max_size=40)


def keys_of(text: int, turn: int, own: int, count: int) -> list:
    """Chained keys: the shared text's up to block `turn`, then the request's own."""
    return [(text, index) if index < turn else (text, turn, own, index) for index in range(count)]


def events_of(step) -> list:
    told = []
    for event in step.events:
        assert not isinstance(event, Cleared)
        told += [("removed" if isinstance(event, Removed) else "stored", key) for key in event.keys]
        if isinstance(event, Stored) and event.start:
            assert event.parent is not None
    return told


@settings(max_examples=300)
@given(limits, script, st.booleans())
def test_every_step_is_as_the_rules_say(limits, script, every_token):
    engine = Engine(Profile("test", StepTime(), max_model_len=10_000, **limits), every_token)
    rules = reference.Reference(**limits)
    size, ids, jobs, got = limits["block_size"], [], {}, {}
    room = engine.profile.context_length

    def step() -> bool:
        made = engine.step()
        if made is None:
            assert not rules.waiting and not rules.running
            return False
        scheduled, events, told, ended = rules.step()
        assert events_of(made) == events
        assert made.prefill_tokens + made.decode_tokens == sum(scheduled.values())
        assert [output.id for output in made.outputs if output.finished] == [id for id in told if id in ended]
        if every_token:
            assert sorted(output.id for output in made.outputs) == sorted(told)
        for output in made.outputs:
            assert output.cached_tokens == jobs[output.id].cached
            assert output.first == (output.id not in got)
            got[output.id] = got.get(output.id, 0) + output.tokens
            if output.finished:
                assert got[output.id] == jobs[output.id].max_tokens
        assert (engine.running, engine.waiting) == (len(rules.running), len(rules.waiting))
        assert engine.kv_usage == 1 - len(rules.free) / (limits["num_blocks"] - 1)
        return True

    for new, aborted in script:
        for text, turn, prompt, output in new:
            prompt = min(prompt, room - 1)
            output, id = min(output, room - prompt), str(len(ids))
            keys = keys_of(text, turn, len(ids), (prompt + output) // size + 1)
            jobs[id] = reference.Job(id, keys, prompt, output)
            ids.append(id)
            engine.add(EngineRequest(id, keys[: prompt // size], prompt, output, keys.__getitem__))
            rules.waiting.append(jobs[id])
        if aborted is not None and aborted < len(ids):
            engine.abort(ids[aborted])
            rules.abort(ids[aborted])
        step()
    for _ in range(10_000):
        if not step():
            break
    assert engine.kv_usage == 0 and engine.batch.context == 0 and not engine.to_prefill
