"""When there are traces, where they go, and what is said of what cannot be."""

import pytest

from gateway.ops import traces
from gateway.settings import ConfigError


@pytest.mark.parametrize(
    "environ, url",
    [
        ({}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/in/"}, "http://c:4318/in/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/as/it/is"}, "http://t:1/as/it/is"),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/x"},
            "http://t:1/x",
        ),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "True"}, None),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_SDK_DISABLED": "false"}, "http://c:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, None),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "http://c:4318/v1/traces",
        ),
    ],
)
def test_the_standard_environment_names_the_receiver(environ, url):
    assert traces.receiver(environ) == url


@pytest.mark.parametrize(
    "environ, said",
    [
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
            "OTEL_EXPORTER_OTLP_PROTOCOL: 'grpc' is not spoken here; set it to http/protobuf",
        ),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"},
            "'http/json' is not spoken",
        ),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "grpc://c:4317"}, "'grpc://c:4317' is no http:// or https:// URL"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin'"),
    ],
)
def test_what_cannot_be_is_said(environ, said):
    with pytest.raises(ConfigError, match=said):
        traces.receiver({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", **environ})


def test_what_cannot_be_does_not_matter_where_nothing_is_asked_for():
    assert traces.receiver({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "zipkin"}) is None
