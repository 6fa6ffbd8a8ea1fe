"""Decisions are sampled as they are made: a few explained, the others untouched."""

import json
from time import monotonic

import pytest

from gateway.ops.recent import decisions
from gateway.ops.recent.decisions import MOST_BYTES, SPAN, Sampler
from gateway.prompt.pipeline import Pipeline
from replicas.simulated.model import sim_model_dir

from ...http.talk import eventually
from ...proxy.replies import answers, post
from ...proxy.stack import stack
from ...proxy.test_queue import Engine, overload, send

SECRET = "The launch code is 0000. " * 20


def chat(text=SECRET):
    return post(json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode())


@pytest.fixture(scope="module")
def pipeline():
    return Pipeline(sim_model_dir(), "m", 16)


async def asked(s, request, times=1):
    talk = await s.talk()
    for _ in range(times):
        await talk.say(request)
        assert (await talk.response())[0] == 200
    await eventually(s.idle)


async def test_one_decision_is_seen_and_then_nobody_looks(pipeline):
    async with stack(answers(), answers(), policy="least_time", pipeline=pipeline) as s:
        sampler, placing = Sampler(s.proxy.placing), s.proxy.placing
        assert placing.onlooker is None, "a request pays for nothing that is not there"
        sampler.arm(monotonic())
        await asked(s, chat(), times=3)
        assert placing.onlooker is None and len(sampler.decisions) == len(sampler.samples) == 1
        (one,) = sampler.decisions
        assert one["sentence"].startswith(
            f"{one['replicas'][0]}, drawn from all 2, which cost the same to within 0.1 ms: "
        )
        assert one["model"] == "m" and one["tokens"] > 100 == one["held_tokens"] + 100
        assert one["replicas"][0] in s.proxy.backends
        sampler.arm(monotonic())
        assert placing.onlooker is None, "not before the pause is over"
        sampler.arm(monotonic() + 60)
        assert placing.onlooker is sampler


async def test_of_replicas_that_are_ready_the_one_with_room_is_not_told_of_as_the_only_one_there_is():
    first, second = Engine(), Engine()
    async with stack(first, second, overload=overload()) as s:
        sampler = Sampler(s.proxy.placing)
        held = await send(s, "held")
        await eventually(lambda: first.seen)
        second.answer("quick")
        assert (await (await send(s, "quick")).response())[0] == 200
        await eventually(lambda: sum(one.candidate.load.requests for one in s.proxy.backends.values()) == 1)
        sampler.arm(monotonic())
        second.answer("now")  # it is the first one's turn, which has no room
        assert (await (await send(s, "now")).response())[0] == 200
        first.answer("held")
        assert (await held.response())[0] == 200
        await eventually(s.idle)
        assert second.seen == ["quick", "now"]
        told = sampler.decisions[0]["sentence"]
        assert told.startswith(f"{[*s.proxy.backends][1]}, the only replica that admission allows to take it: ")


async def test_nothing_of_prompts_is_kept_unless_it_is_allowed(pipeline):
    for allowed in (False, True):
        async with stack(answers(), policy="least_time", pipeline=pipeline) as s:
            sampler = Sampler(s.proxy.placing, allowed)
            sampler.arm(monotonic())
            await asked(s, chat())
            kept = json.dumps([*sampler.decisions]) + "".join(one.text for one in sampler.samples)
            assert ("launch code" in kept) is allowed
            assert sampler.decisions[0]["text"] == (SECRET.strip() + " " if allowed else None)


async def test_what_the_policy_chose_and_what_others_would_have_done_stay_as_without_it(pipeline):
    async with stack(answers(), answers(), policy="round_robin", shadows=["least_load"], pipeline=pipeline) as s:
        sampler = Sampler(s.proxy.placing)
        for _ in range(4):
            sampler.arm(monotonic() + 60)
            await asked(s, chat())
        assert s.proxy.placing.onlooker is s.proxy.placing.shadows
        assert sorted(s.metrics.replica_requests.values.values()) == [2, 2]
        assert s.metrics.shadow_decisions.total(policy="least_load") == 4, "the shadow has seen them all"
        assert [one["replicas"][0] for one in sampler.decisions][:2] == [
            one["replicas"][0] for one in sampler.decisions
        ][2:]
        assert ", by round_robin (its turn): its answer is predicted to take " in sampler.decisions[0]["sentence"]


async def test_a_decision_that_cannot_be_explained_is_placed_all_the_same(pipeline, monkeypatch, caplog):
    def fail(*given):
        raise RuntimeError("no words")

    monkeypatch.setattr(decisions, "describe", fail)
    async with stack(answers(), policy="least_time", pipeline=pipeline) as s:
        sampler = Sampler(s.proxy.placing)
        sampler.arm(monotonic())
        await asked(s, chat(), times=2)
        assert not sampler.decisions and s.proxy.placing.onlooker is None
    assert "a decision could not be explained" in caplog.text


async def test_a_request_whose_prompt_is_not_read_is_told_of_without_one(pipeline):
    async with stack(answers(), policy="least_time", pipeline=pipeline) as s:
        sampler = Sampler(s.proxy.placing, texts=True)
        sampler.arm(monotonic())
        await asked(s, post(b'{"model": "m", "query": "x"}', b"/v1/rerank"))
        (one,) = sampler.decisions
        assert (one["path"], one["tokens"], one["text"]) == ("/v1/rerank", 0, "") and not sampler.samples


async def test_samples_are_bounded_in_bytes_and_in_time(pipeline):
    async with stack(answers(), policy="least_time", pipeline=pipeline) as s:
        sampler = Sampler(s.proxy.placing)
        prompt = await s.proxy.preparation.prompt(
            "/v1/completions", b'{"model": "m", "prompt": "' + b"word " * 40_000 + b'"}', {}
        )
        assert len(prompt.hashes) > decisions.MOST_BLOCKS
        for _ in range(1000):
            sampler._add(prompt, "")
        kept = sampler.recent(monotonic())
        assert sum(one.size for one in kept) <= MOST_BYTES and len(kept[0].hashes) == decisions.MOST_BLOCKS
        assert len(kept) > 100 and sampler.recent(monotonic() + SPAN + 1) == [] and sampler._bytes == 0


@pytest.mark.parametrize(
    "body,text",
    [
        (b'{"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}', "Be kind. Hi"),
        (b'{"system": "Be kind.", "messages": [{"role": "user", "content": "Hi"}]}', "Be kind. Hi"),
        (b'{"instructions": "Be kind.", "input": "Hi", "user": "me"}', "Be kind. Hi"),
        (b'{"prompt": ["a", "b"]}', "a b"),
        (b'{"prompt": [1, 2]}', ""),
        (b"{", ""),
        (b"", ""),
        (b'{"prompt": "' + b"x" * 300_000 + b'"}', ""),
    ],
)  # fmt: skip
def test_the_beginning_of_a_prompt_is_found_where_apis_have_it(body, text):
    assert decisions.text_in(body) == text
