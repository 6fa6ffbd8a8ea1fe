"""One trace through both: vLLM's own span hangs below the gateway's attempt."""

import asyncio

from ..gateway.collector import collecting
from .engines import gateway


async def test_vllms_span_is_a_child_of_the_attempt(start_engine):
    async with collecting() as collector:
        environ = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
        engine = start_engine(
            "--otlp-traces-endpoint",
            f"{collector.url}/v1/traces",
            blocks=128,
            env={**environ, "OTEL_SERVICE_NAME": "vllm"},
        )
        await asyncio.to_thread(engine.wait)
        async with gateway(engine, env={"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **environ}) as running:
            answer = await running.client.post(
                "/v1/chat/completions",
                json={"model": "tiny", "max_tokens": 3, "messages": [{"role": "user", "content": "hello"}]},
            )
            assert answer.status_code == 200
            await collector.until(
                lambda it: {span.resource["service.name"] for span in it.spans if span.trace} >= {"hitherto", "vllm"},
                30,
            )
            (client,) = collector.of("CLIENT")
            await collector.until(
                lambda it: [
                    span for span in it.spans if span.resource["service.name"] == "vllm" and span.trace == client.trace
                ],
                30,
            )
        engine.stop()
    theirs = [
        span for span in collector.spans if span.resource["service.name"] == "vllm" and span.trace == client.trace
    ]
    assert client.id in {span.parent for span in theirs}
