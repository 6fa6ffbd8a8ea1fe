"""The settings of traces, which come from OpenTelemetry's standard environment variables alone.

Traces are off unless OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT names a receiver. OpenTelemetry
is imported only if traces are on, since the import takes 0.1 s and 3 MB.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..settings import ConfigError

if TYPE_CHECKING:
    from .spans import Spans

INSTALL = "pip install 'hitherto[otel]'"
PROTOCOL = "http/protobuf"


def receiver(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the URL to which spans are posted, or None if traces are off.

    Raises ConfigError for settings that are not supported, or if the packages that send spans are not installed.
    """

    def said(name: str) -> str:
        """Return the value of a setting: the variable for traces, or else the one for all signals, or else "".

        An empty variable counts as unset, as OpenTelemetry's specification says.
        """
        return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")

    exporter = environ.get("OTEL_TRACES_EXPORTER", "") or "otlp"
    if not said("ENDPOINT") or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true" or exporter == "none":
        return None
    if exporter != "otlp":
        raise ConfigError(
            f"environment OTEL_TRACES_EXPORTER: {exporter!r} is not known here; spans are sent by otlp, or by none"
        )
    if (protocol := said("PROTOCOL") or PROTOCOL) != PROTOCOL:
        raise ConfigError(f"environment OTEL_EXPORTER_OTLP_PROTOCOL: {protocol!r} is not spoken here; set it to {PROTOCOL}, and the endpoint to the "
                          "collector's port for it (most often 4318)")  # fmt: skip
    if not said("ENDPOINT").startswith(("http://", "https://")):
        raise ConfigError(
            f"environment OTEL_EXPORTER_OTLP_ENDPOINT: {said('ENDPOINT')!r} is no http:// or https:// URL"
        )
    if not _installed("opentelemetry.sdk") or not _installed("opentelemetry.exporter.otlp.proto.http"):
        raise ConfigError(f"the environment names a receiver of traces ({said('ENDPOINT')}), and what sends them is not installed: {INSTALL}, "
                          "or set OTEL_SDK_DISABLED=true")  # fmt: skip
    return environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or f"{said('ENDPOINT').removesuffix('/')}/v1/traces"


def start() -> Spans | None:
    """Return the exporter of spans, or None if traces are off. Raises ConfigError for settings that cannot be used."""
    if receiver() is None:
        return None
    from .spans import Spans

    try:
        return Spans()
    except ValueError as error:
        raise ConfigError(f"environment OTEL_...: {error}") from None


def _installed(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
