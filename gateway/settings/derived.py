"""Values derived from the settings: secrets, URLs of running engines, the admin side's URL, overload control."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from replicas.kept import KeptReplicas
from replicas.names import bracketed
from replicas.replica import bearer, parse_url

from .credentials import ENGINE_KEY, TOKEN
from .errors import using_file
from .overload import Admission, QosClass, Slo
from .schema import Settings

if TYPE_CHECKING:
    import policies

    from ..proxy.admission.overload import Overload

ADMIN_SIDE = "x-hitherto-admin"  # a header of every answer of a gateway's admin side, and of no other server


class Secrets(NamedTuple):
    """The values of the secret settings, read from the files that these name; None: not set."""

    admin_token: str | None
    engine_key: str | None


def read_secrets(settings: Settings) -> Secrets:
    """Return both secrets. Raises UnusableFile."""
    return Secrets(read_token(settings), read_engine_key(settings))


def read_token(settings: Settings) -> str | None:
    """Return the token that the admin side asks for, None if it asks for none. Raises UnusableFile."""
    return TOKEN.read(settings.admin_token)


def read_engine_key(settings: Settings) -> str | None:
    """Return the key that engines ask for, None if they ask for none. Raises UnusableFile."""
    return ENGINE_KEY.read(settings.engine_api_key)


def added_replicas(settings: Settings) -> dict[str, str]:
    """Return the URLs of the replicas that operators added before the last restart, by the replica's id.

    They are kept in the file that the setting `replica_file` names. Raises UnusableFile.
    """
    if settings.replica_file is None:
        return {}
    remedy = "Correct or remove that file, which has one replica's URL a line"
    with using_file("replica_file", settings.replica_file, remedy):
        return {parse_url(url).id: url for url in KeptReplicas(settings.replica_file).urls()}


def known_urls(settings: Settings) -> tuple[str, ...]:
    """Return the URLs of the engines that run already. Raises UnusableFile.

    The settings name some, and operators added others before the last restart. If both name an engine, the operators'
    URL is used, because it came later.
    """
    return tuple(({parse_url(url).id: url for url in settings.replica_url} | added_replicas(settings)).values())


def admin_url(settings: Settings) -> str:
    """Return the URL of the admin side of a gateway with these settings, for a client on the same machine."""
    host = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.admin_host, settings.admin_host)
    return f"http://{bracketed(host.strip('[]'))}:{settings.admin_port}"


def admin_headers(settings: Settings) -> dict[str, str]:
    """Return the headers that a request to the admin side of a gateway with these settings needs.

    Raises UnusableFile if the file with the admin side's token cannot be used.
    """
    return bearer(read_token(settings))


def overload_of(settings: Settings) -> Overload | None:
    """Return the overload control that the settings configure, or None if they configure none.

    It is made from the tables `slo`, `scheduler`, `request_router` and `admission`.
    """
    if not settings.has_overload:
        return None
    import policies  # importing them takes a fifth of a second

    from ..proxy.admission.overload import Overload

    limits = _limits(settings.slo)
    given = settings.scheduler.qos_classes if settings.scheduler is not None else (QosClass(name="default"),)
    classes = {
        one.name: policies.QosClass(
            one.name, one.reserved_fraction, one.priority, _limits(one.slo).over(limits), one.when_full,
            one.max_tokens_floor,
        )
        for one in given
    }  # fmt: skip
    routes = settings.request_router.routes if settings.request_router is not None else ()
    rules = [policies.Rule(classes[one.qos], _header(one.match.header), one.match.model, one.match.path, one.match.key)
             for one in routes]  # fmt: skip
    admission = settings.admission or Admission()
    known = {name: getattr(admission, name) for name in policies.Rules._fields}
    header = admission.tenant_header
    return Overload(policies.Classes([*classes.values()], rules), policies.Rules(**known), header and header.encode())


def _limits(slo: Slo | None) -> policies.Slo:
    import policies

    return policies.Slo(slo.ttft, slo.tpot) if slo is not None else policies.Slo()


def _header(condition: str | None) -> tuple[str, str | None] | None:
    if condition is None:
        return None
    name, colon, value = condition.partition(": ")
    return name, value if colon else None
