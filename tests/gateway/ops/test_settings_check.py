"""What `hitherto doctor` says of settings, and of the files and services that they name."""

import http.server
import re
import resource
import threading

import pytest

from gateway import cli
from gateway.ops.gateway_checks import Gateway

from .examined import BAD_KEYS, doctor_lines, examine, found_in, free_port

pytestmark = pytest.mark.usefixtures("settings")


def test_bad_settings_are_a_line_too_with_exit_code_2(capsys):
    assert cli.main(["doctor", "--policy", "fastest"]) == 2
    assert capsys.readouterr().out.startswith("fail  config")


def test_a_file_that_cannot_be_used_is_one_failed_check_and_all_others_are_done(capsys, engines, tmp_path):
    (tmp_path / "keys.yaml").write_text(BAD_KEYS)
    files = {
        "--api-keys": ("keys.yaml", "api keys", "keys.yaml:1: name: 'team a!' is not a name of"),
        "--tls-cert": ("gone.pem", "tls", "gone.pem cannot be read"),
        "--chat-template": ("gone.jinja", "chat template", "gone.jinja cannot be used"),
        "--replica-ca": ("gone-too.pem", "replica ca", "gone-too.pem cannot be used"),
        "--admin-token": ("@gone", "admin token", "gone cannot be used"),
        "--engine-api-key": ("@gone", "engine api key", "gone cannot be used"),
        "--usage-log": ("gone/usage", "usage log", "gone/usage cannot be used"),
    }
    flags = [word for flag, (name, _, _) in files.items() for word in (flag, name)]
    code, out = doctor_lines(capsys, "--replica-url", engines[0].url, *flags)
    assert code == 1 and len(re.findall("^fail ", out, re.M)) == len(files), out
    for flag, (_, subject, said) in files.items():
        line, remedy = re.search(rf"^fail  {subject} +flag {flag}: (.*)\n      -> (.*)$", out, re.M).groups()
        assert said in line and remedy.startswith("mend it: no gateway starts with it")
    assert re.search("^warn  gateway ", out, re.M), "none runs"
    for subject in ("chat template", "replica 127", "tokens 127", "events 127", "cache 127"):
        assert re.search(f"^ok    {subject}", out, re.M), subject


def test_a_profile_or_a_file_of_replicas_that_cannot_be_used_keeps_nothing_from_being_checked(capsys, tmp_path):
    (tmp_path / "broken.yaml").write_text("kind: [")
    (tmp_path / "replicas.txt").write_text("no url\n")
    code, found = examine(capsys, "--launch", "1", "--profile", "broken.yaml", "--replica-file", "replicas.txt")
    assert code == 1 and "broken.yaml" in found["launch"][1] and "replicas.txt" in found["replica file"][1]
    assert found["chat template"][0] == "ok" and "profile" not in found


def test_a_redis_for_workers(capsys, engines, monkeypatch):
    flags = ("--replica-url", engines[0].url, "--workers", "2")
    assert examine(capsys, *flags)[1]["workers"][0] == "ok"
    monkeypatch.setattr("gateway.workers.private_redis.shutil.which", lambda name: None)
    code, found = examine(capsys, *flags)
    assert code == 1 and found["workers"][0] == "fail" and "pip install 'hitherto[redis-server]'" in found["workers"][1]


def test_traces_that_arrive_and_that_do_not(capsys, engines, monkeypatch):
    class Receiver(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_): ...

    receiver = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    threading.Thread(target=receiver.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{receiver.server_port}"
    found = {}
    for url in (base, base + "/elsewhere", f"http://127.0.0.1:{free_port()}", "collector:4317"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        found[url] = examine(capsys)[1]["traces"]
    receiver.shutdown()
    receiver.server_close()
    (ok, takes), (wrong, elsewhere), (absent, nobody), (bad, no_url) = found.values()
    assert (ok, wrong, absent, bad) == ("ok", "warn", "warn", "fail")
    assert takes == f"{base}/v1/traces takes them" and "404" in elsewhere
    assert "refused" in nobody and "no http:// or https:// URL" in no_url
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
    assert "traces" not in examine(capsys)[1]


@pytest.mark.parametrize(("most", "warns"), [(1024, True), (4096, False), (resource.RLIM_INFINITY, False)])
def test_too_few_open_files_are_said_before_clients_see_it(monkeypatch, most, warns):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, most))
    here, running = (found_in(Gateway(None, status=status), "open files") for status in ({}, {"most_open_files": most}))
    assert (len(here) == 1) is warns and here == running, "here, or of a gateway that runs"
    for found in here:
        assert found.level == "warn" and "1024 at most, which are about 369 streams" in found.text
        assert "LimitNOFILE" in found.remedy
