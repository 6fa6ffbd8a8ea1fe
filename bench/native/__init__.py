"""The load generator in C (engine and clients in one thread: `generator.c` says what it does), built when it is
needed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import orjson

from loadgen.drive.stack import die_with_parent

HERE = Path(__file__).parent
SOURCES = ("generator.c", "engine.c", "streams.c")
GATEWAY_CORE, GENERATOR_CORE = 0, 1


def build(folder: str, name: str, *sources: Path) -> str:
    """Compiles into `folder`; returns the program's path. SystemExit where there is no compiler or it fails."""
    program = str(Path(folder, name))
    try:
        subprocess.run(["cc", "-O2", "-o", program, *map(str, sources)], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(f"this benchmark needs a C compiler named cc: {error}") from None
    return program


def on_core(core: int):
    """For `preexec_fn`: the process and its children keep to one core, and end with their parent."""

    def keep() -> None:
        os.sched_setaffinity(0, {core})
        die_with_parent()

    return keep


class Generator:
    """A running generator on its own core. `ports`: its two engines."""

    def __init__(self, program: str):
        self._process = subprocess.Popen(
            [program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=on_core(GENERATOR_CORE)
        )
        self.ports: list[int] = self.event()["ports"]

    def say(self, *words: object) -> None:
        self._process.stdin.write(" ".join(map(str, words)) + "\n")
        self._process.stdin.flush()

    def event(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("the generator ended")
        return orjson.loads(line)

    def stop(self) -> None:
        self._process.stdin.close()
        self._process.wait(5)


@contextlib.contextmanager
def generator() -> Iterator[Generator]:
    with tempfile.TemporaryDirectory() as folder:
        made = Generator(build(folder, "generator", *(HERE / name for name in SOURCES)))
        try:
            yield made
        finally:
            made.stop()
