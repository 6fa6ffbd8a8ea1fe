"""One replica as the rest of the house sees it: where it is, what it serves, how it is."""

from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

from replicas.lifecycle import Event, State, follows
from replicas.metrics import Scrape


class EventSource(NamedTuple):
    """Where a replica publishes KV events; ZMQ endpoints one can connect to."""

    endpoint: str
    replay: str | None
    topic: str


class Address(NamedTuple):
    """A replica's URL taken apart; `source` and `model` come from its fragment, if any."""

    id: str
    url: str
    host: str
    port: int
    source: EventSource | None
    model: str | None


@dataclass(slots=True, eq=False)
class Replica:
    """Fields other than `state`, `reason` and `since` may be read at any time and are None (or
    empty) until the engine told them. Times are monotonic seconds."""

    id: str  # "host:port", the same for life
    url: str
    host: str
    port: int
    managed: bool = False  # launched by us
    state: State = State.STARTING
    reason: str = "not heard yet"
    since: float = 0.0  # when the state began
    incarnation: str = ""  # changes when the process behind the port does
    models: dict[str, str | None] = field(default_factory=dict)  # name -> base model of an adapter
    block_size: int | None = None
    num_blocks: int | None = None
    max_model_len: int | None = None
    version: str | None = None
    events: EventSource | None = None
    cached_tokens: bool | None = None  # usage reports cached tokens; learned from traffic
    pid: int | None = None
    restarts: int = 0
    scrape: Scrape | None = None  # the last /metrics, see `scrape.at`
    problems: tuple[str, ...] = ()  # what could not be learned, each with its remedy

    def apply(self, event: Event, reason: str, now: float) -> State | None:
        """Take `event`; returns the state before if the state changed, else None. The reason is
        kept up to date also where only it changes."""
        after = follows(self.state, event)
        if after is None:
            return None
        before, self.reason = self.state, reason
        if after is before:
            return None
        self.state, self.since = after, now
        return before


def parse_url(text: str) -> Address:
    """`http://host:port[#events=tcp://h:p,replay=tcp://h:p,topic=t,model=m]`, also without the
    scheme and with the `/v1` of an OpenAI base URL. Raises ValueError, saying what to write."""
    bare, _, fragment = text.strip().partition("#")
    parts = urlsplit(bare if "://" in bare else f"http://{bare}")
    hint = f"replica URL {text!r}: "
    if parts.scheme != "http":
        raise ValueError(hint + f"scheme {parts.scheme!r} is not supported, write http://HOST:PORT")
    try:
        host, port = parts.hostname, parts.port or 80
    except ValueError as error:
        raise ValueError(hint + f"{error}; write http://HOST:PORT") from None
    if not host:
        raise ValueError(hint + "no host in it, write http://HOST:PORT")
    if parts.path.rstrip("/") not in ("", "/v1") or parts.query:
        raise ValueError(hint + "engines are expected at the root, write http://HOST:PORT alone")
    name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    source, model = _fragment(fragment, hint)
    return Address(name, f"http://{name}", host, port, source, model)


def _fragment(text: str, hint: str) -> tuple[EventSource | None, str | None]:
    given: dict[str, str] = {}
    for item in filter(None, text.split(",")):
        key, _, value = item.partition("=")
        if key not in ("events", "replay", "topic", "model") or not value:
            raise ValueError(hint + f"{item!r} after # is none of events=, replay=, topic=, model=")
        given[key] = value
    for key in ("events", "replay"):
        if key in given and "://" not in given[key]:
            raise ValueError(hint + f"{key}={given[key]} must be a ZMQ endpoint like tcp://HOST:5557")
    if "events" not in given:
        if "replay" in given or "topic" in given:
            raise ValueError(hint + "replay= and topic= need events=tcp://HOST:PORT beside them")
        return None, given.get("model")
    source = EventSource(given["events"], given.get("replay"), given.get("topic", ""))
    return source, given.get("model")
