"""How exact the gateway is: predicted against delivered cache hits, and tokens against the plain way.

    python -m bench.exactness [--quick] [--json FILE]

Two simulated engines with caches large enough for everything, a real gateway process before them, and the shared
tau-bench and MT-Bench-101 conversations turn by turn, eight conversations at a time. The figures:

  equal_share        of all requests, those whose predicted cached tokens equal what the engine reported
  token_mismatches   requests whose token ids differ between the gateway's pipeline (compiled template, known
                     prefixes, fastokens) and Hugging Face `tokenizers` on the template as Jinja renders it
  tiers_equal_share  as equal_share, with one engine that keeps a thousand blocks and fetches what was evicted from host
                     memory; tiers_fetched_share of all prompt tokens came from there. Half of the conversations twice:
                     of a prompt that comes again and ends with a block the engine counts that block, too
  chunks_equal_share the same with host memory in chunks of four blocks, which are fetched whole, and
                     chunks_fetched_share. Two at a time, which the engine has room for: of what it drops between a
                     choice and its prefill less than a chunk is not fetched again
  lmcache_equal_share the same with LMCache, which finds whole chunks of 256 tokens, and lmcache_fetched_share; and with
                     chunks as small as blocks lmcache_blocks_equal_share
  groups_equal_share as equal_share, with engines that have three cache groups with windows of 1,024 tokens beside that
                     of full attention, as for Gemma 3, and keep what a later prompt can resume at, as vLLM 0.32

As baseline the same share is printed for a guess that always says "nothing is cached".

`families` is the table of truth, of these engines' caches and of what real engines made of bodies for each family of
models (`bench.families`): how many requests were equal, declined (routed without exact tokens, and why) and wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import json
import random
import re
import sys
import tempfile
from array import array
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import httpx
import jinja2.sandbox
import tokenizers

from bench import families
from bench.conversations import MTBENCH, TAU, conversations, missing, turns
from gateway.prompt.pipeline import Pipeline
from loadgen.drive.engines import replicas
from loadgen.drive.stack import Stack
from replicas.simulated.model import sim_model_dir

CONCURRENT = 8
PROFILE = "engine: sim\nspeedup: 20\nnum_blocks: 200000\n"
TIERS = "engine: sim\nspeedup: 20\nnum_blocks: 1000\nextra_args: [--cpu-blocks, '200000']\n"
LMCACHE = "engine: sim\nspeedup: 20\nnum_blocks: 1000\nextra_args: [--lmcache, --cpu-blocks, '200000']\n"
CHUNKS = "engine: sim\nspeedup: 20\nnum_blocks: 1000\nextra_args: [--cpu-blocks, '200000', --chunk-blocks, '4']\n"
LMCACHE_BLOCKS = LMCACHE.replace("--lmcache,", "--lmcache, --chunk-blocks, '1',")
GROUPS = "engine: sim\nspeedup: 20\nnum_blocks: 200000\nextra_args: [--windows, '1024', '1024', '1024']\n"


def select(count: int, rng: random.Random) -> list[list[list[dict]]]:
    """Conversations as lists of prompts, half of the requests from each file."""
    chosen = []
    for name in (TAU, MTBENCH):
        some, left = [turns(messages) for messages in conversations(name)], count // 2
        rng.shuffle(some)
        for prompts in some:
            if left <= 0:
                break
            chosen.append(prompts[:left])
            left -= len(prompts)
    rng.shuffle(chosen)
    return chosen


class Plain:
    """The slow way to token ids, with nothing of the gateway's in it."""

    def __init__(self, directory: Path):
        env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        config = json.loads((directory / "tokenizer_config.json").read_text())
        self.names = {key: config.get(key) for key in ("bos_token", "eos_token")}
        self.template = env.from_string((directory / "chat_template.jinja").read_text())
        self.tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))

    def ids(self, messages: list[dict]) -> list[int]:
        messages = copy.deepcopy(messages)
        for message in messages:  # the API carries arguments as JSON text, templates expect the object
            for call in message.get("tool_calls") or ():
                call["function"]["arguments"] = json.loads(call["function"]["arguments"] or "{}")
        text = self.template.render(messages=messages, add_generation_prompt=True, tools=None, **self.names)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def token_mismatches(chosen: list[list[list[dict]]]) -> int:
    directory = sim_model_dir()
    plain, pipeline, wrong = Plain(directory), Pipeline(directory, "sim", 16), 0
    for prompts in chosen:
        for messages in prompts:
            body = json.dumps({"model": "sim", "messages": messages}).encode()
            prompt = pipeline.prepare("/v1/chat/completions", body)
            wrong += prompt.mode != "exact" or array("I", prompt.token_ids).tolist() != plain.ids(messages)
    return wrong


