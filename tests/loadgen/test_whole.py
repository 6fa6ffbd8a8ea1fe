"""The house together: gateway, engines and generator as a user starts them."""

import asyncio
import json
import os
import sys


async def test_policies_are_compared_on_fresh_engines(tmp_path):
    path = tmp_path / "c.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "loadgen.cli",
        "compare",
        "--policies",
        "round_robin,least_time",
        "--launch",
        "2",
        "--num-prompts",
        "12",
        "--request-rate",
        "20",
        "--think-time",
        "0.1",
        "--output-len",
        "8",
        "--json",
        str(path),
        cwd=tmp_path,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "120"},
    )
    async with asyncio.timeout(100):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    assert "Worse with" in out.decode()
    reports = json.loads(path.read_text())["targets"]
    assert list(reports) == ["round_robin", "least_time"]
    for report in reports.values():
        assert report["completed"] == 12 and report["errors"] == {}
        assert report["cache"]["reported_on"] == report["cache"]["predicted_on"] == 12
        # What engines counted is what replies said, and the gateway's trials of token ids, which repeat prompts: all
        # but the last tokens of each are found.
        counted, said = report["engines"], report["cache"]
        assert counted["queries"] >= said["prompt_tokens"] and counted["hits"] >= said["cached_tokens"]
        assert 0 <= counted["queries"] - counted["hits"] - said["prefill_tokens"] < 12 * 16
        assert sum(figures["requests"] for figures in report["replicas"].values()) == 12
    assert [figures["requests"] for figures in reports["round_robin"]["replicas"].values()] == [6, 6]
