"""The house together: gateway, engines and generator as a user starts them."""

import asyncio
import json
import os
import sys

FIRST = """
from policies import Choice

class First:
    def choose(self, demand, candidates, explain=False):
        return Choice(0, "the first")
"""


async def test_policies_are_compared_on_fresh_engines(tmp_path):
    (tmp_path / "first.py").write_text(FIRST)
    path = tmp_path / "c.json"
    load = "--launch 2 --num-prompts 12 --request-rate 20 --think-time 0.1 --output-len 8"
    command = f"-m loadgen.cli compare --policies round_robin,./first.py:First {load} --json {path}"
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command.split(), cwd=tmp_path, env={**os.environ, "COLUMNS": "120"}, **pipes
    )
    async with asyncio.timeout(100):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "over an even share: 2.00 instead of 1.00" in " ".join(out.decode().split())
    reports = json.loads(path.read_text())["targets"]
    assert list(reports) == ["round_robin", "./first.py:First"]
    for report in reports.values():
        assert report["completed"] == 12 and report["errors"] == {}
        assert report["cache"]["reported_on"] == report["cache"]["predicted_on"] == 12
        # What engines counted is what replies said, and the gateway's trials of token ids, which repeat prompts: all
        # but the last tokens of each are found.
        counted, said = report["engines"], report["cache"]
        assert counted["queries"] >= said["prompt_tokens"] and counted["hits"] >= said["cached_tokens"]
        assert 0 <= counted["queries"] - counted["hits"] - said["prefill_tokens"] < 12 * 16
        assert sum(figures["requests"] for figures in report["replicas"].values()) == 12
    shares = [sorted(one["requests"] for one in report["replicas"].values()) for report in reports.values()]
    assert shares == [[6, 6], [0, 12]], "a replica that got nothing counts as well"
