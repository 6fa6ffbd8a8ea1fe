"""Prompts with images through a whole proxy: where they go, and what is counted."""

import pytest

from gateway.prompt.pipeline import Pipeline
from policies import make
from replicas.simulated.model import sim_model_dir

from ..prompt.media.models import assistant, data_url, image, pipeline, png, text, user
from .replies import answers, post
from .stack import stack

URLS = [data_url(png(shade=shade)) for shade in range(6)]


def asks(*messages):
    return post({"model": "m", "messages": messages})


def urls(seen):
    return [next(url for url in URLS if url.encode() in body) for _, body in seen]


@pytest.mark.parametrize("observed", [False, True])
async def test_a_conversation_goes_on_where_its_image_was_seen(observed):
    """At replicas whose caches are modelled, and at such that tell their blocks."""
    seen = [[], []]
    async with stack(*[answers(seen=one) for one in seen], pipeline=pipeline()) as s:
        for slot in range(2):
            s.proxy.router.map.observed(slot, observed)
        talk = await s.talk()
        for more in ((), (assistant("A house."), user(text("Are you sure?")))):
            for url in URLS if not more else reversed(URLS):
                assert (await talk.ask(asks(user(image(url), text("What is on this picture? " * 20)), *more)))[0] == 200
            s.proxy.router.policy = make("overlap_cost")  # the first turns went to one after the other
        assert list(map(len, seen)) == [6, 6]
        for one in seen:
            went = urls(one)
            assert all(went.count(url) == 2 for url in went), "not where its image was seen"
        assert s.metrics.media_prompts.values == {("family",): 12}
        assert s.metrics.prompts.values == {("partly",): 12}
        assert s.metrics.prompt_failures.total() == 0 and s.metrics.heals.total() == 0


async def test_media_for_a_model_of_text_alone_are_counted_as_well(caplog):
    async with stack(answers(), pipeline=Pipeline(sim_model_dir(), "m", 16)) as s:
        assert (await s.ask(asks(user(image("https://example.com/a.png")))))[0] == 200
        assert s.metrics.media_prompts.values == {("load",): 1}
        assert s.metrics.prompt_failures.total() == 1
        assert "a prompt is not known exactly at /v1/chat/completions: media in the prompt" in caplog.text
        assert s.metrics.prompts.values == {("text",): 1}


async def test_a_prompt_that_the_engine_refuses_is_not_counted_against_what_is_known_of_prompts():
    async with stack(answers(b"{}", b"400 Bad Request"), pipeline=Pipeline(sim_model_dir(), "m", 16)) as s:
        assert (await s.ask(asks(user(image("https://example.com/a.png")))))[0] == 400
        assert s.metrics.prompts.values == {}


async def test_images_are_named_only_where_all_engines_have_the_model_from_one_place():
    made = Pipeline(sim_model_dir(), "m", 16)
    async with stack(answers(), answers(), pipeline=made) as s:
        first, second = (backend.replica for backend in s.proxy.backends.values())
        found = []
        for roots in (("a", "a"), ("a", "b"), (None, "a"), ("b", "b")):
            first.root, second.root = roots
            for replica in (first, second):
                space = s.proxy.models.adopt(replica)
            found.append(space.pipeline.media.root)
        assert found == ["a", "", "", "b"]
