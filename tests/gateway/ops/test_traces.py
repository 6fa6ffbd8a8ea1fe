"""When there are traces, where they go, and what is said of what cannot be."""

import pytest

from gateway.ops import traces
from gateway.settings import ConfigError

OTLP = "OTEL_EXPORTER_OTLP_"
HERE = {f"{OTLP}ENDPOINT": "http://c:4318"}
ITS = "http://c:4318/v1/traces"


@pytest.mark.parametrize(
    "environ, url",
    [
        ({}, None),
        ({f"{OTLP}ENDPOINT": ""}, None),
        (HERE, ITS),
        ({f"{OTLP}ENDPOINT": "http://c:4318/in/"}, "http://c:4318/in/v1/traces"),
        ({f"{OTLP}TRACES_ENDPOINT": "http://t:1/as/it/is"}, "http://t:1/as/it/is"),
        (HERE | {f"{OTLP}TRACES_ENDPOINT": "http://t:1/x"}, "http://t:1/x"),
        ({f"{OTLP}METRICS_ENDPOINT": "http://c:4318"}, None),
        (HERE | {"OTEL_SDK_DISABLED": "True"}, None),
        (HERE | {"OTEL_SDK_DISABLED": "false"}, ITS),
        (HERE | {"OTEL_TRACES_EXPORTER": "none"}, None),
        (HERE | {f"{OTLP}PROTOCOL": "http/protobuf"}, ITS),
        ({f"{OTLP}PROTOCOL": "grpc", "OTEL_TRACES_EXPORTER": "zipkin"}, None),  # nothing is asked for
    ],
)
def test_the_standard_environment_names_the_receiver(environ, url):
    assert traces.receiver(environ) == url


@pytest.mark.parametrize(
    "environ, said",
    [
        ({f"{OTLP}PROTOCOL": "grpc"}, f"{OTLP}PROTOCOL: 'grpc' is not spoken here; set it to http/protobuf"),
        ({f"{OTLP}PROTOCOL": "http/protobuf", f"{OTLP}TRACES_PROTOCOL": "http/json"}, "'http/json' is not spoken"),
        ({f"{OTLP}TRACES_ENDPOINT": "grpc://c:4317"}, "'grpc://c:4317' is no http:// or https:// URL"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin'"),
    ],
)
def test_what_cannot_be_is_said(environ, said):
    with pytest.raises(ConfigError, match=said):
        traces.receiver(HERE | environ)
