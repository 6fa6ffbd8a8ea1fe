"""The settings of replica discovery in Kubernetes: which pods are replicas, and how to find their URLs and settings."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

from replicas.names import bracketed
from replicas.replica import parse_url, url_of
from replicas.roles import BOTH, DECODE, PREFILL
from replicas.tables import Table

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where a cluster mounts a pod's service account
ROLE_LABEL = "llm-d.ai/role"
# The values of the role label, as llm-d writes them; a pod that only encodes media is no replica.
ROLES = {
    "prefill": PREFILL, "decode": DECODE, "both": BOTH, "prefill-decode": BOTH,
    "encode-prefill": PREFILL, "encode-decode": DECODE, "encode-prefill-decode": BOTH,
}  # fmt: skip
SWITCH = {"yes": True, "true": True, "no": False, "false": False}
BY_LABEL = ("role", "model", "spill", "transfer")  # settings of a replica URL's fragment that a label may give


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
    """The settings that say which pods are replicas, and how the gateway reaches them."""

    may_be_empty = frozenset(("namespace", "api"))
    selector: str = Field(min_length=1)  # a label selector, in kubectl's syntax
    namespace: str | None = None  # None: the gateway's own
    url: Annotated[str, AfterValidator(_check_url)] = "http://{ip}:8000"
    # setting of a URL's fragment -> name of the label that gives it
    labels: Annotated[dict[str, str], AfterValidator(_check_labels)] = Field({}, validate_default=True)
    api: str | None = Field(None, pattern="^https?://[^/]+$")  # None: the API of the cluster that the gateway runs in

    def url_of(self, ip: str, labels: Mapping[str, str]) -> str:
        """Return the replica URL of a pod, with the settings that its labels give in the URL's fragment.

        `ip`: the pod's IP address; `labels`: all its labels. Raises ValueError for an invalid setting.
        """
        address = parse_url(self.url.replace("{ip}", bracketed(ip)))
        said = {name: labels[label] for name, label in self.labels.items() if labels.get(label)}
        role, spill = said.get("role", address.role), said.get("spill", "yes" if address.spill else "no")
        for name, value, known in (("role", role, ROLES), ("spill", spill, SWITCH)):
            if value not in known:
                raise ValueError(f"its label {self.labels[name]} says {value!r}, and not one of {', '.join(known)}")
        model, transfer = said.get("model", address.model), said.get("transfer", address.transfer)
        address = address._replace(model=model, transfer=transfer, role=ROLES[role], spill=SWITCH[spill])
        url = url_of(address._replace(peer=address.peer.replace("{ip}", bracketed(ip))))
        parse_url(url)
        return url


class Place(NamedTuple):
    """How the Kubernetes API is reached: its URL, the namespace to read, and the folder of the credentials."""

    api: str
    namespace: str
    account: Path

    @property
    def headers(self) -> dict[str, str]:
        """The authorization header; {} without TLS, or without a token file.

        The token is read from its file each time, as the cluster replaces it hourly.
        """
        file = self.account / "token"
        return {"Authorization": f"Bearer {file.read_text().strip()}"} if self._has(file) else {}

    @property
    def authorities(self) -> Path | None:
        """The file of certificates to trust; None: the system's."""
        file = self.account / "ca.crt"
        return file if self._has(file) else None

    def _has(self, file: Path) -> bool:
        return self.api.startswith("https://") and file.is_file()


def place(discover: Discover, account: Path = ACCOUNT, environ: Mapping[str, str] = os.environ) -> Place:
    """Return where to reach the Kubernetes API, from the settings or from the pod that this process runs in.

    `account`: the folder of the service account. Raises ValueError if the API or the namespace is not known.
    """
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
    uid: str  # changes when another pod takes a name and address
