"""Pods of a Kubernetes cluster as replicas: which ones are, at what URL, and what their labels say of them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from replicas.names import bracketed
from replicas.replica import parse_url, url_of
from replicas.roles import BOTH, DECODE, PREFILL
from replicas.tables import Table

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # what a cluster gives each pod
ROLE_LABEL = "llm-d.ai/role"
# What the label of a role may say, as llm-d writes it; a pod that only encodes media is no replica.
ROLES = {
    "prefill": PREFILL, "decode": DECODE, "both": BOTH, "prefill-decode": BOTH,
    "encode-prefill": PREFILL, "encode-decode": DECODE, "encode-prefill-decode": BOTH,
}  # fmt: skip
SWITCH = {"yes": True, "true": True, "no": False, "false": False}
BY_LABEL = ("role", "model", "spill", "transfer")  # of what stands behind the # of a replica's URL


def _check_url(url: str) -> str:
    if "{ip}" not in url:
        raise ValueError(f"{url!r} has no {{ip}} in it: write http://{{ip}}:8000, and the pod's address is put there")
    parse_url(url.replace("{ip}", "192.0.2.1"))
    return url


def _check_labels(labels: dict[str, str]) -> dict[str, str]:
    if unknown := [name for name in labels if name not in BY_LABEL]:
        raise ValueError(f"{unknown[0]!r} is nothing that a label says: {', '.join(BY_LABEL)}")
    return {"role": ROLE_LABEL, **labels}


class Discover(Table):
    """Which pods are replicas, and how they are reached."""

    may_be_empty = frozenset(("namespace", "api"))
    selector: str = Field(min_length=1)  # of labels, as kubectl takes it
    namespace: str | None = None  # None: the gateway's own
    url: Annotated[str, AfterValidator(_check_url)] = "http://{ip}:8000"
    # which of their labels says which of the settings behind a URL's #
    labels: Annotated[dict[str, str], AfterValidator(_check_labels)] = Field({}, validate_default=True)
    api: str | None = Field(None, pattern="^https?://[^/]+$")  # None: that of the cluster which the gateway runs in

    def url_of(self, ip: str, labels: Mapping[str, str]) -> str:
        """The replica's URL, with what its labels say. Raises ValueError for what no replica can be."""
        address = parse_url(self.url.replace("{ip}", bracketed(ip)))
        said = {name: labels[label] for name, label in self.labels.items() if labels.get(label)}
        role, spill = said.get("role", address.role), said.get("spill", "yes" if address.spill else "no")
        for name, value, known in (("role", role, ROLES), ("spill", spill, SWITCH)):
            if value not in known:
                raise ValueError(f"its label {self.labels[name]} says {value!r}, and not one of {', '.join(known)}")
        url = url_of(
            address.url,
            address.source,
            said.get("model", address.model),
            ROLES[role],
            SWITCH[spill],
            said.get("transfer", address.transfer),
            address.bootstrap,
            address.peer.replace("{ip}", bracketed(ip)),
        )
        parse_url(url)
        return url


class Place(NamedTuple):
    """Where the API is and what it is asked of, with what it asks for."""

    api: str
    namespace: str
    account: Path

    @property
    def headers(self) -> dict[str, str]:
        """The token is read each time, as it is replaced within the hour; nobody gets it without TLS."""
        file = self.account / "token"
        return {"Authorization": f"Bearer {file.read_text().strip()}"} if self._has(file) else {}

    @property
    def authorities(self) -> Path | None:
        """Whose certificates are believed; None: those that the system believes."""
        file = self.account / "ca.crt"
        return file if self._has(file) else None

    def _has(self, file: Path) -> bool:
        return self.api.startswith("https://") and file.is_file()


def place(discover: Discover, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> Place:
    """Raises ValueError where neither the settings nor the pod that this process runs in say it."""
    host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
    api = discover.api or (f"https://{bracketed(host)}:{port}" if host else None)
    if api is None:
        raise ValueError(
            "this gateway runs in no pod (KUBERNETES_SERVICE_HOST is not set), so it does not know the cluster. "
            "Give its API as api: URL, http://127.0.0.1:8001 where `kubectl proxy` runs"
        )
    file = account / "namespace"
    namespace = discover.namespace or (file.read_text().strip() if file.is_file() else None)
    if not namespace:
        raise ValueError("no namespace is known, since this gateway runs in no pod: give namespace: NAME")
    return Place(api, namespace, account)


class Pod(NamedTuple):
    name: str
    ip: str
    labels: Mapping[str, str]
    uid: str  # another one where a pod took another's name and address
