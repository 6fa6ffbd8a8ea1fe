"""One trace through both: vLLM's own span hangs below the gateway's attempt."""

import asyncio

from ..gateway.collector import collecting
from .engines import gateway


async def test_vllms_span_is_a_child_of_the_attempt(start_engine):
    def of_vllm(collector):
        """Parents of vLLM's spans in the trace that the gateway began."""
        traces = {span.trace for span in collector.of("CLIENT")}
        spans = [span for span in collector.spans if span.resource["service.name"] == "vllm"]
        return {span.parent for span in spans if span.trace in traces}

    async with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        flags = ("--otlp-traces-endpoint", f"{collector.url}/v1/traces")
        engine = start_engine(*flags, blocks=128, env={**environ, "OTEL_SERVICE_NAME": "vllm"})
        await asyncio.to_thread(engine.wait)
        async with gateway(engine, env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **environ}) as running:
            body = {"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]}
            assert (await running.client.post("/v1/chat/completions", json=body)).status_code == 200
            await collector.until(of_vllm, 30)
        engine.stop()
    (attempt,) = collector.of("CLIENT")
    assert attempt.id in of_vllm(collector)
