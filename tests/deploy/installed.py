"""Start the `hitherto` that is installed beside this interpreter with two simulated engines, and ask it for a chat.

    PYTHON tests/deploy/installed.py

Needs nothing but the wheel and what it brings. `make test-pythons` runs it in empty environments.
"""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path


def ask(url: str) -> tuple[str, str]:
    """The replica that answered a chat, and what it said."""
    body = {"model": "sim", "max_tokens": 8, "messages": [{"role": "user", "content": "Which module reads CSV?"}]}
    request = urllib.request.Request(
        url + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.headers["x-hitherto-replica"], json.load(answer)["choices"][0]["message"]["content"]


def main() -> None:
    command = [Path(sys.executable).with_name("hitherto"), "serve", "--launch", "2", "--port", "0", "--admin-port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as gateway:
        ready = 0
        for line in gateway.stderr:
            if found := re.search(r"serves https?://[^:]+:(\d+),", line):
                url = f"http://127.0.0.1:{found[1]}"
            ready += "-> ready" in line
            if ready == 2:
                break
        else:
            raise SystemExit(f"the gateway ended with {gateway.wait()}")
        # A replica is ready before its model's tokenizer is: until then clients are told to come back.
        end = time.monotonic() + 60
        while True:
            try:
                replica, said = ask(url)
                break
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > end:
                    raise
                time.sleep(0.1)
        assert said and replica, (said, replica)
        gateway.send_signal(signal.SIGTERM)
        gateway.stderr.read()
        assert gateway.wait(40) == 0, gateway.returncode
    print(f"{sys.version.split()[0]}: {replica} said {said!r}")


main()
