"""Prompts with media of which only the blocks before the first item are known."""

import json
import random
from array import array

import pytest
import tokenizers

from cachemap import GuessedBlocks, chain_seed, hash_blocks
from gateway.prompt.media.filling import TOKENS_OF_AN_ITEM
from gateway.prompt.media.items import StandIns
from gateway.prompt.pipeline import Pipeline
from gateway.prompt.prompt import CHAT, MESSAGES, RESPONSES
from gateway.prompt.tokens.agreement import Differences

from .models import PARTS, TEXTS, assistant, data_url, image, pipeline, png, system, text, user

SIZE = 16
RED, BLUE = data_url(png(shade=1)), data_url(png(shade=2))


def ask(messages, template=PARTS, path=CHAT, **more):
    return pipeline(template).prepare(path, json.dumps({"messages": messages, **more}).encode())


def names_of(said: str, template=PARTS) -> list[int]:
    """Of the blocks that an engine makes of this text."""
    directory = pipeline(template)._files.directory
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(said, add_special_tokens=False).ids
    return hash_blocks(array("I", ids).tobytes(), SIZE, chain_seed("m", SIZE))


def shared(one, other) -> int:
    return next((i for i, pair in enumerate(zip(one, other)) if pair[0] != pair[1]), min(len(one), len(other)))


def test_the_blocks_before_the_first_item_are_the_engines():
    prompt = ask([system(), user(text("What is in "), image(RED), text("?"))])
    begin = f"<|im_start|>system\n{system()['content']}<|im_end|>\n<|im_start|>user\nWhat is in <|vision_start|>"
    theirs = names_of(begin)
    assert prompt.mode == "partly" and type(prompt.hashes) is GuessedBlocks
    assert prompt.hashes.known > 10 and list(prompt.hashes[: prompt.hashes.known]) == theirs[: prompt.hashes.known]
    assert shared(prompt.hashes, theirs) == prompt.hashes.known >= len(theirs) - 1
    assert prompt.token_ids == b"" and not prompt.kind  # they are not all that the engine has


def test_before_a_date_that_is_not_certain_there_is_no_item_that_is_exact():
    asked = {"messages": [system(), user(text("What is in "), image(RED), text("?"))]}
    dated = Pipeline(pipeline("Rules<|im_end|>{{ strftime_now('%d %B') }}" + PARTS)._files.directory, "m", SIZE)
    dated.clock.now = lambda: 1_795_898_520.0
    for zones, sure in ((frozenset((0,)), True), (frozenset((0, 52)), False)):
        dated.differ(Differences(zones=zones))
        prompt = dated.prepare(CHAT, json.dumps(asked).encode())
        assert prompt.mode == "partly" and (prompt.hashes.known > 10) == sure


@pytest.mark.parametrize("template", [PARTS, TEXTS])
def test_whatever_the_engine_puts_there_the_known_blocks_stay(template):
    """Engines replace a placeholder by what they like, and may join it to blanks before it; where a template joins
    texts they put it before them."""
    rng = random.Random(3)
    for _ in range(30):
        words = " ".join(rng.choice(("a", "in\n", "\n\n", "7", "word", "<|im_end|>")) for _ in range(rng.randrange(60)))
        rules = system(rng.randrange(40))
        prompt = ask([rules, user(text(words), image(RED), text("b"))], template)
        known = list(prompt.hashes[: prompt.hashes.known])
        for put in ("\n\n", "x", "\n", " <|image_pad|>", "1\n"):
            said = f"<|im_start|>system\n{rules['content']}<|im_end|>\n<|im_start|>user\n"
            said += words + put if template == PARTS else f"{put}\n{words}"
            assert names_of(said + " b <|im_end|>\n", template)[: len(known)] == known


def test_text_before_the_item_is_not_known_where_texts_are_joined():
    long = " ".join(map(str, range(100)))
    known = [ask([user(text(long), image(RED))], template).hashes.known for template in (PARTS, TEXTS)]
    assert known[0] == 0 and known[1] == 0  # there is no added token between the two
    known = [ask([user(text(long + "<|im_end|>"), image(RED))], template).hashes.known for template in (PARTS, TEXTS)]
    assert known[0] > 5 and known[1] == 0


def test_the_same_conversation_with_the_same_media_goes_on():
    begin = [system(), user(text("What is this?"), image(RED))]
    first = ask(begin, add_generation_prompt=False)
    second = ask([*begin, assistant("Red."), user(text("And this?"), image(BLUE))])
    third = ask([*begin, assistant("Red."), user(text("And this?"), image(RED))])
    assert len(first.hashes) > first.hashes.known == second.hashes.known
    assert shared(first.hashes, second.hashes) == len(first.hashes)
    assert len(first.hashes) < shared(second.hashes, third.hashes) < len(second.hashes)


