"""The steps of a request in this gateway, from the client's last byte to the last byte of the answer, top to bottom.

An `Exchange` is one client's request, an `Attempt` one try to have a replica answer it. `Downstream` (http/), the
client's connection, calls `handle`. Each step, and where its work is done:

    handle           authenticate the API key, check the path, create the `Exchange`   door.py, tenants/
    (preparation)    parse the body, render the prompt, tokenize, hash its blocks      preparation.py, prompt/
    place            wait for room, choose a replica (or two), reserve load on it      admission/, placement/, disagg/,
                                                                                       policies/
    start, _send     get a connection, write head and body to the replica              backend.py, exactness/, http/
    hand_over        after the first of two legs (prefill, decode): send the second    disagg/
    head, on_body    decide by the answer's head and first bytes if the client         responses/
                     gets this answer
    relay            write these to the client; `Attempt.data` writes the later ones   exchange.py
    join             the same for an answer that continues another replica's stream    resume/
    on_complete      end the attempt after the answer's last byte
    settle           release the load; after an answer without an error, learn costs   settling.py, policies/
                     from it; update metrics, call the `on_end` hooks                  observers/, tenants/

`Deadlines` (failures/deadlines.py) looks at all requests a few times a second. proxy.py lists the hooks of each phase.

An error that a replica answers with is recorded by the `Judge` (responses/judge.py), by the rules in failures/blame.py.
If a retry and a replica are left, the attempt fails; otherwise the client gets this answer like any other. A failed
attempt, also one whose connection closed (`Attempt.lost`), goes to `Failures` (failures/actions.py). As long as no byte
of its answer is relayed, `retries.after` (failures/) decides what follows: another attempt (`place`, `start`), or an
error to the client (`answer_error`). A stream that breaks later is cut (`cut`). With --continue-streams,
`Resumer.event_after` (resume/) may have another replica continue it (`resume`, then `place`, `start` and `join`), and
`give_up` ends it if none does. Every exchange ends in `Settling.ended`.

A step that has a result calls `Exchange.happened` with an event. The tables in `states` give the exchange's next state
and the next action, a method of `Handler` or `Failures`. All modules read the fields of exchanges and attempts, and
only the methods of these classes and of their subclasses, named after what has happened, assign them. The first leg has
an attempt of the subclass `PrefillAttempt` (disagg/), a metered answer a `MeteredAttempt`, and a stream that can be
resumed a `ResumableAttempt` (resume/); these have methods `data` and `end` of their own. One `Handler` serves all
requests, and its only state for a request is that it is under way.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from time import monotonic
from typing import TYPE_CHECKING, Any

from ..errors import MESSAGES, ApiError
from ..http.chunks import ChunkDecodingSink
from ..http.downstream import Downstream
from ..http.messages import Request
from ..http.upstream import Upstream, UpstreamError
from ..prompt.prompt import PROMPT_PATHS
from .admission.priorities import encoding_refusal
from .disagg.legs import second_leg
from .door import Door, refusal_of_coding
from .exchange import NO_BUFFERING, Attempt, Exchange
from .failures import retries
from .failures.actions import Failures
from .outgoing import BeforeSend, Outgoing
from .placement.placing import Placing
from .preparation import Preparation
from .responses.answers import ERROR_MARK, ERROR_WITHIN, MEMBERS, MOST_HELD_BACK, Sight
from .responses.judge import Judge
from .responses.respelling import respelled
from .responses.stored import PATH as RESPONSES
from .responses.stored import Responses, referred_to
from .resume.resumer import Resumer, rest_error
from .settling import Settling, cut_short
from .states import TRANSITIONS, AttemptEvent, AttemptState, ExchangeEvent, ExchangeState

if TYPE_CHECKING:
    from ..ops.metrics import Metrics
    from ..tenants.tenant import Tenant
    from .observers.traces import Traces

AWAITING, ANSWERING, ANSWERED, FINISHED = (
    AttemptState.AWAITING,
    AttemptState.ANSWERING,
    ExchangeEvent.ANSWERED,
    ExchangeEvent.FINISHED,
)
ATTEMPT_FINISHED = AttemptEvent.FINISHED


class Handler:
    """The actions that follow the events of requests, for all requests; those after failures are in `Failures`.

    The table in `states` says which action follows. `Exchange.happened` looks it up and calls it.
    """

    def __init__(
        self, door: Door, preparation: Preparation, placing: Placing, settling: Settling, responses: Responses,
        metrics: Metrics, resumer: Resumer | None, *, retries: int, traces: Traces | None, metered: bool, names_replica: bool, tells_cached: bool,
    ):  # fmt: skip
        """Create a handler.

        `resumer`: with --continue-streams.
        `retries`: the number of retries per request.
        `traces`: tracing; None if it is off.
        `metered`: count the tokens of all answers, for the usage log; otherwise only of answers to tenants.
        `names_replica`: add the response header `x-hitherto-replica`, with the replica's id.
        `tells_cached`: add the response header `x-hitherto-cached-tokens`, with the number of prompt tokens that the
            replica was predicted to have in its KV cache.
        """
        self.door, self._preparation, self.placing, self.settling, self.resumer = (
            door,
            preparation,
            placing,
            settling,
            resumer,
        )
        self._responses, self._traces, self._metered = responses, traces, metered
        self._names_replica, self._tells_cached = names_replica, tells_cached
        # With service classes or limits: returns the header line that says how an answer was degraded, else b"".
        self.note: Callable[[Exchange, Attempt], bytes] | None = None
        self.before_send: list[BeforeSend] = []  # called in order for each attempt, before its request is sent
        # Whether a hook writes priorities. A JSON body that is not in UTF-8 is then refused, as none can go into it.
        self.writes_priorities = False
        self.under_way: set[Exchange] = set()
        self._ids = map(f"{os.urandom(6).hex()}-%x".__mod__, itertools.count(1))
        self.judge = Judge(placing.eligible, settling, retries)
        self.failures = Failures(
            placing, settling, self.judge, metrics, self.under_way, self.start, resumer,
            retries=retries, discreet=door.keys is not None,
        )  # fmt: skip
        # (state, event) -> (next state, action), for `Exchange.happened`
        actors = {"Handler": self, "Failures": self.failures}
        self.steps = {
            pair: (state, getattr(actors[actor], method))
            for pair, (state, action) in TRANSITIONS.items()
            for actor, _, method in [action.partition(".")]
        }

    def handle(self, client: Downstream, request: Request) -> None:
        """Process a request that was just received completely; this returns before a replica has answered.

        A request for one of the gateway's own paths, such as `/v1/models`, is answered at once. Any other gets an
        `Exchange`, which is then refused or passed to `Preparation`.
        """
        path, door = request.path, self.door
        label = PROMPT_PATHS.get(path)
        has_prompt = label is not None and request.method == "POST"
        tenant = None if door.keys is None else door.tenant_of(client, request)
        if not has_prompt and not isinstance(tenant, ApiError):
            if door.is_known_without_slash(path):
                return self._redirect(client, request, tenant)
            if (answer := door.answer_to(request, tenant)) is not None:
                return answer(client, request, tenant)
        exchange = client.exchange = self._begin(client, request, label or "other")
        if self._metered:
            exchange.meter()
        if path.startswith(RESPONSES):
            exchange.refer_to(referred_to(request))
        error = None if tenant is None else door.refusal_of_tenant(exchange, tenant)
        if error is None and self.writes_priorities:
            error = encoding_refusal(request)
        if error is None and has_prompt and b"content-encoding" in request.named:
            error = refusal_of_coding(request)
        if error is None and (not has_prompt or door.draining):
            error = door.refusal(path, request.method, exchange.tenant)
        if error is not None:
            exchange.refused(error)
        elif has_prompt:
            self._preparation.begin(exchange)
        else:
            self._preparation.begin_other(exchange)

    def _begin(self, client: Downstream, request: Request, label: str) -> Exchange:
        """Create an exchange and add it to those under way; begin its trace if tracing is on.

        `label`: the name of its API in metrics.
        """
        id = request.named.get(b"x-request-id") or next(self._ids).encode()
        exchange = Exchange(self, client, request, id, label)
        if self._traces is not None:
            self._traces.begin(exchange)
        self.under_way.add(exchange)
        return exchange

    def _redirect(self, client: Downstream, request: Request, tenant: Tenant | None) -> None:
        """Answer 307 with the path without its trailing slash, as vLLM does; the client repeats the request there."""
        path, mark, query = request.target.partition(b"?")
        exchange = self._begin(client, request, "other")
        self.under_way.discard(exchange)
        if tenant is not None:
            exchange.belong_to(tenant)
        exchange.answered_by_gateway(307)
        self.settling.ended(exchange, "complete")
        client.reply(307, b"", [(b"location", path.rstrip(b"/") + mark + query)])

    # --- a replica is found

    def place(self, exchange: Exchange, placed: list[Exchange] | None) -> None:
        """Have a replica chosen for a prepared request, at once or after a wait in the queue.

        With --continue-streams, a stream that can be resumed also gets the record from which another replica does that.

        `placed`: for a request of a batch, the list that `Placing.place` adds it to.
        """
        if self.resumer is not None and exchange.stream_record is None:
            self.resumer.begin(exchange)
        self.placing.place(exchange, placed)

    def start(self, exchange: Exchange, attempt: Attempt | None = None) -> None:
        """Send an attempt's request on an idle connection to its replica; without one, open a connection first.

        `attempt`: None for the exchange's last attempt. If that is a second leg (decode) that runs at the same time as
        its first leg (prefill), both legs are sent, the first one first.
        """
        if attempt is None:
            attempt = exchange.attempts[-1]
            if exchange.retries_for:
                self.failures.sent_again(exchange)
            if attempt.leg is not None and (legs := exchange.legs) is not None and legs.first is not None:
                first = exchange.attempts[-2]
                if first is legs.first:  # otherwise the first leg is under way already
                    self.start(exchange, first)
        if self._traces is not None:
            self._traces.attempt(exchange, attempt)
        # A repetition after the replica closed an idle connection: it may have closed the others in the pool, too.
        upstream = None if attempt.new_connection else attempt.backend.pool.acquire()
        if upstream is not None:
            self._send(exchange, attempt, upstream)
        else:
            attempt.backend.connect(attempt)

    def _send(self, exchange: Exchange, attempt: Attempt, upstream: Upstream) -> None:
        """Write a request's head and body to a connection, whose response then goes to `attempt`.

        The body is the client's, or that of a leg. The hooks in `before_send` change the body or add header lines:
        token ids in place of the text, what is needed to resume a stream, the priority of a class, the trace context.
        """
        attempt.send_on(upstream)
        request, backend = exchange.request, attempt.backend
        # The request's id is always written: the engine must get the id that is logged and returned to the client, even
        # if the client names `x-request-id` in its `Connection` header, so that this header is not forwarded.
        lines = b"%bx-request-id: %b\r\n%b" % (backend.host_line, exchange.id, attempt.lines)
        outgoing = Outgoing(request.body if attempt.body is None else attempt.body, lines, backend.not_forwarded)
        for write in self.before_send:
            write(exchange, attempt, outgoing)
        head = request.forwarded(outgoing.lines, outgoing.left_out, len(outgoing.body))
        sink = ChunkDecodingSink(attempt) if request.http10 else attempt
        upstream.send(sink, head, outgoing.body, request.method == "HEAD")

    def hand_over(self, exchange: Exchange, _: Any) -> None:
        """Account for a complete first leg (prefill), then send the second one (decode).

        The second leg's engine fetches the prompt's KV cache from the first leg's engine.
        """
        first, legs = exchange.attempts[-1], exchange.legs
        assert legs is not None
        self.settling.handed_over(exchange, first, legs)
        first.forget_body()
        second_leg(exchange, monotonic())
        self.start(exchange)

    # --- called for an attempt's upstream connection

    def connected(self, attempt: Attempt, upstream: Upstream) -> None:
        """Send the attempt's request on a connection that was just opened.

        If the attempt has ended meanwhile, the connection is given to its pool for other requests. If the replica has
        another address by now, the request is sent on a connection to that address.
        """
        exchange = attempt.exchange
        if attempt.state is AttemptState.CONNECTING and upstream.pool is attempt.backend.pool:
            exchange.run_isolated(self._send, exchange, attempt, upstream)
            return
        upstream.pool.release(upstream)
        if attempt.state is AttemptState.CONNECTING:  # the connection is to the replica's old address
            exchange.run_isolated(self.start, exchange, attempt)

    def head(self, attempt: Attempt, content_type: bytes, body: bytes) -> None:
        """Check the head of an answer; fail the attempt if the client must not get it, else go on to its body.

        The head is not relayed yet, since engines send it before the prefill. As long as the client has nothing,
        another replica can still answer.

        `content_type`: in lower case.
        `body`: the bytes that came with the head.
        """
        exchange, error = attempt.exchange, None
        if attempt.status != 200 or not (attempt.streams or content_type.startswith(b"application/json")):
            error = self.judge.head(exchange, attempt, content_type)
        opened = exchange.opened
        if error is None and (opened is not None or exchange.state is ExchangeState.RESUMING):
            error = rest_error(attempt, opened)
        if error is not None:
            self.failures.failed(attempt, error)
        elif body:
            self.on_body(attempt, body)

    def on_body(self, attempt: Attempt, data: bytes, whole: bool = False) -> None:
        """Check the first bytes of an answer's body: relay them, hold them back, or fail the attempt.

        They are held back in `attempt.withheld` while there are too few to tell an answer from an error.

        `data`: the bytes that came after those held back.
        `whole`: whether the body is complete with them.
        """
        exchange, held_back, error = attempt.exchange, attempt.withheld, None
        path = exchange.request.path
        if held_back:
            data = held_back + data
        if attempt.status == 200 and exchange.prompt is not None:
            # For nearly all non-streamed answers two searches show that they begin without an error. Only the others,
            # and streams, are passed to the judge.
            if (
                held_back
                or attempt.streams
                or data.find(MEMBERS.get(exchange.label, b"")) < 0
                or data.find(ERROR_MARK, 0, ERROR_WITHIN) >= 0
            ):
                found = self.judge.first_bytes(exchange, attempt, data, len(held_back), whole)
                if found is Sight.EARLY:
                    attempt.hold_back(data)
                    return
                if found is Sight.BLIND:
                    attempt.answer(shows_output=False)
                    exchange.happened(ANSWERED, data)
                    return
                error = found
        elif attempt.status >= 400 and path.startswith(MESSAGES):
            if not whole and len(data) < MOST_HELD_BACK:
                attempt.hold_back(data)
                return
            data = respelled(exchange, attempt, data)
        if error is None and cut_short(attempt, path, data):
            error = UpstreamError(retries.ABORTED, "aborted it")
        if error is not None:
            self.failures.failed(attempt, error)
            return
        attempt.answer(shows_output=True)
        exchange.happened(ANSWERED, data)

    def relay(self, exchange: Exchange, data: bytes) -> None:
        """Write an answer's head and its first bytes (`data`) to the client, and account for its first byte.

        The attempt writes all later bytes to the client without calling the handler (`Attempt.data`).
        """
        attempt, error = exchange.attempts[-1], None
        if self.resumer is not None:
            data, error = self.resumer.begun(exchange, attempt, data)
        if attempt.first_at:
            self.settling.answered(exchange, attempt)
        else:  # its bytes so far show no output
            self.settling.close_unattributed(exchange)
        if ((makes := exchange.label == "responses") or exchange.response is not None) and attempt.status == 200:
            exchange.tells(self._responses.answered(attempt.backend.id, exchange.response, makes, data))
        attempt.first_read(data)
        if exchange.opened is None:
            exchange.client.begin_answer(attempt.response_head, self.lines(exchange, attempt), data)
        else:
            exchange.client.write(data)
            if exchange.client.writing_paused:  # since the comments of an earlier attempt
                exchange.pause_reading()
        if exchange.legs is not None:
            self.settling.drop_unsent(exchange.legs)
        upstream = attempt.upstream
        if upstream is not None and not upstream.complete and (attempt.prompt is None or not attempt.prompt.token_ids):
            # The body is freed: no retry can follow, and a resumption sends what the stream record holds. If the prompt
            # has token ids, `TokenIdForwarding` may still send the body to check them.
            exchange.forget_body()
        if error is not None:
            self.failures.failed(attempt, error)

    def lines(self, exchange: Exchange, attempt: Attempt) -> bytes:
        """Return the header lines that the gateway adds to an answer."""
        head = attempt.response_head
        lines = b"" if self.note is None else self.note(exchange, attempt)
        if head.get(b"x-request-id") is None:
            lines += b"x-request-id: %b\r\n" % exchange.id
        if attempt.streams and head.get(b"x-accel-buffering") is None:
            lines += NO_BUFFERING
        if self._names_replica:
            lines += b"x-hitherto-replica: %b\r\n" % attempt.backend.id.encode()
        if self._tells_cached and attempt.prompt is not None:
            held = attempt.placement.predicted if exchange.legs is None else exchange.legs.cached
            lines += b"x-hitherto-cached-tokens: %d\r\n" % held
        if exchange.charge is not None:
            lines += exchange.charge.header_lines()
        return lines

    def join(self, exchange: Exchange, data: bytes) -> None:
        """Relay the first bytes from the replica that resumes a stream."""
        assert self.resumer is not None
        self.resumer.join(exchange, data)

    def on_complete(self, attempt: Attempt) -> None:
        """Finish an attempt whose answer is complete; if all of its body was held back, check and relay that first."""
        if attempt.state is AWAITING:  # what was held back, if anything, is the whole body
            self.on_body(attempt, b"", whole=True)
            if attempt.state is ANSWERING:  # they were relayed
                attempt.end()  # calls this method again, or checks first whether the recorded stream lacks an event
        elif attempt.state is ANSWERING:
            attempt.end_as(ATTEMPT_FINISHED)
            attempt.exchange.happened(FINISHED)

    def settle(self, exchange: Exchange, _: Any) -> None:
        """End a request whose answer the client has completely.

        Its accounting follows in a batch, with that of other requests.
        """
        self.under_way.discard(exchange)
        exchange.client.finish(not exchange.attempts[-1].response_head.until_close)
        self.settling.complete.add(exchange)
