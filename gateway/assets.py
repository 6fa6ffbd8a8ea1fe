"""`hitherto assets DIR`: deployment files for users who installed a wheel.

They are compose files, the Dockerfile, Prometheus configuration and rules, Grafana dashboards and a systemd unit. The
sources of the installed packages are written beside them, so that the compose files build an image of this version. A
wheel has the deployment files in its `share/hitherto` (`data-files` in pyproject.toml), a checkout in their folders.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from gateway.settings import ConfigError

ABOUT = (
    "Write what a deployment needs besides Python into a folder: compose files with the Dockerfile and all sources of its "
    "image (most of the files), Prometheus' configuration and rules, Grafana's dashboards, a systemd unit."
)
HERE = Path(__file__).parent.parent
PACKAGES = ("gateway", "cachemap", "policies", "replicas", "loadgen")
BESIDE = (
    "compose.yaml",
    "compose.gpu.yaml",
    "compose.gateway.yaml",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "deploy",
)
SHARE = "share/hitherto/"
NEXT = """
    cd {folder}
    docker compose up --build                                        the whole house, with simulated engines
    docker compose -f compose.yaml -f compose.gpu.yaml up --build    the same with engines on two GPUs
    docker compose -f compose.gateway.yaml up --build                a gateway before your own engines
    deploy/grafana/dashboards, deploy/alerts.yml                     for a Grafana and a Prometheus that run already
    deploy/hitherto.service                                          a systemd unit"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", type=Path, help="where to; made if it is not there")
    parser.add_argument("--force", action="store_true", help="replace files there that differ")


def run(args: argparse.Namespace) -> int:
    """Write the files and return 0, or 1 if files with other contents exist. Raises ConfigError if it cannot write."""
    contents = {name: path.read_bytes() for name, path in found()}
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        there = {name: args.folder / name for name in contents}
        differ = [name for name, path in there.items() if path.exists() and path.read_bytes() != contents[name]]
        if differ and not args.force:
            print(f"hitherto: nothing written: {args.folder} has {_some(differ)} with other contents. "
                  "Name another folder, or --force to replace them", file=sys.stderr)  # fmt: skip
            return 1
        for name, path in there.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(contents[name])
    except OSError as error:
        raise ConfigError(
            f"{error.filename or args.folder}: {error.strerror}. Name a folder that can be written"
        ) from None
    print(f"{len(contents)} files in {args.folder}:" + NEXT.format(folder=args.folder))
    return 0


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")


def found() -> Iterator[tuple[str, Path]]:
    """Yield each file's name in the target folder and its path here. Raises ConfigError if files are not installed."""
    for package in PACKAGES:
        for path in sorted((HERE / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(HERE)), path
    beside = list(_of_checkout() if (HERE / "compose.yaml").is_file() else _of_wheel())
    if not beside:
        raise ConfigError(
            "this installation has no compose files: it was made from a folder without them. Install a wheel or a checkout"
        )
    yield from beside


def _of_checkout() -> Iterator[tuple[str, Path]]:
    for name in BESIDE:
        for path in sorted((HERE / name).rglob("*")) if (HERE / name).is_dir() else [HERE / name]:
            if (
                path.is_file() and path.suffix not in (".py", ".pyc") and path.name != "checked.json"
            ):  # without the scripts that generate the dashboards
                yield str(path.relative_to(HERE)), path


def _of_wheel() -> Iterator[tuple[str, Path]]:
    for file in metadata.files("hitherto") or ():
        _, share, name = file.as_posix().partition(SHARE)
        if share:
            yield name, Path(str(file.locate()))
