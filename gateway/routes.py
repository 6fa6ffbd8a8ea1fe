"""The mapping from a request's model name to the spaces for which the request is prepared.

A space is one format of prompts (tokenizer, template, block size), with the replicas that take it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from time import perf_counter

from replicas import TAKES_TRAFFIC
from replicas.served import base_names, count_models, marks

from .prompt import Prompt
from .prompt.api.openai import UNKNOWN_CONTEXT, parse
from .prompt.offload import TakesLong, event_loop
from .prompt.pipeline import Refusal
from .spaces import Member, ModelSpace

# Variants (formats of prompts) of a model for which a request is prepared; replicas of a third are chosen by load
MOST_VARIANTS = 2


class Routes:
    """An immutable mapping from model names to spaces (formats of prompts).

    A new mapping is made when replicas change. A request that is being prepared in a thread keeps the mapping that it
    began with.

    `contexts`: by model name, the context lengths in tokens of its replicas, ascending. Replicas that take no traffic
        now are included, since a request that fits only them has to wait for them.
    `models`: the names of the base models if there are several. It is empty if a request without a model name can mean
        only one model.
    """

    def __init__(self, spaces: Sequence[ModelSpace], members: Collection[Member]):
        of_spaces = [one for one in members if one.space is not None]
        taking = [one for one in of_spaces if one.replica.state in TAKES_TRAFFIC]
        away = [one for one in of_spaces if one.replica.state not in TAKES_TRAFFIC]
        counts = Counter((name, one.space) for one in taking for name in (None, *(one.replica.models or ("",))))
        routes: dict[str | None, list[ModelSpace]] = {None: []}
        for (name, space), _ in sorted(counts.items(), key=lambda item: (-item[1], item[0][1].number)):
            routes.setdefault(name, []).append(space)
        _add_away(routes, away)
        of_all = {found: _contexts(found, spaces) for found in {(*found,) for found in routes.values()}}
        self.contexts = {name: of_all[(*found,)] for name, found in routes.items()}
        self.models = () if "" in routes else _unlike(of_spaces)
        self._mixed = len(self.contexts[None]) > 1
        self._longest = max((space.context or 0 for space in spaces), default=0) or UNKNOWN_CONTEXT
        # The spaces of a model, the one with most replicas first. There is none if all replicas have reported the names
        # that they serve, and none serves this one.
        self._by_name = {name: (*found[:MOST_VARIANTS],) for name, found in routes.items() if name}
        self._of_any = (*(routes.get("") or routes[None])[:MOST_VARIANTS],) or (spaces[0],)
        self._of_unknown = self._of_any if "" in routes or len(routes) == 1 else ()

    def prepare(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str] | None,
        adapters: Collection[str],
        refusal: Refusal | None = None,
    ) -> Prompt:
        """Prepare a request for each variant of its model, and return its prompt with token ids and block hashes.

        The attribute `also` of the result holds the prompt for the second variant. May run in a thread. `adapters`: the
        names of known LoRA adapters. `refusal`: called with the parsed request; an error that it returns is raised.
        Raises ApiError for a request that cannot be prepared, and TakesLong if that would hold the event loop up for
        too long.
        """
        request, unusual = parse(body, self._longest)
        if refusal is not None and (error := refusal(request)) is not None:
            raise error
        model = request.get("model")
        spaces = self._by_name.get(model, self._of_unknown) if type(model) is str and model else self._of_any
        if not spaces:  # any space would have another model's files and context
            stream = request.get("stream") is True
            return Prompt(path, model, stream=stream, mode="load", note="no replica is known to serve its model")
        prompt = spaces[0].pipeline.prepare_parsed(path, body, request, unusual, headers, adapters)
        for other in spaces[1:]:
            if event_loop.holds and perf_counter() > event_loop.until:
                raise TakesLong
            prompt.accompany(other.pipeline.prepare_parsed(path, body, request, unusual, headers, adapters))
        return prompt

    def differ_in_context(self, model: str | None) -> bool:
        """Return whether the replicas that serve this model name have contexts of different lengths."""
        return self._mixed and len(self.contexts.get(model) or self.contexts[None]) > 1


def _add_away(routes: dict[str | None, list[ModelSpace]], away: Iterable[Member]) -> None:
    """Add to `routes` the model names that are served only by replicas without traffic (`away`).

    Requests for such a name wait for one of these replicas, and are prepared with its model's files and context.
    """
    if "" in routes:
        return  # a replica that reports no names takes requests for any
    waiting: dict[str | None, list[ModelSpace]] = {}
    for member in away:
        for name in member.served - routes.keys():
            spaces = waiting.setdefault(name, [])
            if member.space is not None and member.space not in spaces:
                spaces.append(member.space)
    routes.update(waiting)


def _unlike(members: Iterable[Member]) -> tuple[str, ...]:
    """Return the sorted names of the base models if the replicas serve several models, or () if they serve one.

    Two names belong to one model if one replica serves both, or if the replicas that serve them have the same root
    folder or the same model files. Adapters and aliases are therefore not counted as models.
    """
    marked: list[set[object]] = []
    names: set[str] = set()
    for member in members:
        replica, space = member.replica, member.space
        served = frozenset(replica.models) or member.served
        if not served:
            continue
        found = marks(served, replica.root)
        if space is not None and space.format.source is not None:
            found.add(space)
        marked.append(found)
        names.update(base_names(replica.models) or served)
    return (*sorted(names),) if count_models(marked) > 1 else ()


def _contexts(found: Collection[ModelSpace], spaces: Iterable[ModelSpace]) -> tuple[int, ...]:
    """Return the sorted distinct context lengths, in tokens, of all replicas of the models that `found` belongs to.

    `spaces`: all spaces, so that every variant of these models is included.
    """
    names = {name for space in found for name in space.names}
    related = [space for space in spaces if space in found or space.names & names]
    return (*sorted({one.context for space in related for one in space.members.values() if one.context}),)
