"""SGLang's KV events: batches like vLLM's, with pages in place of blocks.

A page is SGLang's unit of cache, of one or more tokens. Events are arrays or maps, without trailing empty fields. An
array may end with a map of further values, such as a salt. Keys are signed ints. Each page may come in an event of its
own, so events of consecutive pages are merged. With EAGLE the tokens of a page are pairs of a token and the next token.
"""

from array import array
from typing import Any

import msgspec

from replicas.engines.vllm.events import Decoder as ArraysAndMaps
from replicas.engines.vllm.events import Stored


class Decoder(ArraysAndMaps):
    """A decoder of SGLang's batches of KV events into the gateway's own records, `cachemap.events.records`."""

    def decode(self, payload: bytes) -> Any:
        batch = super().decode(payload)
        return batch._replace(events=_together(batch.events)) if len(batch.events) > 1 else batch

    def _stored(self, event: Stored) -> Any:
        salt = getattr(event, "cache_salt", None)
        if isinstance(event.lora_name, dict):  # arrays end with a map of the values that have no field
            told = event.lora_name
            event.lora_name, salt = _text(told.get("lora_name")), _text(told.get("cache_salt"))
        tokens: list[Any] = event.token_ids or []
        pairs = bool(tokens) and isinstance(tokens[0], tuple)
        if pairs:
            event.token_ids = [pair[0] for pair in tokens]
        stored = super()._stored(event)._replace(together=1, below=False)
        if salt and event.parent_block_hash is None and stored.keys:
            # Every event of a prompt has its salt, but only the first block needs it: all later keys depend on its key.
            stored = stored._replace(extra=[[salt], *[None] * (len(stored.keys) - 1)])
        return stored._replace(ahead=array("I", [pair[1] for pair in tokens]).tobytes()) if pairs else stored


def _text(packed: msgspec.Raw | None) -> str | None:
    return None if packed is None else msgspec.msgpack.decode(packed, type=str | None)


def _together(events: list[Any]) -> list[Any]:
    """Return the records of a batch, with the records of consecutive stored pages merged into one."""
    found: list[Any] = []
    keys: list[Any] = []
    tokens: list[bytes] = []
    ahead: list[bytes] = []

    def end() -> None:
        if len(tokens) > 1:
            found[-1] = found[-1]._replace(keys=keys, tokens=b"".join(tokens), ahead=b"".join(ahead))

    for event in events:
        follows = keys and getattr(event, "parent", None) == keys[-1] and event.tokens and not event.extra
        if follows and _of_one_kind(event, found[-1]):
            keys += event.keys
            tokens.append(event.tokens)
            ahead.append(event.ahead)
            continue
        end()
        found.append(event)
        chain = bool(getattr(event, "tokens", b""))
        chain = chain and not event.extra
        keys, tokens, ahead = ([*event.keys], [event.tokens], [event.ahead]) if chain else ([], [], [])
    end()
    return found


def _of_one_kind(one: Any, other: Any) -> bool:
    """Return whether two records of stored pages are equal except for their keys, parents, tokens and extra keys."""
    own = {name: getattr(other, name) for name in ("keys", "parent", "tokens", "extra", "ahead")}
    return bool(other == one._replace(**own))
