"""The header that llm-d's sidecar is told the prefiller by.

Read in the sources of llm-d-router (`pkg/sidecar/proxy`). The sidecar stands before each decoder. A request whose
`x-prefiller-host-port` names a prefiller it sends there first, for one token, and then to its decoder with what the
prefiller said; by which connector (NIXL, Mooncake, SGLang's) is its own setting. Where the prefiller fails the client
gets the prefiller's status, and 403 for one that is not on the sidecar's list. Without the header it passes requests on
as they are, so whole requests and probes go through it as well.
"""

from replicas.engines.transfer import Transfer

# A request with one of these can have no legs; text that happens to look like one stays whole, which is never wrong.
_WHOLE = (b'"kv_transfer_params"', b'"use_beam_search"', b'"background"', b'"bootstrap_room"')


class Sidecar(Transfer):
    """One request, which the sidecar makes two of."""

    id = "llm-d"
    name = "llm-d's sidecar"
    header = b"x-prefiller-host-port"

    def first_body(self, path: str, body: bytes) -> bytes | None:
        return None if any(one in body for one in _WHOLE) else body

    def second_body(self, body: bytes, parameters: bytes) -> bytes:
        return body


LLMD = Sidecar()
