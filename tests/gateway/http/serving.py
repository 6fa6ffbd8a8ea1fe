"""A server of the wire alone, whose requests are answered by what stands for the gateway."""

from contextlib import asynccontextmanager

from gateway.http.downstream import Downstream
from gateway.http.messages import Limits
from gateway.http.server import Server
from replicas.pulse import Pulse

from .talk import Talker


class Echo:
    """Answers each request with its method, path and body; /slow waits until released."""

    def __init__(self):
        self.seen, self.held, self.left, self.pulse = [], [], 0, Pulse()

    def handle(self, client, request):
        self.seen.append(request)
        if request.path == "/slow":
            client.exchange = self
            self.held.append(client)
        else:
            client.reply(
                200,
                b"%s %s %s" % (request.method.encode(), request.target, request.body),
                [(b"content-type", b"text/plain")],
            )

    def release(self):
        self.held.pop(0).reply(200, b"slow", [])

    def client_gone(self):
        self.left += 1

    def shut_down(self):
        self.left += 1

    def pause_reading(self): ...
    def resume_reading(self): ...
    def sweep(self, now): ...

    def refuse(self, status, message, target):
        return [(b"x-refused", b"yes")], message.encode()


@asynccontextmanager
async def served(limits=Limits()):
    echo = Echo()
    server = Server(echo, limits)
    port = await server.start("127.0.0.1", 0)
    talker = await Talker.to(port)
    try:
        yield talker, echo, server
    finally:
        await talker.close()
        await server.close()


GET = b"GET /a?b=1 HTTP/1.1\r\nHost: x\r\n\r\n"


class Transport:
    """A client's connection without a socket: what is written to it, and whether it was closed."""

    def __init__(self):
        self.written, self.closed = b"", False

    def write(self, data):
        self.written += data

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.closed = True

    def close(self):
        self.closed = True

    def get_write_buffer_size(self):
        return 0

    def pause_reading(self): ...
    def resume_reading(self): ...


def told(reads, limits=Limits()):
    """Return the requests that the handler sees, and the transport, for bytes that come in these reads."""
    echo = Echo()
    client = Downstream(Server(echo, limits).clients)
    client.connection_made(Transport())
    for data in reads:
        client.data_received(data)
    return echo.seen, client.transport


def cut(raw, size):
    return [raw[at : at + size] for at in range(0, len(raw), size)]
