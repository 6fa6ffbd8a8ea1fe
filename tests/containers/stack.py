"""A compose file of this repository, run by podman-compose as it stands.

What differs from Docker is given from outside: ports that are free, by the file's own variables; a build without a
daemon; health checks, which podman leaves to systemd's timers, are run by hand (`healthy`). Podman does not restart a
container while one that it depends on has ended, as the one that makes the token has: an override file takes
`depends_on` away, and `up` keeps its order. Services for which there is no image are left out by name.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
FOLDER = Path(os.environ.get("HITHERTO_CONTAINERS", "/nonexistent"))
# pip of the build sees what this machine's sees: its index and its authorities.
PIP = {Path("/etc/pip.conf"): "/etc/pip.conf", Path.home() / ".config/pip/pip.conf": "/root/.config/pip/pip.conf"}
BUILD = "--isolation=chroot --pull=never --network=host -v /etc/ssl/certs:/etc/ssl/certs:ro"


def free_ports(names: list[str]) -> dict[str, int]:
    sockets = [socket.socket() for _ in names]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = {name: one.getsockname()[1] for name, one in zip(names, sockets)}
    for one in sockets:
        one.close()
    return ports


def until(true: Callable[[], Any], seconds: float = 60, what: Callable[[], Any] = lambda: "") -> Any:
    """Wait for it: what happens in other processes has no event here."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, f"not within {seconds} s: {what()}"
        time.sleep(0.2)
    return found


class Stack:
    """One compose file, up until `down`."""

    def __init__(
        self,
        file: str,
        project: str,
        place: Path,
        without: Iterable[str] = (),
        settings: dict[str, str] | None = None,
        **variables: object,
    ) -> None:
        """`without`: services that are left out. `settings`: as in `hitherto.env`. `variables`: as in `.env`."""
        self.file, self.project = file, project
        self.token: str | None = None
        text = (ROOT / file).read_text()
        self.services = {
            name: service for name, service in yaml.safe_load(text)["services"].items() if name not in without
        }
        self.ports = free_ports(sorted({word.partition(":")[0] for word in text.split("${") if "_PORT:-" in word[:40]}))
        self.env_file = place / f"{file}.env"
        self.env_file.write_text("".join(f"{name}={value}\n" for name, value in {**self.ports, **variables}.items()))
        self.first = [name for name, service in self.services.items() if service.get("restart") == "no"]
        self.override = place / f"override-{file}"
        changed = {
            name: (f"environment: {json.dumps(settings)}, " if settings else "") + "depends_on: !override {}"
            for name, service in self.services.items()
            if name not in self.first and service.get("depends_on")
        }
        alone = "".join(f"  {name}: {{{words}}}\n" for name, words in changed.items())
        self.override.write_text(f"services:\n{alone}")
        self.environment = os.environ | {
            "CONTAINERS_CONF": str(FOLDER / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(FOLDER / "storage.conf"),
        }

    def url(self, port: str) -> str:
        return f"http://127.0.0.1:{self.ports[port]}"

    def compose(self, *words: str, timeout: float = 120) -> str:
        program = str(FOLDER / "podman-compose" / "bin" / "podman-compose")
        files = "--env-file", str(self.env_file), "--file", self.file, "--file", str(self.override)
        return self._run([program, "--project-name", self.project, *files, *words], timeout)

    def podman(self, *words: str, timeout: float = 60) -> str:
        return self._run(["podman", *words], timeout)

    def _run(self, words: list[str], timeout: float) -> str:
        options = {"cwd": ROOT, "env": self.environment, "timeout": timeout, "stdin": subprocess.DEVNULL}
        done = subprocess.run(words, capture_output=True, text=True, **options)
        assert not done.returncode, f"{' '.join(words)}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def build(self) -> None:
        mounts = [f"-v {file}:{place}:ro" for file, place in PIP.items() if file.is_file()]
        self.compose(f"--podman-build-args={' '.join([BUILD, *mounts])}", "build", timeout=600)

    def up(self) -> None:
        self.compose("up", "--detach", "--no-build", *self.first)
        for name in self.first:
            assert self.podman("wait", self.container(name)).strip() == "0", self.logs(name)
        self.compose("up", "--detach", "--no-build", *(self.services.keys() - set(self.first)))

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "5", timeout=180)

    def container(self, service: str) -> str:
        return f"{self.project}_{service}_1"

    def inspect(self, service: str) -> dict:
        return json.loads(self.podman("inspect", self.container(service)))[0]

    def exec(self, service: str, *words: str) -> str:
        return self.podman("exec", self.container(service), *words)

    def logs(self, service: str) -> str:
        return self.podman("logs", self.container(service))

    def healthy(self, service: str) -> bool:
        """Whether the service's own health check succeeds now."""
        try:
            self.podman("healthcheck", "run", self.container(service))
        except AssertionError:
            return False
        return True

    def kill(self, service: str) -> Callable[[], None]:
        """Its first process gets SIGKILL, as from the kernel when memory is short: no runtime was asked to stop it.
        Returns what waits until `restart: unless-stopped` has started it again. Podman must not be asked meanwhile: who
        looks at a container that has just ended keeps podman 4 from restarting it."""
        told = self.inspect(service)
        before, file = told["State"]["Pid"], Path(told["PidFile"])
        os.kill(before, signal.SIGKILL)
        return lambda: until(lambda: file.exists() and file.read_text() not in ("", str(before)), 30)
