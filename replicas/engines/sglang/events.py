"""SGLang's cache events off the wire: batches as vLLM's, of pages instead of blocks.

Older versions write an event as an array, newer ones as a map; fields at the end that say nothing are left out. Keys
are signed. Each page may come in an event of its own, so those that follow on are put together. With EAGLE a page's
tokens are pairs, of each token and the next one.
"""

from array import array
from typing import Any

from replicas.engines.vllm.events import Decoder as ArraysAndMaps


class Decoder(ArraysAndMaps):
    """Decodes batches into the types in `records`."""

    def decode(self, payload: bytes) -> Any:
        batch = super().decode(payload)
        return batch._replace(events=_together(batch.events)) if len(batch.events) > 1 else batch

    def _stored(self, fields: dict[str, Any]) -> Any:
        tokens, salt = fields["token_ids"], fields.get("cache_salt")
        pairs = bool(tokens) and isinstance(tokens[0], list)
        if pairs:
            fields = {**fields, "token_ids": [pair[0] for pair in tokens]}
        if salt and fields["parent_block_hash"] is None:
            # told with every event of the prompt; what a prompt begins with covers it, and the chain carries it on
            fields = {**fields, "extra_keys": [[salt], *[None] * (len(fields["block_hashes"]) - 1)]}
        stored = super()._stored(fields)._replace(together=1, below=False)
        return stored._replace(ahead=array("I", [pair[1] for pair in tokens]).tobytes()) if pairs else stored


def _together(events: list[Any]) -> list[Any]:
    """The same with fewer events: a page's tokens come behind those of the page before it."""
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
        keys, tokens, ahead = (
            ([*event.keys], [event.tokens], [event.ahead]) if chain and not event.extra else ([], [], [])
        )
    end()
    return found


def _of_one_kind(one: Any, other: Any) -> bool:
    """Whether two records of stored pages say the same of all that is not told page by page."""
    return other == one._replace(
        keys=other.keys, parent=other.parent, tokens=other.tokens, extra=other.extra, ahead=other.ahead
    )
