"""The header that names the prefiller to llm-d's sidecar.

Read in the sources of llm-d-router (`pkg/sidecar/proxy`). The sidecar is in front of each decoder. It sends a request
whose `x-prefiller-host-port` names a prefiller there first, for one token, and then to its decoder with the prefiller's
parameters; the connector (NIXL, Mooncake, SGLang's) is its own setting. If the prefiller fails, the client gets the
prefiller's status; it gets 403 for a prefiller that is not on the sidecar's list. The sidecar forwards requests without
the header unchanged, so whole requests and probes go through it as well.
"""

from replicas.engines.transfer import Transfer

# A request with one of these cannot be split. Text that only looks like one is sent whole as well, which is always
# correct.
_WHOLE = (b'"kv_transfer_params"', b'"use_beam_search"', b'"background"', b'"bootstrap_room"')


class Sidecar(Transfer):
    """One request, which the sidecar splits into two."""

    id = "llm-d"
    name = "llm-d's sidecar"
    header = b"x-prefiller-host-port"

    def first_body(self, path: str, body: bytes) -> bytes | None:
        return None if any(one in body for one in _WHOLE) else body

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        return body


LLMD = Sidecar()
