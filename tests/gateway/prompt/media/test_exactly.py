"""Prompts with images of which all blocks are known, in small models of known families."""

import json
import struct
from array import array
from math import inf

import pytest
import tokenizers

from cachemap import chain_seed, hash_blocks
from cachemap.hashing import covering
from gateway.prompt.media import qwen_vl
from gateway.prompt.media.filling import family_of
from gateway.prompt.media.identity import FRAMED, Identities
from gateway.prompt.offload import TakesLong, event_loop
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, MESSAGES, RESPONSES
from gateway.prompt.tokens.tokenizer import Tokenizer
from replicas.engines.vllm.versions import version_quirks

from .models import QWEN2_VL, TEXTS, assistant, chunk, data_url, folder, image, png, system, text, user

SIZE, ROOT, PAD = 16, "somebody/Qwen2-VL", "<|image_pad|>"
PROCESSOR = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 200, "patch_size": 14, "merge_size": 2}
RED, BLUE = data_url(png(300, 200, shade=1)), data_url(png(300, 200, shade=2))
COUNT = 11 * 7  # 300 x 200 pixels in tiles of 28, to the nearest


@pytest.fixture(scope="module")
def model():
    directory = folder(QWEN2_VL, preprocessor_config=PROCESSOR)
    known = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    config = {**QWEN2_VL, "image_token_id": known.token_to_id(PAD)}
    (directory / "config.json").write_text(json.dumps(config))
    pipeline = Pipeline(directory, "m", SIZE)
    pipeline.media.root = ROOT
    return pipeline, known


def ask(model, messages, path=CHAT, **more):
    return model[0].prepare(path, json.dumps({"messages": messages, **more}).encode())


def blocks(known, said: str, *items: tuple[str, int], adapter=None, salt=None) -> list[int]:
    """Of a rendered text with one placeholder for each item: block by block, as the engine's events will be named."""
    ids, places = [], []
    for token in known.encode(said, add_special_tokens=False).ids:
        count = items[len(places)][1] if token == known.token_to_id(PAD) else 1
        if token == known.token_to_id(PAD):
            places.append((items[len(places)][0], len(ids), count))
        ids += [token] * count
    seed, found = chain_seed("m", SIZE, adapter, salt), []
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        keys = [[name, at - start] for name, at, count in places if at < start + SIZE and at + count > start]
        seed = covering(keys, seed) if keys else seed
        seed = hash_blocks(array("I", ids[start : start + SIZE]).tobytes(), SIZE, seed)[0]
        found.append(seed)
    return found


def name(url: str) -> str:
    return Identities().of(url, FRAMED, ROOT).identity


def rendered(*turns: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in turns) + "<|im_start|>assistant\n"


ITEM = f"<|vision_start|>{PAD}<|vision_end|>"


def test_all_blocks_are_known(model):
    prompt = ask(model, [system(), user(text("See "), image(RED), text(" and "), image(BLUE), text("?"))])
    said = rendered(("system", system()["content"]), ("user", f"See {ITEM} and {ITEM}?"))
    assert (prompt.mode, prompt.media) == ("media", "exact")
    assert list(prompt.hashes) == blocks(model[1], said, (name(RED), COUNT), (name(BLUE), COUNT))
    assert prompt.tokens == len(model[1].encode(said, add_special_tokens=False).ids) + 2 * (COUNT - 1)
    assert prompt.token_ids == b"" and not prompt.kind  # the ids alone are another prompt
    assert prompt.note == f"2 of media, {2 * COUNT} tokens of them: all blocks are known"


def test_images_of_equal_size_share_no_block_from_where_they_begin(model):
    red, blue, again = (ask(model, [system(), user(image(url), text("x"))]).hashes for url in (RED, BLUE, RED))
    assert red == again
    shared = [one == other for one, other in zip(red, blue)]
    assert shared == sorted(shared, reverse=True) and 0 < sum(shared) < len(shared) - COUNT // SIZE


