"""The parameters with which vLLM's connectors keep a prompt's KV cache, and fetch it from another engine.

NIXL (`Nixl`; read in the sources of 0.32, `distributed/kv_transfer/kv_connector/v1/nixl`, and tested in `tests/vllm`):
The engine that computed a prompt answers with `kv_transfer_params`. The gateway puts them unchanged into the second
request, and the decoding engine then reads the blocks by itself. The first engine keeps the blocks for
`kv_lease_duration`, 30 s by default; a request that waits in the decoding engine's queue extends this time. A decoding
engine that refuses or drops the second request has the blocks freed, so the parameters can be used with another replica
only if no part of the request was sent.

Mooncake (`Mooncake`; read in the sources of 0.32, `kv_connector/v1/mooncake`, and tested in `tests/vllm`):
Both requests are sent at once, with the same `transfer_id`, and the engine that gets its request first waits for the
other. The decoding engine finds the computing engine through that engine's bootstrap server and engine id. The blocks
are sent only if the request at the computing engine ended at its token limit: if it ended by itself, the decoding
engine would wait for 480 s.
"""

from __future__ import annotations

import secrets
from typing import Any

import orjson

from replicas.engines.transfer import (
    CHAT,
    COMPLETIONS,
    Meeting,
    MeetingTransfer,
    Transfer,
    json_object,
    one_sequence,
    one_token,
    with_first,
)
from replicas.names import bracketed
from replicas.pairing import ALIKE

_FIELD = "kv_transfer_params"
_KEPT = {"do_remote_decode": True, "do_remote_prefill": False}
# Fields that may end an answer before its token limit, after which no blocks would be sent.
_ENDINGS = ("stop", "stop_token_ids", "stop_sequences")


class Nixl(Transfer):
    """The KV transfer by vLLM's NIXL connector: the second leg (decode) is sent after the first leg's answer."""

    id = "nixl"
    name = "NIXL"
    compares: tuple[str, ...] = ALIKE

    def first_body(self, path: str, body: bytes) -> bytes | None:
        request = one_sequence(body, _FIELD)
        return None if request is None else orjson.dumps(one_token(path, request) | {_FIELD: _KEPT})

    def parameters(self, answer: bytes) -> bytes | None:
        given = _object(answer).get(_FIELD)
        # Without blocks there is nothing to fetch: the engine freed them already, or keeps none.
        if not isinstance(given, dict) or not given.get("do_remote_prefill") or not given.get("remote_block_ids"):
            return None
        return _members(given)

    def fetched_from(self, parameters: bytes) -> str:
        told = (json_object(b"{%b}" % parameters) or {}).get(_FIELD, {})
        return f"{told['remote_host']}:{told.get('remote_port')}" if told.get("remote_host") else ""


class Mooncake(MeetingTransfer):
    """The KV transfer by vLLM's Mooncake connector: both legs (prefill and decode) are sent at once."""

    id = "mooncake"
    name = "Mooncake"
    lease_seconds = 480.0  # VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT
    meets_at = 8998  # VLLM_MOONCAKE_BOOTSTRAP_PORT
    ids_path = "/query"
    compares = ("dtype", "kv_cache_dtype", "attention_backend")  # Mooncake itself does not compare these

    def first_body(self, path: str, body: bytes) -> bytes | None:
        request = one_sequence(body, _FIELD)
        if request is None:
            return None
        for name in _ENDINGS:
            request.pop(name, None)
        if path in (CHAT, COMPLETIONS):  # the other APIs have no such field
            request["ignore_eos"] = True
        return orjson.dumps(one_token(path, request))

    def meet(self, meeting: Meeting) -> tuple[bytes, bytes]:
        name = f"xfer-{secrets.token_hex(16)}"
        at = {"remote_bootstrap_addr": f"http://{bracketed(meeting.host)}:{meeting.port}"}
        fetched = {"do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": meeting.engine}
        return _members(_KEPT | {"transfer_id": name}), _members(fetched | at | {"transfer_id": name})

    def engine_ids(self, told: dict[str, Any]) -> dict[int, str]:
        return {
            int(rank): one["engine_id"]
            for rank, one in told.items()
            if rank.isdecimal() and isinstance(one, dict) and isinstance(one.get("engine_id"), str)
        }

    def parameters(self, answer: bytes) -> bytes | None:
        return b"{}" if _reached_its_limit(_object(answer)) else b""


class NixlUnchecked(Nixl):
    """NIXL between engines that do not compare their settings (vLLM's `enforce_handshake_compat: false`)."""

    id = "nixl-unchecked"
    name = "NIXL, unchecked"
    compares = ()


NIXL, NIXL_UNCHECKED, MOONCAKE = Nixl(), NixlUnchecked(), Mooncake()


def _object(answer: bytes) -> dict[str, Any]:
    told = json_object(answer)
    if told is None:
        raise ValueError("it is no JSON object")
    return told


def _members(given: dict[str, Any]) -> bytes:
    return b'"%b":%b' % (_FIELD.encode(), orjson.dumps(given))


def pull_from_peer(body: bytes, peer: str, id: str) -> bytes | None:
    """Return a client's body that also names an engine from which to fetch the KV cache of the prompt's beginning.

    Returns None if the body has transfer parameters already. `peer`: HOST:PORT of that engine's P2P side channel; `id`:
    unique to this fetch.

    This is for vLLM's offloading connector with the secondary tier `p2p`, read in the sources of 0.32
    (`v1/kv_offload/tiering/p2p/manager.py`). The engine that gets a request with a `remote_kv_source` asks that other
    engine, at its side channel (`VLLM_P2P_SIDE_CHANNEL_HOST`, `_PORT`), for blocks that are neither on its own GPU nor
    in its host memory. Blocks that the other engine lacks too are computed.
    """
    if f'"{_FIELD}"'.encode() in body:
        return None
    host, _, port = peer.rpartition(":")
    source = {"kv_request_id": id, "remote_host": host.strip("[]"), "remote_port": int(port)}
    return with_first(body, _members({"remote_kv_source": source}))


def _reached_its_limit(told: dict[str, Any]) -> bool:
    """Return whether an answer says that it ended at its token limit; `told`: a whole answer of any API, as JSON."""
    choices = told.get("choices")
    if isinstance(choices, list):
        return len(choices) == 1 and isinstance(choices[0], dict) and choices[0].get("finish_reason") == "length"
    return told.get("stop_reason") == "max_tokens" or told.get("status") == "incomplete"
