"""A template that prints the date, and engines whose time zone is another than the gateway's."""

import asyncio
import json
from datetime import UTC, datetime

import pytest

from ..gateway.prompt.reference import model_dir
from .engines import gateway, tiny_model, version

pytestmark = pytest.mark.exact

# One in which it is another day than in UTC.
ELSEWHERE = "Pacific/Auckland" if datetime.now(UTC).hour >= 12 else "Etc/GMT+12"
TURNS = 4
SECONDS = 5.5  # between turns; for 5 s a prompt that was sent is taken to be there, whatever events say
RULES = "You are a careful assistant. Answer in one word, and do not explain it. " * 12


async def conversation(process, name: str) -> tuple[int, int, int]:
    """(tokens predicted, found, of all prompts)"""
    messages, predicted, found, tokens = [{"role": "system", "content": f"{name}. {RULES}"}], 0, 0, 0
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"What is the number {turn}? " * 12})
        body = {"model": "tiny", "messages": messages, "max_tokens": 2, "temperature": 0}
        answer = await process.client.post("/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        predicted += int(answer.headers["x-hitherto-cached-tokens"])
        found, tokens = found + usage["prompt_tokens_details"]["cached_tokens"], tokens + usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": "One."})
        await asyncio.sleep(SECONDS)
    return predicted, found, tokens


async def test_the_date_of_another_time_zone(start_engine, tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("models") / "dated", model_dir("qwen3"))
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text())
    file = folder / "chat_template.jinja"
    template = told.pop("chat_template", None) or file.read_text()
    config.write_text(json.dumps(told))
    file.write_text("{{- '<|im_start|>system\nToday is ' + strftime_now('%A %d %B %Y') + '<|im_end|>\n' }}" + template)
    engines = [start_engine(model=folder, blocks=1024, env={"TZ": zone}) for zone in (ELSEWHERE, "UTC")]
    for engine in engines:
        engine.wait()
    for used, sure in ((engines[:1], True), (engines, False)):
        async with gateway(*used, env={"TZ": "UTC"}) as process:
            status = await process.until(
                lambda status: all("chat template alike" in one["tokenizer"] for one in status["replicas"])
            )
            predicted, found, tokens = await conversation(process, f"Over {len(used)}")
            modes = {
                mode: await process.counted("hitherto_prompts_total", mode=mode) for mode in ("exact", "partly", "text")
            }
            said = f"{predicted:,} tokens predicted, {found:,} found of {tokens:,}; prompts {modes}"
            print(f"\nvLLM {'.'.join(map(str, version()))}, {len(used)} engines, the first in {ELSEWHERE}: {said}")
            print([one["tokenizer"] for one in status["replicas"]])
            assert modes == {"exact": TURNS * sure, "partly": TURNS * (not sure), "text": 0}, said
            if sure:
                assert predicted == found > tokens / 2, said
            else:
                problems = [problem for one in status["replicas"] for problem in one["problems"]]
                assert any("time zones (TZ) differ" in one for one in problems), problems
