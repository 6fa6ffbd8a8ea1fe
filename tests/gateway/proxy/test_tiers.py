"""What an engine fetches from slower tiers is part of the prediction, and no drift."""

import json

import pytest

from cachemap.changes import ChunkTier
from gateway.prompt.pipeline import Pipeline
from gateway.proxy.exactness.drift import WINDOW
from replicas.metrics import parse
from replicas.simulated.model import sim_model_dir

from ..http.talk import eventually
from .replies import ANSWER, answers, post
from .stack import stack

SIZE = 16


def usage(prompt, cached):
    details = {"prompt_tokens": prompt, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    return ANSWER[:-1] + b',"usage":' + json.dumps(details).encode() + b"}"


@pytest.mark.parametrize(
    "tokens, gpu, below, tier, reported",
    [
        (6 * SIZE + 3, 2, 6, "cpu", 6 * SIZE),
        # as vLLM counts a prompt that ends with a block, if a slower tier has that, whoever else has it,
        (6 * SIZE, 2, 6, "cpu", 6 * SIZE),
        (6 * SIZE, 6, 6, "disk", 6 * SIZE),
        (6 * SIZE, 6, 6, ChunkTier("cpu", 3).tier, 6 * SIZE - 1),  # or LMCache,
        (6 * SIZE, 6, 6, ChunkTier("cpu", 1).tier, 6 * SIZE - 1),
        (6 * SIZE, 6, 5, "cpu", 5 * SIZE),  # and if it is nowhere but on the GPU
    ],
)
async def test_what_all_tiers_deliver_is_as_predicted(tokens, gpu, below, tier, reported):
    pipeline = Pipeline(sim_model_dir(), "m", SIZE)
    async with stack(answers(usage(tokens, reported)), pipeline=pipeline, cached_tokens_header=True) as s:
        (backend,), cache_map = s.proxy.backends.values(), s.proxy.router.map
        cache_map.observed(backend.slot, True)
        body = {"model": "m", "prompt": list(range(1, tokens + 1))}
        hashes = s.proxy.models.pipelines[0].prepare("/v1/completions", json.dumps(body).encode()).hashes
        keys = list(range(1, len(hashes) + 1))
        cache_map.store(backend.slot, hashes[:below], keys[:below], tier)
        cache_map.store(backend.slot, hashes[:gpu], keys[:gpu])
        talk = await s.talk()
        for _ in range(WINDOW + 1):
            cache_map._routed.clear(backend.slot)  # as if each came seconds after the one before
            _, headers, _ = await talk.ask(post(body, path=b"/v1/completions"))
            assert headers["x-hitherto-cached-tokens"] == str(reported)
            await eventually(s.idle)
        metrics = s.metrics
        assert metrics.predictions.values[backend.id, "equal"] == WINDOW + 1 and not metrics.heals.total()
        assert metrics.predicted_cached_tokens.total() == metrics.reported_cached_tokens.total()


async def asked_often(s, body):
    """As often as it takes for a map to be called wrong, and as if each came seconds after the one before."""
    (backend,), talk = s.proxy.backends.values(), await s.talk()
    for _ in range(WINDOW):
        s.proxy.router.map._routed.clear(backend.slot)
        await talk.ask(post(body, path=b"/v1/completions"))
        await eventually(s.idle)


@pytest.mark.parametrize("looked_up, heals", [(None, 1), (0, 1), (96, 0)])
async def test_what_comes_from_a_tier_of_which_nobody_tells_is_no_drift(looked_up, heals):
    """LMCache in the engine's process tells of no eviction, so nothing of it is mapped; what it delivers counts."""
    async with stack(answers(usage(6 * SIZE + 3, 6 * SIZE)), pipeline=Pipeline(sim_model_dir(), "m", SIZE)) as s:
        (backend,), cache_map = s.proxy.backends.values(), s.proxy.router.map
        cache_map.observed(backend.slot, True)
        page = (
            f'vllm:external_prefix_cache_queries_total{{engine="0"}} {looked_up}.0\n' if looked_up is not None else ""
        )
        backend.replica.scrape = parse(page.encode(), 0.0, backend.replica.dialect.metrics)
        body = {"model": "m", "prompt": list(range(6 * SIZE + 3))}
        await asked_often(s, body)
        assert s.metrics.predictions.values[backend.id, "under"] == WINDOW and s.metrics.heals.total() == heals


async def test_a_tier_that_delivers_nothing_is_drift():
    async with stack(answers(usage(6 * SIZE + 3, 2 * SIZE)), pipeline=Pipeline(sim_model_dir(), "m", SIZE)) as s:
        (backend,), cache_map = s.proxy.backends.values(), s.proxy.router.map
        cache_map.observed(backend.slot, True)
        body = {"model": "m", "prompt": list(range(6 * SIZE + 3))}
        hashes = s.proxy.models.pipelines[0].prepare("/v1/completions", json.dumps(body).encode()).hashes
        cache_map.store(backend.slot, hashes, list(range(1, 7)), "disk")
        await asked_often(s, body)
        assert s.metrics.heals.total() == 1