def test_a_conversation_goes_on_and_an_image_comes_in_a_later_turn(model):
    begin = [system(), user(text("Hello.")), assistant("Hi."), user(image(RED))]
    said = [("system", system()["content"]), ("user", "Hello."), ("assistant", "Hi."), ("user", ITEM)]
    first = ask(model, begin)
    assert list(first.hashes) == blocks(model[1], rendered(*said), (name(RED), COUNT))
    second = ask(model, [*begin, assistant("Red."), user(text("Sure? " * 20))])
    assert list(second.hashes[: len(first.hashes) - 1]) == list(first.hashes[:-1])
    plain = ask(model, begin[:3])
    assert plain.mode == "exact" and plain.hashes[0] == first.hashes[0]


@pytest.mark.parametrize(("named", "more"), [({"uuid": "mine"}, {}), ({}, {"salt": "s"})])
def test_the_clients_name_of_an_image_and_salts_count(model, named, more):
    prompt = ask(model, [user(image(RED, **named))], **{f"cache_{key}": value for key, value in more.items()})
    item = named.get("uuid", name(RED)), COUNT
    assert list(prompt.hashes) == blocks(model[1], rendered(("user", ITEM)), item, **more)


def test_every_api(model):
    data = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
    chat = ask(model, [user(image(RED), text("x"))])
    messages = ask(model, [user({"type": "image", "source": data}, text("x"))], MESSAGES, max_tokens=5)
    parts = [{"type": "input_image", "image_url": RED, "detail": "auto"}, {"type": "input_text", "text": "x"}]
    body = json.dumps({"input": [{"role": "user", "content": parts}]}).encode()
    responses = model[0].prepare(RESPONSES, body)
    assert {one.mode for one in (chat, messages, responses)} == {"media"}
    assert chat.hashes == messages.hashes == responses.hashes


