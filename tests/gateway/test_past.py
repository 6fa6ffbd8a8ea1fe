"""What is told of a replica is of the engine that is there now: not of one that is gone, nor of events that nobody can
read."""

from .running import running
from .test_names import engine

TALES = [[{"role": "user", "content": f"{number}: it was a bright cold day in April. " * 12}] for number in range(6)]


async def test_events_that_cannot_be_reached_are_told_at_once_and_nothing_is_promised_that_was_evicted():
    """The cache holds two of the six prompts."""
    async with engine("127.0.0.2", (0, 0, 0), "--num-blocks", "24", "--max-model-len", "256") as process:
        url = f"http://127.0.0.2:{process.port}#events=tcp://127.0.0.2:9"
        async with running("--model", "sim", "--replica-url", url) as gateway:
            await gateway.ready(1)
            status = await gateway.until(lambda status: status["replicas"][0]["events"] == "unobserved", seconds=2)
            problems = status["replicas"][0]["problems"]
            assert any(
                "KV events are not followed" in one and "tcp://127.0.0.2:9 cannot be reached" in one for one in problems
            )
            for tale in TALES * 3 + TALES[:1] * 3:
                assert (await gateway.chat(tale)).status_code == 200
            status = await gateway.until(lambda status: status["totals"]["requests"] == 21)
            one = status["replicas"][0]
            assert one["reported_prompt_tokens"] == one["prompt_tokens"]
            assert 0 < one["predicted_cached_tokens"] <= one["reported_cached_tokens"], one
            assert 'hitherto_events_state{replica="%s",state="unobserved"} 1' % one["id"] in (
                await gateway.admin.get("/metrics")
            ).text.replace(".0\n", "\n")


async def test_nothing_is_told_of_an_engine_that_is_gone():
    async with (
        engine("127.0.0.2") as process,
        running("--model", "sim", "--replica-url", f"http://127.0.0.2:{process.port}") as gateway,
    ):
        status = await gateway.until(lambda status: status["replicas"][0]["events"] == "live")
        assert status["replicas"][0]["models"] == ["sim"] and status["replicas"][0]["num_blocks"]
        process.kill()
        status = await gateway.until(lambda status: status["replicas"][0]["state"] == "failed")
        told = status["replicas"][0]
        past = (
            "models",
            "adapters",
            "version",
            "block_size",
            "num_blocks",
            "max_model_len",
            "running",
            "waiting",
            "kv_usage",
        )
        assert not any(told[name] for name in past) and told["events"] == "off" and status["models"] == []
        assert told["events_reason"].startswith("the replica is failed") and told["problems"] == []
        page = (await gateway.admin.get("/metrics")).text
        assert "hitherto_events_state{" not in page and "hitherto_replica_kv_usage_ratio{" not in page