@pytest.mark.parametrize(
    "one, other",
    [
        (image(RED), image(BLUE)),
        (image(RED), image("https://example.com/red.png")),
        (image("https://example.com/red.png"), image("https://example.com/blue.png")),
        (image(RED, uuid="one"), image(RED, uuid="two")),
        (
            {"type": "input_audio", "input_audio": {"data": "AA"}},
            {"type": "input_audio", "input_audio": {"data": "AB"}},
        ),
        ({"type": "image_embeds", "image_embeds": "AA"}, {"type": "image_embeds", "image_embeds": {"a": 1}}),
    ],
)
def test_other_media_are_another_prompt(one, other):
    before, after = text("Look at that. " * 20), text("What is it? " * 20)
    prompts = [ask([system(), user(before, part, after)]) for part in (one, other, one)]
    assert {prompt.mode for prompt in prompts} == {"partly"}
    assert prompts[0].hashes == prompts[2].hashes
    assert prompts[0].hashes.known <= shared(prompts[0].hashes, prompts[1].hashes) < len(prompts[0].hashes) - 2


def test_a_text_that_spells_the_stand_in_is_not_the_prompt():
    prompt = ask([system(), user(text("a " * 30), image(RED))])
    for said in (StandIns().place(image(RED), {}, True)["text"], "<|vision_start|><|image_pad|><|vision_end|>"):
        other = ask([system(), user(text("a " * 30 + said))])
        assert other.mode == "exact" and shared(prompt.hashes, other.hashes) == prompt.hashes.known


def test_an_item_counts_as_some_tokens_and_not_by_its_bytes():
    large = data_url(random.Random(1).randbytes(300_000))
    plain = ask([user(text("What is this?"))]).tokens
    for count in (1, 3):
        prompt = ask([user(text("What is this?"), *[image(large)] * count)])
        assert 0 < prompt.tokens - plain - count * TOKENS_OF_AN_ITEM < 100 * count


def test_what_is_said_of_it():
    prompt = ask([user(text("x"), image(RED))])
    assert prompt.media == "family"
    assert prompt.note == (
        "an item (image) of media: exact up to the first one, by text from there on "
        "(how many tokens this model makes of an item is not known)"
    )
    assert ask([user(image(RED), image(BLUE))]).note.startswith("2 items of media: ")
    assert ask([user(text("x"))]).media == ""


def test_every_api_that_takes_images():
    source = {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}
    block = {"type": "image", "source": source}
    said = {"type": "text", "text": "What is this?"}
    chat = ask([system(), user(said, image(RED))])
    messages = pipeline().prepare(
        MESSAGES, json.dumps({"system": system()["content"], "messages": [user(said, block)], "max_tokens": 1}).encode()
    )
    assert (messages.mode, messages.hashes) == ("partly", chat.hashes)
    linked = {"type": "image", "source": {"type": "url", "url": "https://example.com/red.png"}}
    assert ask([user(linked)], path=MESSAGES).hashes == ask([user(image(linked["source"]["url"]))]).hashes
    parts = [{"type": "input_text", "text": "What is this?"}, {"type": "input_image", "image_url": RED}]
    body = {"instructions": system()["content"], "input": [{"role": "user", "content": parts}]}
    responses = pipeline().prepare(RESPONSES, json.dumps(body).encode())
    assert (responses.mode, responses.hashes) == ("partly", chat.hashes)  # this tokenizer puts nothing before a text


def test_images_among_the_results_of_tools_follow_as_a_message_of_the_user():
    """As vLLM reads Messages."""
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": RED.partition(",")[2]}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "done"}, block]}
    chat = [{"role": "tool", "tool_call_id": "1", "content": "done"}, user(image(RED))]
    assert ask([user(result)], path=MESSAGES).hashes == ask(chat).hashes


@pytest.mark.parametrize(
    "messages, more, why",
    [
        ([user({"type": "prompt_embeds", "data": "AA"})], {}, "prompt_embeds"),
        ([user({"type": "hologram"})], {}, "hologram"),
        ([user(image(RED))], {"truncate_prompt_tokens": 5}, "truncation"),
    ],
)
def test_what_is_matched_as_text(messages, more, why):
    prompt = ask(messages, **more)
    assert prompt.mode == "text" and why in prompt.note and not prompt.hashes.known


def test_a_truncation_that_cuts_nothing_changes_nothing():
    talk = [user(text("What is this?"), image(RED))]
    assert ask(talk, truncate_prompt_tokens=None).hashes == ask(talk).hashes
    body = {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": RED}]}],
        "truncation": "disabled",
    }
    assert pipeline().prepare(RESPONSES, json.dumps(body).encode()).mode == "partly"


def test_a_model_of_text_alone_takes_no_image(sim):
    prompt = sim[0].prepare(CHAT, json.dumps({"messages": [user(image(RED))]}).encode())
    assert (prompt.mode, prompt.media) == ("text", "load")
