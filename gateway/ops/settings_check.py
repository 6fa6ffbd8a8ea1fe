"""Checks of `hitherto doctor` on the settings and the files they name, before any server is contacted."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Iterator

from gateway.http.room import FEWEST_FILES, too_few
from gateway.model import launches
from gateway.ops import traces
from gateway.ops.trial import Finding
from gateway.settings import Config, ConfigError, Settings


def check_settings(config: Config) -> Finding:
    """Report how many settings were given, and from which files."""
    given = [source for source in config.sources.values() if source != "default"]
    files = sorted({source.split(":")[0] for source in given if source.startswith("file ")})
    parts = [
        f"{len(given)} of {len(config.sources)} settings given",
        *(f"read {name.removeprefix('file ')}" for name in files),
    ]
    return Finding("ok", "config", ", ".join(parts))


# Part of a gateway's status -> the doctor's name for it, and what stays in use while its file cannot be used.
FOLLOWED = {
    "api_keys": ("api keys", "the keys read before stay good, also one that was taken out since"),
    "tls": ("tls", "the certificate read before stays in use"),
}


def check_named_files(config: Config) -> Iterator[Finding]:
    """Yield a finding for each file that settings name and that cannot be used, profiles excepted.

    `check_launches` judges profiles.
    """
    for setting, why in config.unusable.items():
        if setting not in ("profile", "pools"):
            subject, stays = FOLLOWED.get(
                "tls" if setting.startswith("tls_") else setting, (setting.replace("_", " "), "")
            )
            left_out = "; the checks below are made without it" if setting in config.left_out else ""
            yield Finding("fail", subject, why,
                          "mend it: no gateway starts with it" + (f"; in one that runs {stays}" if stays else left_out))  # fmt: skip


def check_open_files(most: int | None) -> Finding | None:
    """Return a warning if a gateway may open too few files for its connections, or None.

    `most` is the gateway's limit of open files; None: that of a gateway started here.
    """
    if most is None:
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    remedy = (
        f"raise the hard limit where the gateway is started to {FEWEST_FILES} at least: LimitNOFILE in a systemd unit, "
        "`ulimit -Hn` in a shell"
    )
    return Finding("warn", "open files", text, remedy) if (text := too_few(most)) else None


def check_own_redis() -> Finding:
    """Check for the Redis server that workers share where no Redis is named."""
    from gateway.workers.private_redis import server

    try:
        return Finding("ok", "workers", f"share a Redis of their own, {server()}")
    except ConfigError as error:
        return Finding("fail", "workers", str(error))


async def check_traces() -> Finding | None:
    """Check whether the receiver accepts traces; None if the environment wants none."""
    try:
        receiver = traces.receiver()
    except ConfigError as error:
        return Finding("fail", "traces", str(error))
    if receiver is None:
        return None
    from gateway.ops.spans import refusal

    why = await asyncio.to_thread(refusal, 2.0)
    if why:
        return Finding(
            "warn",
            "traces",
            f"{receiver} does not take them: {why}",
            "start the collector, or correct OTEL_EXPORTER_OTLP_ENDPOINT; its port for HTTP is most often 4318",
        )
    return Finding("ok", "traces", f"{receiver} takes them")


def check_launches(config: Config) -> Iterator[Finding]:
    """Yield what keeps engines from being launched, in the words of the gateway's start."""
    try:
        launches(config.settings)
    except ConfigError as error:
        for line in error.placed(config.sources).splitlines():
            yield Finding("fail", "launch", line, "the gateway does not start with that")


def check_no_replicas(settings: Settings) -> Finding:
    """Return the finding for settings that name no replica: fine if engines are to be launched."""
    if settings.launches:
        alone = [(settings.launch, settings.profile)] if settings.launch else []
        kinds = alone + [(pool.launch, pool.profile) for pool in settings.pools.values()]
        what = ", ".join(f"{count} would be launched with profile {profile}" for count, profile in kinds)
        return Finding("ok", "replicas", f"{what}; run the doctor again when they run")
    return Finding(
        "fail", "replicas", "there is none to send requests to", "give --replica-url http://HOST:PORT, or --launch N"
    )
