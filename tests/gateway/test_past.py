"""What is told of a replica is of the engine that is there now: not of one that is gone, nor of events that nobody can
read."""

from .running import running

PAST = "models adapters version block_size num_blocks max_model_len running waiting kv_usage".split()


async def test_nothing_is_told_of_an_engine_that_is_gone(engine):
    async with running("--model", "sim", "--replica-url", engine.url) as gateway:
        (told,) = (await gateway.until(lambda status: status["replicas"][0]["events"] == "live"))["replicas"]
        assert told["models"] == ["sim"] and told["num_blocks"]
        engine.kill()
        status = await gateway.until(lambda status: status["replicas"][0]["state"] == "failed")
        (told,) = status["replicas"]
        assert not any(told[name] for name in PAST) and told["events"] == "off" and status["models"] == []
        assert told["events_reason"].startswith("the replica is failed") and told["problems"] == []
        page = (await gateway.admin.get("/metrics")).text
        assert "hitherto_events_state{" not in page and "hitherto_replica_kv_usage_ratio{" not in page
