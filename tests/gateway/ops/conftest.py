"""What tests of `hitherto doctor` run it against."""

import http.server
import json
import threading

import pytest

from gateway.ops import replica_checks
from gateway.settings import ADMIN_SIDE

from .examined import free_port, once_read


@pytest.fixture(scope="module")
def engines(start_engine):
    """healthy; without events and cached tokens; with other blocks."""
    started = [start_engine(), start_engine("--no-events", "--no-cached-tokens"), start_engine("--block-size", "32")]
    return [engine.wait() for engine in started]


@pytest.fixture
def settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(replica_checks, "Pipeline", once_read)
    monkeypatch.setenv("HITHERTO_PORT", str(free_port()))
    monkeypatch.setenv("HITHERTO_ADMIN_PORT", str(free_port()))
    monkeypatch.setenv("HITHERTO_MODEL", "sim")


@pytest.fixture
def fake():
    """fake({path: text, object or status}) -> URL of an engine that answers so, to every method; all else is 404."""
    servers = []

    def start(pages: dict) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                page = pages.get(self.path, 404)
                body = page.encode() if isinstance(page, str) else json.dumps(page).encode()
                self.send_response(page if isinstance(page, int) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/plain" if isinstance(page, str) else "application/json")
                if self.path == "/status" and page != 404:
                    self.send_header(ADMIN_SIDE, "1")
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, *ignored):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def gateway(fake, monkeypatch):
    """gateway(status): the admin side of a running gateway that answers so."""

    def start(page) -> None:
        monkeypatch.setenv("HITHERTO_ADMIN_PORT", fake({"/status": page}).rpartition(":")[2])

    return start
