"""Images held to vLLM's own code: their names, their tokens, and the blocks that they are in; and once to an engine."""

import json
import random

import httpx
import pytest

from gateway.prompt.media import llama4, qwen_vl
from gateway.prompt.media.identity import FRAMED, PLAIN, Identities
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT
from replicas.engines.vllm.versions import version_quirks

from ..gateway.prompt.media import cutting, pictures
from ..gateway.prompt.media.bodies import FAMILIES, compare, recordings
from ..gateway.prompt.media.models import assistant, blank, data_url, image, system, text, user
from ..gateway.prompt.media.sizes import sizes
from .engines import folder, release, version
from .record_media import MODEL, PROCESSOR, asked, blocks, tiles, vision
from .traffic import cached, prompt_tokens

pytestmark = [pytest.mark.exact, pytest.mark.timeout(900)]


@pytest.fixture
def with_vision(vllm):
    if not (folder() / "vision" / "torchvision").is_dir():
        pytest.skip("vLLM's environment has no torchvision: tests/vllm/install.sh brings one")


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_of_bodies(with_vision, tmp_path, family):
    """By vLLM's own renderers, processors and rule for keys, without an engine."""
    name, theirs = release(), blocks(family, tmp_path)
    found = compare(family, FAMILIES[family].folder(tmp_path / "model"), name, theirs)
    assert not found.wrong and not found.declined and len(found.equal) > 100
    recorded = {(one.family, one.version): one.answers for one in recordings()}
    assert recorded.get((family, name), theirs) == theirs, "what is recorded is another engine's"


def test_tiles_of_llama4(with_vision):
    for setting, theirs in zip(cutting.SETTINGS, tiles(), strict=True):
        grid = llama4.tiling(setting.tile, setting.most, setting.largest)
        assert [list(grid(*size)) for size in setting.sizes()] == theirs


def test_names_and_counts_of_images_of_all_kinds(vllm):
    images = {**pictures.readable(), **pictures.unreadable()}
    names, rule = Identities(), PLAIN if version() < (0, 29) else FRAMED
    told = asked(images.values())
    for (what, one), theirs in zip(images.items(), told, strict=True):
        if what in pictures.unreadable():
            continue  # the gateway says nothing of these, see tests/gateway/prompt/media
        known = names.of(data_url(one), rule, MODEL)
        count = qwen_vl.tokens(known.image.width, known.image.height, 28, PROCESSOR["min_pixels"], PROCESSOR["max_pixels"])  # fmt: skip
        assert [known.identity, count] == theirs, what


def test_cached_tokens_of_gemma3(with_vision, start_engine, tmp_path):
    """Conversations with an engine that computes: each prompt's tokens and its cached ones are as predicted."""
    if version() < (0, 29):
        pytest.skip("vLLM 0.28 does not start a Gemma 3 with transformers 5.24, which it is installed with")
    model = FAMILIES["Gemma 3 with images"].folder(tmp_path / "gemma3")
    engine = start_engine("--load-format", "dummy", model=model, events=None, blocks=1024, env=vision()).wait()
    pipeline = Pipeline(model, engine.name, engine.block_size)
    pipeline.follow(version_quirks(release()))
    pipeline.media.root = str(model)
    dice, held, found = random.Random(3), set(), 0
    urls = [data_url(blank(*size)) for size in sizes(56, 16, 24)[-24:]]
    talks = [[system(30)] for _ in range(4)]
    for _ in range(40):
        talk = dice.choice(talks)
        talk.append(user(text("See "), image(dice.choice(urls)), text(" word" * dice.randrange(20))))
        body = {"model": engine.name, "messages": talk, "max_tokens": 1}
        answer = httpx.post(engine.url + CHAT, json=body, timeout=60).raise_for_status()
        prompt = pipeline.prepare(CHAT, json.dumps(body).encode())
        assert (prompt.mode, prompt.tokens) == ("media", prompt_tokens(answer))
        known = next((i for i, block in enumerate(prompt.hashes) if block not in held), len(prompt.hashes))
        predicted = min(known, (prompt.tokens - 1) // engine.block_size) * engine.block_size
        assert cached(answer) == predicted
        found += predicted
        held.update(prompt.hashes)
        talk.append(assistant("It is so"))
    assert found > 4000
