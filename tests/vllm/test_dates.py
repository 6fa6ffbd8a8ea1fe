"""A template that prints the date, and engines whose time zone is another than the gateway's."""

import json
from datetime import UTC, datetime

import pytest

from loadgen.demo.tiny_model import tiny_model

from ..gateway.prompt.reference import model_dir
from .engines import gateway, release
from .pd import alone, asked
from .traffic import cached, predicted, prompt_tokens

pytestmark = pytest.mark.exact

# One in which it is another day than in UTC.
ELSEWHERE = "Pacific/Auckland" if datetime.now(UTC).hour >= 12 else "Etc/GMT+12"
QUESTIONS, MODES = 4, ("exact", "partly", "text")
RULES = "You are a careful assistant. Answer in one word, and do not explain it. " * 12


async def test_the_date_of_another_time_zone(start_engine, tmp_path_factory):
    folder = tiny_model(tmp_path_factory.mktemp("models") / "dated", model_dir("qwen3"))
    config = folder / "tokenizer_config.json"
    told = json.loads(config.read_text())
    file = folder / "chat_template.jinja"
    template = told.pop("chat_template", None) or file.read_text()
    config.write_text(json.dumps(told))
    file.write_text("{{- '<|im_start|>system\nToday is ' + strftime_now('%A %d %B %Y') + '<|im_end|>\n' }}" + template)
    started = [start_engine(model=folder, blocks=1024, env={"TZ": zone}) for zone in (ELSEWHERE, "UTC")]
    engines = [engine.wait() for engine in started]
    for used, sure in ((engines[:1], True), (engines, False)):
        bodies = [
            asked("chat", f"{number} of {len(used)}. {RULES}", stream=False, most=2) for number in range(QUESTIONS)
        ]
        for engine in used:  # before there is a gateway: what it predicts it has by their events
            for path, body in bodies:
                (await alone(engine, path, body)).raise_for_status()
        async with gateway(*used, env={"TZ": "UTC"}) as process:
            status = await process.until(
                lambda status: all("chat template alike" in one["tokenizer"] for one in status["replicas"])
            )
            answers = [await process.client.post(path, json=body, timeout=120) for path, body in bodies]
            modes = {mode: await process.counted("hitherto_prompts_total", mode=mode) for mode in MODES}
        expected, found, tokens = (sum(map(what, answers)) for what in (predicted, cached, prompt_tokens))
        said = f"{expected:,} tokens predicted, {found:,} found of {tokens:,}; prompts {modes}"
        print(f"\nvLLM {release()}, {len(used)} engines, the first in {ELSEWHERE}: {said}")
        assert modes == {"exact": QUESTIONS * sure, "partly": QUESTIONS * (not sure), "text": 0}, said
        if sure:
            assert expected == found > tokens / 2, said
        else:
            problems = [problem for one in status["replicas"] for problem in one["problems"]]
            assert any("time zones (TZ) differ" in one for one in problems), problems
