"""Write `docs/exactness.md` from what was recorded:

    python -m bench.exactness_page [--check]

`--check` writes nothing, and fails where the page is not what it would be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from bench.families import Row, not_fetched, recorded
from gateway.prompt.prompt import MEDIA as whys_of_media
from gateway.prompt.tokens.model import WRITTEN_BY_UNKNOWN_RULES, load_model

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "exactness.md"
IMAGES = ROOT / "tests" / "gateway" / "prompt" / "media" / "recorded.json"
TILES = IMAGES.with_name("tiles.json")
TEMPLATES = ROOT / "tests" / "vllm" / "templates.json"

HEAD = """\
<!-- Written by `python -m bench.exactness_page`; tests/bench/test_exactness_page.py holds it to that. -->
# Which prompts are exact

A prompt is *exact* if the gateway makes the very token ids that the engine makes, so that it knows which of its blocks each
replica holds. Where it cannot be sure it says so and *declines*: the request is matched as text, from where that is so on, and
`hitherto explain`, `hitherto_prompts_total{mode}` and `hitherto doctor` tell why. A *wrong* prompt, one that is called exact and is
not, must not happen: tests fail on the first.

Each row below was counted against the ids that vLLM's own renderers made of request bodies: chat, Responses, Messages and
completions with tools, tool calls, reasoning, parts, template variables, truncation, and texts that look like special tokens.
`make test-vllm ARGS="-m exact"` asks an installed vLLM again, and `python -m bench.exactness` prints this table with the hits
of simulated engines. Bodies that vLLM refuses are not counted. What tokens an engine makes of fixed texts and of fixed chats is
asked of each engine when it is adopted, whatever its model ([tokenizers](vllm.md#tokenizers), [chats](vllm.md#chats)).

Conversations are exact with vLLM 0.28 to 0.33, whose sources were read. Older versions get them by text: their rules are others
(0.16 to 0.21 drop `reasoning_content`). With newer ones, with a version that is not told, and with other engines they are exact
once an engine has made the same ids of the fixed chats. Once an answer counts other tokens than were made, no body of
that kind is refused by the gateway's count; after a second body they are routed by text, until 32 in a row were counted alike.

## Families with rules or files of their own

| family | shown with | bodies | equal | declined | wrong | so it is |
|---|---|---|---|---|---|---|
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    if missing := not_fetched():
        parser.error(
            f"no tokenizer of {', '.join(missing)} here: make test ARGS=tests/bench/test_exactness_page.py fetches them"
        )
    written = page()
    if check:
        return PAGE.read_text() != written
    PAGE.write_text(written)
    return 0


def page() -> str:
    rows = recorded()
    parts = [HEAD + "".join(map(_row, rows)), KIMI, _declined(rows), _by_load(), _templates(), _media(), CACHES]
    return "\n".join(parts)


def _row(row: Row) -> str:
    verdict = "exact" if not row["declined"] else "exact, but for what is below"
    return (f"| {row['family']} | {row['engine']} | {row['requests']} | {row['equal']} | {row['declined']} "
            f"| {row['wrong']} | {verdict} |\n")  # fmt: skip


def _declined(rows: list[Row]) -> str:
    lines = [
        f"- {row['family']}, {row['engine']}: {why.removeprefix('Refused: ')} ({count})\n"
        for row in rows
        for why, count in row["why"].items()
    ]
    return "Declined:\n\n" + "".join(lines)


def _by_load() -> str:
    """Models of which the gateway's own files say that it cannot be exact."""
    lines = []
    for name, config, files in BY_LOAD:
        with tempfile.TemporaryDirectory() as store:
            folder = Path(store)
            for file in ("config.json", *files):
                (folder / file).write_text(json.dumps(config) if file == "config.json" else "{}")
            found = load_model(folder)
        why = (found.no_template or found.no_tokenizer).replace(store, "the folder")
        assert why, name
        lines.append(f"| {name} | {why} |\n")
    others = "".join(f"- `{one}`\n" for one in sorted(WRITTEN_BY_UNKNOWN_RULES))
    return (
        "## Models that are matched as text\n\n| model | why |\n|---|---|\n"
        + "".join(lines)
        + "\nEngines write the conversations of these architectures by rules that the gateway does not have; their completions are\n"
        "exact:\n\n" + others
    )


BY_LOAD = (
    ("Kimi K2 without the program that reads its tiktoken.model", {"model_type": "kimi_k2"}, ("tiktoken.model",)),
    ("Mistral's own format with a `tokenizer.model.v*`", {}, ("params.json", "tokenizer.model.v3")),
    ("Inkling", {"architectures": ["InklingForCausalLM"]}, ("tokenizer.json",)),
    ("Kimi K3", {"architectures": ["KimiK3ForConditionalGeneration"]}, ("tokenizer.json",)),
)


def _templates() -> str:
    told = json.loads(TEMPLATES.read_text())
    exact = [name for name, one in told["templates"].items() if not one["declined"] and not one["wrong"]]
    partly = {name: one for name, one in told["templates"].items() if one["declined"]}
    equal = sum(one["equal"] for one in told["templates"].values())
    declined = sum(sum(one["declined"].values()) for one in told["templates"].values())
    wrong = sum(one["wrong"] for one in told["templates"].values())
    version = ".".join(map(str, told["vllm"]))
    return (
        "## Chat templates\n\n"
        f"Held to the renderer of vLLM {version} by `tests/vllm/test_templates.py`, chat and Messages, each template with a small\n"
        f"tokenizer that has its special tokens: {equal:,} bodies equal, {declined:,} declined, {wrong} wrong. All bodies of these\n"
        "are exact, unless it says otherwise:\n\n"
        + "".join(f"- {name}\n" for name in exact)
        + "".join(
            f"- {name}: {count} declined, {why}\n"
            for name, one in partly.items()
            for why, count in one["declined"].items()
        )
    )


def _media() -> str:
    images = len(json.loads(IMAGES.read_text())["images"])
    tiles = sum(map(len, next(iter(json.loads(TILES.read_text()).values()))))
    whys = "".join(f"- `{why}`: {words}\n" for why, words in whys_of_media.items())
    return MEDIA.replace("NAMES", str(images)).replace("TILES", f"{tiles:,}").replace("WHY\n", whys)


KIMI = """\
Of requests with images the names of blocks were compared, which cover ids, the images and where they are.

Kimi K2's own program, which vLLM runs to read `tiktoken.model`, could not be had: the bodies were made with one that the tests have,
written by its rules. A gateway calls such a model exact only after an engine's own ids of some twenty texts were the same.

Mistral's own format is written by mistral-common, of which vLLM had 1.13.1 here; the `tekken.json` of each version was made by the
tests. Which mistral-common an engine has is not to be seen from outside, so a gateway calls such a model exact only after an engine's
ids of fixed texts and of fixed chats were the same.
"""
MEDIA = """\
## Prompts with media

What an engine makes of the text before a prompt's first image, sound or video does not depend on that item, so the blocks before it
are exact: system prompt, tools, earlier turns. `hitherto explain` calls such a prompt *partly* known. From the last special token
before the item on its blocks have names of the gateway's own, made of the text and of a digest of each item (its URL, its base64
or its `uuid`), of which no engine tells. The same conversation with the same images goes where it was sent before as long as that
replica still holds the exact part: that is a guess, it is never compared with what engines report, and gateways that share a
Redis each have their own.

With vLLM 0.28 or 0.32 and later, prompts of these models are known to their end (mode *media*) if all their images are
written in the request, as data URLs of PNG, JPEG or WebP:

| models | tokens of an image |
|---|---|
| Qwen2-VL, Qwen2.5-VL, Qwen3-VL | one for each tile of the scaled image; its markers are printed by the template |
| Gemma 3 without pan and scan | always as many (256), with markers and newlines around them, which vLLM joins with newlines of the text |
| Llama 4 | its tiles with separators between them, a small copy of the whole, and markers |

An image's size is in its header, and what follows from it in `preprocessor_config.json`; vLLM names an image by a
BLAKE3 of its bytes as they came, or by the `uuid` of its part. Sizes and names were the same as vLLM 0.28.0 and 0.32.0
with transformers' processor found for NAMES images of all colours, orientations and encodings. Tiles of Llama 4 were
the same for TILES sizes of images, and all blocks of the requests in the table above, among them over 100 sizes for
each of Gemma 3 and Llama 4, had the names that vLLM's own renderer, processor and rule gave them
(`python -m tests.vllm.record_media`, `tests/vllm/test_media.py`). These were small models with tokenizers that the
tests made, not released ones; of them Gemma 3 was also served by vLLM 0.32.0 on a CPU, whose cached tokens were the
predicted ones in all of 40 requests. Where a text goes on with a single newline right behind an image of Gemma 3, vLLM does
not find the image again and refuses the request; the gateway calls such a prompt partly known. Images of Gemma 3n,
Gemma 4 and other families are not counted here. Llama 3.2 Vision (mllama) takes images by cross attention, without
tokens for them in the prompt, and 0.10.2 was the last vLLM to serve it.

Engines have to be started from the same path or name, and with vLLM's own `--mm-processor-kwargs`, `--media-io-kwargs`
and hash of media: with others the counts differ (`hitherto_prompt_mismatches_total`), or images are found that the
gateway took for new (`hitherto_predictions_total{outcome="under"}`). It takes the gateway some 5 ms per megabyte of
image the first time, in a thread, and a tenth of that when it comes again.

`hitherto_media_prompts_total{why}` counts prompts with media by what is not known of them:

WHY
"""
CACHES = """\
## From tokens to hits

Exact tokens are half of a prediction; the other half is which blocks a replica holds. `python -m bench.exactness` counts predicted
against delivered hits for full attention, for caches with slower tiers (vLLM's own and LMCache's, in chunks of one and of several blocks)
and for hybrid caches (windows beside full attention). LMCache 0.5.6 and its server were also run behind vLLM 0.32 on CPU: of 60 requests
each with chunks of 256 tokens and of a block, with evictions and resets, all found what was predicted (`tests/vllm/test_lmcache.py`). vLLM's own
tiers need a GPU; what its scheduler's lookup finds was recorded of 0.28 and 0.32 and is predicted for every prompt.
Of some models hits cannot be known ([which, and why](predictions.md#how-much-to-trust-a-prediction)): there prompts are exact, and
hits are guessed from traffic.
"""


if __name__ == "__main__":
    sys.exit(main())
