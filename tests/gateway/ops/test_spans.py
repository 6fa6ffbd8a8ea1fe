"""What the SDK is told by its environment, and what it may say in the log."""

import logging

import pytest

from gateway.ops import spans as module
from gateway.ops.spans import Spans


@pytest.fixture
def made(monkeypatch, unused_tcp_port):
    """Makes `Spans` that nobody receives, with this environment."""
    every = []

    def make(**environ) -> Spans:
        for name, value in {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{unused_tcp_port}", **environ}.items():
            monkeypatch.setenv(name, value)
        every.append(Spans())
        return every[-1]

    yield make
    for spans in every:
        spans.close()


@pytest.mark.parametrize(
    "environ, name",
    [
        ({}, "hitherto"),
        ({"OTEL_SERVICE_NAME": "edge"}, "edge"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other,deployment.environment.name=prod"}, "other"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=other", "OTEL_SERVICE_NAME": "edge"}, "edge"),
    ],
)
def test_the_services_name(made, environ, name):
    told = made(**environ)._resource.attributes
    assert told["service.name"] == name and told["service.version"]
    if "prod" in str(environ):
        assert told["deployment.environment.name"] == "prod"


@pytest.mark.parametrize(
    "sampler, sampled", [("always_on", True), ("always_off", False), ("parentbased_always_off", False)]
)
def test_the_sampler(made, sampler, sampled):
    trace = made(OTEL_TRACES_SAMPLER=sampler).begin("GET", {}, {})
    assert trace.sampled is sampled


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_flags_go_on_as_they_came(made, flags):
    header = f"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags:02x}"
    trace = made().begin("GET", {}, {"traceparent": [header]})
    assert module.traceparent(trace.root).endswith(b"-%02x" % flags) and trace.sampled == bool(flags & 1)


def test_the_same_complaint_is_a_line_a_minute(made, caplog, monkeypatch):
    made()
    now = 1000.0
    monkeypatch.setattr(module, "monotonic", lambda: now)
    sdk = logging.getLogger("opentelemetry.some.exporter")
    with caplog.at_level(logging.INFO, "hitherto.traces"):
        for number in range(500):
            sdk.warning("batch %d was not taken", number)
        sdk.error("and another thing")
        now += module.QUIET_SECONDS
        sdk.warning("batch %d was not taken", 500)
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("WARNING", "batch 0 was not taken"), ("ERROR", "and another thing"),
        ("WARNING", "batch 500 was not taken (499 more like it in the last 60 s)"),
    ]  # fmt: skip
