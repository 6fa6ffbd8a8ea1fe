"""What is told of a replica is of the engine that is there now: not of one that is gone, nor of events that nobody can
read."""

from .running import running
from .test_names import engine


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
        past = "models adapters version block_size num_blocks max_model_len running waiting kv_usage".split()
        assert not any(told[name] for name in past) and told["events"] == "off" and status["models"] == []
        assert told["events_reason"].startswith("the replica is failed") and told["problems"] == []
        page = (await gateway.admin.get("/metrics")).text
        assert "hitherto_events_state{" not in page and "hitherto_replica_kv_usage_ratio{" not in page
