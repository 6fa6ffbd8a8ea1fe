"""Forwarding of token ids in place of a prompt's text, to replicas that were shown to make the same ids themselves.

An engine that is sent ids cannot notice that they are wrong. If the gateway's template or tokenizer differed from the
engine's, or the gateway had a bug, the engine would answer a prompt that nobody wrote. So ids are only forwarded after
the engine has confirmed them for such bodies, and confirmations are void once the gateway makes ids in another way.
Bodies are sorted into kinds, by their template, whether they have tools, and the shape of their content
(`prompt.forward.kind_of`).

- The first body of a kind only makes the kind known, since a kind that never comes again is not worth a check.
- Then 3 different bodies (`CONFIRMATIONS`) are sent to a replica as received. Once one is answered, it is checked: the
  gateway sends it again, but asks for one token and for the ids that the replica makes of the prompt. These must equal
  the gateway's. The prompt is cached by then, so the replica only has to render it.
- From then on bodies of that kind are forwarded as ids, except one in 100 (`CHECK_EVERY`), which is sent as received
  and checked.
- Any usage that an engine reports must count as many prompt tokens as the gateway did.

The first difference ends forwarding for the whole model, on all replicas: its cause cannot be seen from here, and a
fault of the gateway concerns every replica. Forwarding begins again, with nothing confirmed, once the replica that
differed is removed or is another process.

There are two exceptions. If the client steers the rendering of the body, for instance by template variables, the
difference ends forwarding for that kind of body only. A body that belongs to no kind is never forwarded, and a
difference in it ends nothing: every kind was confirmed by itself, and one client's bodies must not end forwarding for
all.

A replica that does not accept ids, or does not report the ids that it makes, gets text at that path until it is another
process.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from time import monotonic
from typing import TYPE_CHECKING

import aiohttp
from xxhash import xxh3_64_intdigest

from replicas.access import session_to

from ...prompt.forward import with_ids
from ..backend import Backend
from ..exchange import Attempt, Exchange
from ..outgoing import Outgoing
from . import token_ids
from .token_ids import BodyKind, Different, Forwarding, Unanswered

if TYPE_CHECKING:
    from ...http.messages import Request
    from ...ops.metrics import Metrics
    from ...prompt import Prompt
    from ..responses.usage import Usage

log = logging.getLogger("hitherto.proxy")


# A callback for a replica whose tokens of a prompt differ from the gateway's: the replica's id, the prompt, the body
# (b"" once that is freed), and how the tokens differ.
MadeOtherwise = Callable[[str, "Prompt", bytes, str], None]
# A callback for a replica that reports as many tokens as the gateway made, for a kind of prompt that was miscounted.
MadeAlike = Callable[[str, "Prompt"], None]


class TokenIdForwarding:
    """The choice between sending a prompt's text and sending its token ids, with the checks that ids depend on."""

    def __init__(
        self,
        metrics: Metrics,
        wanted: bool,
        backends: Mapping[str, Backend],
        made_by: Callable[[str], int],
        made_otherwise: MadeOtherwise,
        made_alike: MadeAlike,
    ):
        """Create the state, in which no replica was shown to make the same token ids as the gateway.

        `wanted`: False to forward no ids at all.
        `made_by(replica)`: returns the number of the way (tokenizer, template) in which ids are now made for a replica.
            Confirmations under another number are void.
        `made_otherwise`, `made_alike`: called for a replica whose prompt tokens differ from the gateway's, or agree
            with them again.
        """
        self.metrics, self.wanted, self._backends, self._made_by = metrics, wanted, backends, made_by
        self.made_otherwise, self.made_alike = made_otherwise, made_alike
        self._differed: dict[str, tuple[Forwarding, str]] = {}  # replica -> its process that made other ids, and how
        # (number of the way of making ids, path, kind of body) -> the replica that made other ids, and its process
        self._stopped: dict[tuple[int, str, str], tuple[str, Forwarding]] = {}
        self._may_warn_at = 0.0

    def before_send(self, exchange: Exchange, attempt: Attempt, outgoing: Outgoing) -> None:
        """Write the prompt's token ids into a long request in place of its text, if its replica is known to make them.

        With token ids, `attempt.sent_ids` is set. The prompt's ids are freed unless the body may be checked after its
        answer: they are as large as the body, and the answer may take minutes. Only a request's first attempt has ids;
        later ones get the body as received.
        """
        backend, prompt = attempt.backend, attempt.prompt
        if prompt is None or not prompt.kind or attempt.body is not None:
            return
        if prompt.also is not None:
            prompt.also.forget_ids()
        if not self.wanted:
            prompt.forget_ids()
            return
        kind = None
        if not self._off(backend, prompt) and prompt.path not in (known := self._known(backend)).rejected_because:
            kind = known.seen(prompt.path, prompt.kind)
        if (
            kind is not None
            and not (exchange.tried or attempt.without_ids)
            and self._may_forward(attempt, prompt, kind)
            and (spliced := with_ids(outgoing.body, prompt, backend.replica.dialect.chat_token_ids)) is not None
        ):
            kind.left -= 1
            attempt.send_ids()
            outgoing.body = spliced
        if attempt.sent_ids or kind is None or not self._wants_check(backend, known, kind, prompt):
            prompt.forget_ids()
        self.metrics.long_prompts.inc(backend.id, "ids" if attempt.sent_ids else "text")

    def settled(self, attempt: Attempt, prompt: Prompt, request: Request, usage: Usage) -> None:
        """Compare the prompt tokens that a complete answer reports with the gateway's; begin a check if one is due.

        The answer has status 200. If the numbers differ, forwarding of ids ends. The check asks the replica which ids
        it makes of the request's body, and runs in the background.
        """
        backend = attempt.backend
        if not self.wanted or prompt.path not in token_ids.PATHS:
            return
        if attempt.without_ids:
            self._reject(backend, prompt.path, "it refused a request with ids that it answered without")
        elif usage.prompt != prompt.tokens and usage.prompt is not None:
            # An engine that truncates differently may have the same tokenizer.
            shows = prompt.mode == "exact" and not (prompt.several or prompt.cut)
            if shows and backend.id not in self._differed and not self._outdated(backend, prompt):
                counted = f"its usage says {usage.prompt} tokens of a prompt that has {prompt.tokens} here"
                self._differ(backend, prompt, counted)
        if prompt.kind and prompt.token_ids:
            known = self._known(backend)
            kind = known.kinds.get((prompt.path, prompt.kind))
            if kind is not None and self._wants_check(backend, known, kind, prompt):
                given = None if b"authorization" in backend.hidden else request.header(b"authorization")
                ours = {**backend.replica.headers, **backend.replica.credentials}
                headers = {**({"authorization": given} if given else {}), **ours}
                known.checking = asyncio.create_task(self._check(backend, prompt, request.body, headers))

    def _may_forward(self, attempt: Attempt, prompt: Prompt, kind: BodyKind) -> bool:
        """Return whether a prompt may be sent as token ids.

        It may if three conditions hold. Bodies of its kind are confirmed, and the next check of that kind is not due
        yet. Its ids were made in the present way. Prompt and answer fit in the replica's context.
        """
        if kind.left <= 0 or not prompt.token_ids or self._outdated(attempt.backend, prompt):
            return False
        # If a request exceeds its context, an engine that is given text refuses it; given ids, it shortens the answer.
        limit = attempt.backend.replica.max_model_len
        return limit is not None and prompt.tokens + max(1, prompt.max_tokens or 1) <= limit

    def _wants_check(self, backend: Backend, known: Forwarding, kind: BodyKind, prompt: Prompt) -> bool:
        """Return whether to check, once a body is answered, that the replica makes the same ids of it as the gateway.

        Only bodies that are sent as received are checked. A replica has one check at a time.
        """
        if (
            known.checking is not None
            or prompt.path in known.rejected_because
            or monotonic() < kind.pause
            or self._off(backend, prompt)
            or self._outdated(backend, prompt)
        ):
            return False
        if len(kind.bodies) >= token_ids.CONFIRMATIONS:
            return not kind.left
        return xxh3_64_intdigest(prompt.token_ids) not in kind.bodies

    async def _check(self, backend: Backend, prompt: Prompt, body: bytes, headers: dict[str, str]) -> None:
        """Ask a replica for the token ids that it makes of a body, and compare them with the gateway's.

        If they are the same, that counts for bodies of this kind; if not, forwarding of ids ends.
        """
        known, path, ids = self._known(backend), prompt.path, prompt.token_ids
        try:
            replica, timeout = backend.replica, aiohttp.ClientTimeout(token_ids.ANSWER_SECONDS)
            async with session_to(
                replica.address, replica.tls, base_url=replica.url, headers=headers, timeout=timeout
            ) as session:
                why = await token_ids.check_ids(token_ids.poster(session), path, body, ids)
                if not why and path not in known.accepts:
                    why = await token_ids.takes_ids(
                        token_ids.poster(session), path, prompt.model, ids[:4], replica.dialect.chat_token_ids
                    )
        except Unanswered as error:
            if (kind := known.kinds.get((path, prompt.kind))) is not None:
                kind.pause = monotonic() + token_ids.PAUSE_SECONDS
            self.metrics.token_id_checks.inc(backend.id, "unanswered")
            log.info("replica %s: whether it makes the same token ids is not known yet: %s", backend.id, error)
            return
        except Different as error:
            if not backend.gone and known is backend.forwarding and not self._outdated(backend, prompt):
                self.metrics.token_id_checks.inc(backend.id, "different")
                self._differ(
                    backend,
                    prompt,
                    f"{error} ({prompt.kind}): another tokenizer or chat template, or a mistake of the gateway's",
                )
                self.made_otherwise(backend.id, prompt, body, str(error))
            return
        finally:
            known.checking = None
        unused = backend.gone or known is not backend.forwarding or self._outdated(backend, prompt)
        if unused or self._off(backend, prompt) or path in known.rejected_because:
            return
        if why:
            self._reject(backend, path, why)
            return
        known.accepts.add(path)
        self.metrics.token_id_checks.inc(backend.id, "same")
        self._confirmed(backend, known, prompt)

    def _confirmed(self, backend: Backend, known: Forwarding, prompt: Prompt) -> None:
        """Note that a replica made the same ids of a prompt as the gateway.

        After `CONFIRMATIONS` (3) different prompts, bodies of their kind are forwarded as ids.
        """
        kind = known.kinds.get((prompt.path, prompt.kind))
        if kind is None:  # the kind was dropped meanwhile
            return
        if len(kind.bodies) < token_ids.CONFIRMATIONS:
            kind.bodies.add(xxh3_64_intdigest(prompt.token_ids))
            if len(kind.bodies) < token_ids.CONFIRMATIONS:
                return
            log.info("replica %s gets token ids at %s from now on: %s", backend.id, prompt.path, prompt.kind)
            backend.replica.takes_ids = known.says()
        kind.left = token_ids.CHECK_EVERY - 1

    def _outdated(self, backend: Backend, prompt: Prompt) -> bool:
        """Return whether a prompt's ids were made in a way that is no longer used for this replica."""
        return prompt.made_by != self._made_by(backend.id)

    def _known(self, backend: Backend) -> Forwarding:
        """Return the state of the replica's present process.

        Confirmations of ids that were made in another way than now are removed from it first.
        """
        known, made_by = backend.forwarding, self._made_by(backend.id)
        if known.incarnation != backend.incarnation:
            known = process_of(backend)
        if known.made_by != made_by:
            known.made_by = made_by
            if known.kinds:
                known.kinds.clear()
                if not self._differed:
                    backend.replica.takes_ids = known.says()
        return known

    def look(self) -> None:
        """Allow forwarding of ids again once the replicas that made other ids are removed, or are new processes."""
        for stopped in [key for key, (id, known) in self._stopped.items() if self._is_gone(id, known)]:
            del self._stopped[stopped]
        gone = [id for id, (known, _) in self._differed.items() if self._is_gone(id, known)]
        for id in gone:
            del self._differed[id]
        if gone and not self._differed:
            log.info("token ids may be forwarded again: the replicas that made others are gone")
            for backend in self._backends.values():
                backend.replica.takes_ids = process_of(backend).says()

    def _is_gone(self, id: str, known: Forwarding) -> bool:
        return (one := self._backends.get(id)) is None or process_of(one) is not known

    def _off(self, backend: Backend, prompt: Prompt) -> bool:
        """Return whether forwarding of ids has ended, for a replica's model or for this kind of body.

        It ends when any replica has made other ids than the gateway.
        """
        if self._stopped and (prompt.made_by, prompt.path, prompt.kind) in self._stopped:
            return True
        return bool(self._differed) and any(
            (one := self._backends.get(id)) is not None and one.candidate.space == backend.candidate.space
            for id in self._differed
        )

    def _differ(self, backend: Backend, prompt: Prompt, why: str) -> None:
        """End forwarding of ids, because a replica made other ids of a prompt than the gateway.

        It ends for all replicas whose prompts the gateway tokenizes in the same way. If the client's options steer the
        rendering of the body, it ends for the body's kind only. If the body belongs to no kind, nothing ends.

        `why`: the difference in words.
        """
        if backend.id in self._differed:
            return
        if prompt.steered is not None:
            if prompt.steered:
                self._stop(backend, prompt, prompt.steered, why)
            return
        known, path = self._known(backend), prompt.path
        self._differed[backend.id] = known, why
        self.metrics.ids_refused.inc(backend.id)
        log.error("no replica of this model gets token ids from now on, all prompts go as text: replica %s, %s: %s. "
                  "Compare --model and --chat-template with the engine's (`hitherto doctor` does); it begins again "
                  "when another process is behind that replica", backend.id, path, why)  # fmt: skip
        for one in self._alike(backend):
            process_of(one).kinds.clear()
            one.replica.takes_ids = f"{path}: no, {why if one is backend else f'replica {backend.id} makes other ids'}"

    def _stop(self, backend: Backend, prompt: Prompt, kind: str, why: str) -> None:
        """End forwarding of ids for one kind of body, to all replicas whose prompts are tokenized in the same way."""
        now = monotonic()
        key = prompt.made_by, prompt.path, kind
        if key in self._stopped:
            return
        if now >= self._may_warn_at:  # clients can create any number of kinds
            self._may_warn_at = now + token_ids.PAUSE_SECONDS
            log.warning("no replica gets the token ids of these bodies from now on, they go as text: %s. Replica %s, %s: "
                        "%s. Bodies whose clients steer the rendering in another way, or not at all, are not held back",
                        kind, backend.id, prompt.path, why)  # fmt: skip
        self._stopped[key] = backend.id, self._known(backend)
        if len(self._stopped) > token_ids.MOST_KINDS:
            del self._stopped[next(iter(self._stopped))]
        for one in self._alike(backend):
            forgotten = process_of(one).kinds.pop((prompt.path, kind), None)
            if forgotten is not None and not self._differed:
                one.replica.takes_ids = process_of(one).says()

    def _alike(self, backend: Backend) -> list[Backend]:
        """Return the replicas whose prompts the gateway tokenizes in the same way as this one's, this one included."""
        return [one for one in self._backends.values() if one.candidate.space == backend.candidate.space]

    def _reject(self, backend: Backend, path: str, why: str) -> None:
        """End forwarding of ids at one path for this replica's process, as it accepts no ids there or reports none."""
        known = process_of(backend)
        if path not in known.rejected_because:
            known.kinds = {key: kind for key, kind in known.kinds.items() if key[0] != path}
            known.rejected_because[path] = why
            backend.replica.takes_ids = known.says()
            self.metrics.ids_refused.inc(backend.id)
            log.warning("replica %s gets prompts at %s as text from now on: %s", backend.id, path, why)


def process_of(backend: Backend) -> Forwarding:
    """Return the forwarding state of the replica's present process, a new one if the process has changed."""
    known = backend.forwarding
    if known.incarnation != backend.incarnation:
        known = backend.forwarding = Forwarding(backend.incarnation)
        backend.replica.takes_ids = known.says()
    return known
