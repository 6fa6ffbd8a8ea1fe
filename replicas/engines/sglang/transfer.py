"""What SGLang is told of the two legs of a request: a bootstrap room, in which its engines meet.

Read in the sources of SGLang (`srt/disaggregation`, `entrypoints/openai/protocol.py`) and of its own router
(`pd_router`). Both engines get the request with the same three fields, at the same time: the decoding engine reserves
room for the prompt and tells so at the prefill engine's bootstrap server; that computes the prompt, sends it there and
answers with its first token. A room is used once. What waits in one for an engine that does not come is given up after
300 s (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`, `..._WAITING_TIMEOUT`), unless its connection is closed before.

An engine is started for one role (`--disaggregation-mode`) and refuses a request without a room. Chats and completions
have the fields; its Responses and Messages have not. Several sequences get rooms of their own, counted on from the one
that is told. The prompt's cached tokens are passed on to the decoding engine, which tells them in its usage.
"""

from __future__ import annotations

import secrets

import orjson

from replicas.engines.transfer import CHAT, COMPLETIONS, Meeting, MeetingTransfer, json_object

ROOM = "bootstrap_room"
_ROOMS = 1 << 62  # of 63 bits, so that those of further sequences are within them as well


class Bootstrap(MeetingTransfer):
    """A room, both legs at once."""

    id = "sglang"
    name = "SGLang's bootstrap room"
    paths = (CHAT, COMPLETIONS)
    lease_seconds = 300.0
    takes_whole = False
    meets_at = 8998  # of --disaggregation-bootstrap-port

    def first_body(self, path: str, body: bytes) -> bytes | None:
        request = json_object(body)
        if request is None or ROOM in request:  # another gateway's leg
            return None
        request.pop("stream_options", None)
        return orjson.dumps(request | {"stream": False})

    def meet(self, meeting: Meeting) -> tuple[bytes, bytes]:
        told = {"bootstrap_host": meeting.host, "bootstrap_port": meeting.port, ROOM: secrets.randbelow(_ROOMS)}
        rank = {} if meeting.rank is None else {"disagg_prefill_dp_rank": meeting.rank}
        return orjson.dumps(told)[1:-1], orjson.dumps(told | rank)[1:-1]

    def parameters(self, answer: bytes) -> bytes | None:
        if json_object(answer) is None:
            raise ValueError("it is no JSON object")
        return b"{}"


BOOTSTRAP = Bootstrap()