async def ask_all(url: str, chosen: list[list[list[dict]]], concurrent: int) -> list[tuple[int, int, int]]:
    """(predicted, reported, prompt tokens) of each request."""
    todo, seen = list(chosen), []

    async def talk(client: httpx.AsyncClient) -> None:
        while todo:
            for messages in todo.pop():
                answer = await client.post(
                    "/v1/chat/completions", json={"model": "sim", "messages": messages, "max_tokens": 1}
                )
                answer.raise_for_status()
                usage = answer.json()["usage"]
                seen.append(
                    (
                        int(answer.headers["x-hitherto-cached-tokens"]),
                        usage["prompt_tokens_details"]["cached_tokens"],
                        usage["prompt_tokens"],
                    )
                )

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(talk(client) for _ in range(concurrent)))
    return seen


async def play(
    chosen: list[list[list[dict]]], engines: str, count: int = 2, concurrent: int = CONCURRENT
) -> tuple[list[tuple[int, int, int]], float]:
    """What was predicted and reported of each request, and the tokens that engines fetched from slower tiers."""
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as profile:
        profile.write(engines)
        profile.flush()
        async with Stack("least_time", count, profile.name) as stack:
            await first_events(stack)
            seen = await ask_all(stack.base_url, chosen, concurrent)
            return seen, await fetched(stack)


async def first_events(stack: Stack) -> None:
    """Have each engine compute a prompt, and wait until the gateway has heard of it: which cache groups an engine has
    is known from its first events."""
    async with httpx.AsyncClient(timeout=60) as client:
        for replica in await replicas(stack.admin):
            prompt = {"model": "sim", "prompt": f"{replica['id']} " * 100, "max_tokens": 1}
            (await client.post(f"{replica['url']}/v1/completions", json=prompt)).raise_for_status()
    async with asyncio.timeout(30):
        while not all(one["map_blocks"] for one in await replicas(stack.admin)):
            await asyncio.sleep(0.05)


async def fetched(stack: Stack) -> float:
    found = 0.0
    async with httpx.AsyncClient() as client:
        for replica in await replicas(stack.admin):
            text = (await client.get(f"{replica['url']}/metrics")).text
            found += sum(map(float, re.findall(r"^vllm:external_prefix_cache_hits_total\{.*\} (\S+)$", text, re.M)))
    return found


async def measure(count: int, seed: int) -> dict:
    chosen = select(count, random.Random(seed))
    # On another core: half of all the work, of which what is played needs nothing.
    with ProcessPoolExecutor(1, get_context("spawn")) as other:
        recorded = asyncio.get_running_loop().run_in_executor(other, families.recorded)
        return await _measure(chosen, seed, recorded)


async def _measure(chosen: list[list[list[dict]]], seed: int, recorded: asyncio.Future[list]) -> dict:
    seen, _ = await play(chosen, PROFILE)
    twice = chosen[: len(chosen) // 2] * 2
    tiers, external = await play(twice, TIERS, 1)
    chunks, of_chunks = await play(twice, CHUNKS, 1, 2)
    lmcache, of_lmcache = await play(twice, LMCACHE, 1, 2)
    lmcache_blocks, _ = await play(twice, LMCACHE_BLOCKS, 1, 2)
    groups, _ = await play(chosen, GROUPS)
    share = lambda right: round(sum(right) / len(right), 5)  # noqa: E731
    right = {
        "full attention": [p == r for p, r, _ in seen],
        "tiers: GPU and host memory": [p == r for p, r, _ in tiers],
        "tiers: GPU and host memory in chunks of 4 blocks": [p == r for p, r, _ in chunks],
        "tiers: GPU and LMCache": [p == r for p, r, _ in lmcache],
        "tiers: GPU and LMCache in chunks of a block": [p == r for p, r, _ in lmcache_blocks],
        "hybrid caches: full attention and windows": [p == r for p, r, _ in groups],
    }
    return {
        "requests": len(seen),
        "equal_share": share(right["full attention"]),
        "equal_share_baseline": share([reported == 0 for _, reported, _ in seen]),
        "predicted_hit_rate": round(sum(one[0] for one in seen) / sum(one[2] for one in seen), 5),
        "reported_hit_rate": round(sum(one[1] for one in seen) / sum(one[2] for one in seen), 5),
        "token_mismatches": token_mismatches(chosen),
        "tiers_equal_share": share(right["tiers: GPU and host memory"]),
        "tiers_fetched_share": round(external / sum(one[2] for one in tiers), 5),
        "chunks_equal_share": share(right["tiers: GPU and host memory in chunks of 4 blocks"]),
        "chunks_fetched_share": round(of_chunks / sum(one[2] for one in chunks), 5),
        "lmcache_equal_share": share(right["tiers: GPU and LMCache"]),
        "lmcache_fetched_share": round(of_lmcache / sum(one[2] for one in lmcache), 5),
        "lmcache_blocks_equal_share": share(right["tiers: GPU and LMCache in chunks of a block"]),
        "groups_equal_share": share(right["hybrid caches: full attention and windows"]),
        "seed": seed,
        "families": [*(families.of_cache(name, equal) for name, equal in right.items()), *await recorded],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="400 requests instead of 2,000")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    if why := missing():
        print(why)
        return 3
    out = asyncio.run(measure(400 if args.quick else 2000, args.seed))
    for name, figure in out.items():
        if name != "families":
            print(f"{name:22} {figure}")
    print(families.table(out["families"]))
    if args.json:
        Path(args.json).write_text(json.dumps(out, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
