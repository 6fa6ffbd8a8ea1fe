"""The header that tells llm-d's sidecar which prefiller computes the prompt.

Read in the sources of llm-d-router (`pkg/sidecar/proxy`). The sidecar is a proxy in front of each decoder. If a request
has the header `x-prefiller-host-port`, the sidecar sends it to that prefiller first, for one token, and then to its
decoder with the prefiller's transfer parameters; the connector (NIXL, Mooncake, SGLang's) is a setting of the sidecar.
If the prefiller fails, the client gets the prefiller's status; for a prefiller that is not on the sidecar's list it
gets 403. The sidecar forwards requests without the header unchanged, so whole requests and probes go through it too.
"""

from replicas.engines.transfer import Transfer

# A request with one of these fields cannot be split into two legs. A request whose text only looks like such a field is
# not split either: a request that is not split is always answered correctly.
_WHOLE = (b'"kv_transfer_params"', b'"use_beam_search"', b'"background"', b'"bootstrap_room"')


class Sidecar(Transfer):
    """The transfer by llm-d's sidecar: the gateway sends one request, which the sidecar splits into two."""

    id = "llm-d"
    name = "llm-d's sidecar"
    header = b"x-prefiller-host-port"

    def first_body(self, path: str, body: bytes) -> bytes | None:
        return None if any(one in body for one in _WHOLE) else body

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        return body


LLMD = Sidecar()