@pytest.mark.parametrize(
    "part, more, why",
    [
        (image("https://example.com/red.png"), {}, "remote"),
        (image("https://example.com/red.png", uuid="mine"), {}, "remote"),
        ({"type": "image_url", "image_url": None, "uuid": "mine"}, {}, "remote"),
        ({"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}, {}, "kind"),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {}, "kind"),
        ({"type": "image_embeds", "image_embeds": "AAAA"}, {}, "kind"),
        (image("data:image/png;base64,AAAA"), {}, "image"),
        (image(data_url(png(5000, 10))), {}, "image"),  # narrower than the processor takes
        (image(RED), {"mm_processor_kwargs": {"max_pixels": 5}}, "request"),
        (image(RED), {"media_io_kwargs": {"image": {}}}, "request"),
        (text(PAD), {}, "template"),
    ],
)
def test_what_is_not_known_is_said(model, part, more, why):
    prompt = ask(model, [system(), user(text("See"), part, image(RED))], **more)
    assert (prompt.mode, prompt.media) == ("partly", why)
    assert prompt.hashes.known and prompt.tokens < 10_000


def test_settings_of_the_request_that_are_empty_change_nothing(model):
    assert ask(model, [user(image(RED))], mm_processor_kwargs={}, media_io_kwargs=None).media == "exact"


def test_an_engine_that_does_not_tell_what_names_are_made_of(model):
    pipeline = model[0]
    try:
        pipeline.media.root = ""
        assert ask(model, [user(image(RED))]).media == "engine"
        pipeline.media.root = ROOT
        for version, why in (("0.28.0", "exact"), ("0.30.1", "engine"), ("0.32.1", "exact"), ("0.33.0", "exact")):
            pipeline.follow(version_quirks(version))
            assert ask(model, [user(image(RED))]).media == why
        prompt = pipeline.prepare(CHAT, json.dumps({"model": "ad", "messages": [user(image(RED))]}).encode(), adapters={"ad"})  # fmt: skip
        assert prompt.media == "engine"
    finally:
        pipeline.media.root = ROOT
        pipeline.follow({})


def test_images_without_end_are_not_expanded(model):
    """A header of a hundred bytes can speak of any size: 999 of them of 400,000 tokens."""
    pipeline = model[0]
    one = image(data_url(png(2, 2).replace(b"\0\0\0\x02\0\0\0\x02", b"\0\0\x30\0\0\0\x30\0", 1)))
    try:
        pipeline.max_model_len = 150_000
        prompt = ask(model, [user(*[one] * 999)])
        assert (prompt.mode, prompt.media) == ("partly", "length")
        pipeline.max_model_len = 100
        assert ask(model, [user(image(RED), image(BLUE))]).media == "length"  # and no refusal: the engine may take it
    finally:
        pipeline.max_model_len = None


def test_a_template_that_joins_texts(model):
    directory = folder(json.loads((model[0]._files.directory / "config.json").read_text()), TEXTS, preprocessor_config=PROCESSOR)  # fmt: skip
    pipeline = Pipeline(directory, "m", SIZE)
    pipeline.media.root = ROOT
    assert pipeline.prepare(CHAT, json.dumps({"messages": [user(image(RED))]}).encode()).media == "template"


@pytest.mark.parametrize(
    "config, files, known",
    [
        ({}, {"preprocessor_config": PROCESSOR}, True),
        ({}, {"preprocessor_config": {**PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorFast"}}, True),
        ({}, {"processor_config": {"image_processor": PROCESSOR}}, True),
        ({"model_type": "qwen2_5_vl"}, {"preprocessor_config": PROCESSOR}, True),
        ({"model_type": "llava"}, {"preprocessor_config": PROCESSOR}, False),
        ({"image_token_id": None}, {"preprocessor_config": PROCESSOR}, False),
        ({}, {}, False),
        ({}, {"preprocessor_config": PROCESSOR, "processor_config": {"image_processor": PROCESSOR}}, False),
        ({}, {"preprocessor_config": {**PROCESSOR, "do_resize": False}}, False),
        ({}, {"preprocessor_config": {**PROCESSOR, "patch_size": 16}}, False),
        ({}, {"preprocessor_config": {**PROCESSOR, "patch_size": "14"}}, False),
        ({}, {"preprocessor_config": {**PROCESSOR, "min_pixels": 10**9}}, False),
        ({}, {"preprocessor_config": {**PROCESSOR, "image_processor_type": "SomebodysProcessor"}}, False),
    ],
)
def test_which_models_are_known(config, files, known):
    settings = {**QWEN2_VL, "image_token_id": 5, **config}
    directory = folder(settings, **files)
    assert (family_of(directory, settings, {}, Tokenizer(directory)) is not None) == known


@pytest.mark.parametrize(
    "pixels, sides, tokens",
    [
        ((3136, 12_845_056), (1000, 1000), 36 * 36),
        ((3136, 12_845_056), (1, 1), 4),
        ((3136, 200 * 784), (1920, 1080), 18 * 10),
        ((65536, 16_777_216), (10, 10), 100),
        ((3136, 1_003_520), (28, 5600), 200),
        ((3136, 1_003_520), (28, 5601), None),
    ],
)
def test_tokens_of_a_size(pixels, sides, tokens):
    """The first five as transformers' processor counts them."""
    assert qwen_vl.tokens(*sides, 28, *pixels) == tokens


def test_more_images_than_an_engine_takes_are_not_read(model, monkeypatch):
    prompt = ask(model, [user(*[image(RED)] * 999)])
    assert prompt.media == "exact"
    read = []
    monkeypatch.setattr(Identities, "of", lambda self, *given: read.append(given))
    assert ask(model, [user(*[image(RED)] * 1000)]).media == "many" and not read


def test_small_images_that_declare_many_tokens_are_given_up_on_the_event_loop():
    config = {**QWEN2_VL, "image_token_id": 0}
    directory = folder(config, preprocessor_config={**PROCESSOR, "max_pixels": 12_845_056})
    known = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    (directory / "config.json").write_text(json.dumps({**config, "image_token_id": known.token_to_id(PAD)}))
    pipeline = Pipeline(directory, "m", SIZE)
    pipeline.media.root = ROOT
    header = png()[:8] + chunk(b"IHDR", struct.pack(">IIBBBBB", 3584, 3584, 8, 2, 0, 0, 0))
    images = [image(data_url(header + chunk(b"IDAT", b"%d" % i))) for i in range(3)]
    bodies = [json.dumps({"messages": [user(*some)]}).encode() for some in (images[:1], images)]
    assert len(bodies[1]) < 1_000
    event_loop.holds, event_loop.until = True, inf
    try:
        assert pipeline.prepare(CHAT, bodies[0]).tokens > 16_384
        with pytest.raises(TakesLong):
            pipeline.prepare(CHAT, bodies[1])
    finally:
        event_loop.holds = False
    prompt = pipeline.prepare(CHAT, bodies[1])
    assert prompt.media == "exact" and prompt.tokens > 3 * 16_384 and len(prompt.hashes) == prompt.tokens // SIZE
