"""What TensorRT-LLM is told of the two legs of a request: `disaggregated_params`.

Read in the sources of its own disaggregated server (`tensorrt_llm/serve/openai_disagg_service.py`), which sends the
context leg first by default, as here. The context server computes the prompt and the first token, and answers with
parameters in its choice; they go into the generation leg with another `request_type`, and with the prompt's token ids,
which spare the second server the template. The id that both legs have is the gateway's: 63 bits of which the servers'
own ids are the small ones (below 2**42 in any version).
"""

from __future__ import annotations

import secrets

import orjson

from replicas.engines.transfer import CHAT, COMPLETIONS, Transfer, json_object

_FIELD = "disaggregated_params"
_LEAST_ID, _ABOVE_IDS = 1 << 42, 1 << 63
# Why a context server stops that leaves the answer to a generation server; else the first token was the whole answer.
_GOES_ON = ("length", "not_finished")


class DisaggregatedParams(Transfer):
    """One leg after the other."""

    id = "tensorrt-llm"
    name = "TensorRT-LLM's disaggregated_params"
    paths = (CHAT, COMPLETIONS)
    lease_seconds = 60.0  # of kv_transfer_timeout_ms

    def first_body(self, path: str, body: bytes) -> bytes | None:
        request = json_object(body)
        if request is None or _FIELD in request or request.get("n") not in (None, 1) or request.get("use_beam_search"):
            return None
        request.pop("stream_options", None)
        number = _LEAST_ID + secrets.randbelow(_ABOVE_IDS - _LEAST_ID)
        request |= {"stream": False, _FIELD: {"request_type": "context_only", "disagg_request_id": number}}
        return orjson.dumps(request)

    def parameters(self, answer: bytes) -> bytes | None:
        told = json_object(answer)
        if told is None:
            raise ValueError("it is no JSON object")
        choices = told.get("choices")
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if not isinstance(choice, dict):
            raise ValueError("it has not one choice")
        given = choice.get(_FIELD) or told.get(_FIELD)
        if not isinstance(given, dict) or given.get("ctx_request_id") is None:
            return None
        if choice.get("finish_reason") not in _GOES_ON:
            return b""
        fields = {_FIELD: given | {"request_type": "generation_only"}}
        if isinstance(ids := told.get("prompt_token_ids"), list) and ids and told.get("object") == "chat.completion":
            fields["prompt_token_ids"] = ids
        return orjson.dumps(fields)[1:-1]


TENSORRT_LLM = DisaggregatedParams()
