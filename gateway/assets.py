"""`hitherto assets DIR`: deployment files for users who installed a wheel.

The files are compose files, the Dockerfile, Prometheus configuration and rules, Grafana dashboards and a systemd unit.
The sources of the installed packages are written next to them, so that the compose files build an image of this
version. A wheel has the deployment files in `share/hitherto` (`data-files` in pyproject.toml), a checkout in their own
folders.
"""

from __future__ import annotations

import argparse
import sys
from importlib import metadata
from pathlib import Path

from gateway.settings import ConfigError

HELP = "write what a deployment needs besides Python into a folder"
ABOUT = (
    "These are compose files with the Dockerfile and all sources of its image (most of the files), Prometheus' "
    "configuration and rules, Grafana's dashboards, and a systemd unit."
)
HERE = Path(__file__).parent.parent
PACKAGES = ("gateway", "cachemap", "policies", "replicas", "loadgen")
BESIDE = ("compose*.yaml", "pyproject.toml", "constraints.txt", "README.md", "deploy/**/*")
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
    """Write the deployment files into `args.folder`, and return the exit code.

    Without `--force`, nothing is written and 1 is returned if the folder has one of the files with other contents.
    Raises ConfigError if a file cannot be written.
    """
    contents = {args.folder / name: path.read_bytes() for name, path in found().items()}
    try:
        differ = [str(path) for path, content in contents.items() if path.exists() and path.read_bytes() != content]
        if differ and not args.force:
            print(f"hitherto: nothing written: {len(differ)} files are there with other contents, like {differ[0]}. "
                  "Name another folder, or --force to replace them", file=sys.stderr)  # fmt: skip
            return 1
        for path, content in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    except OSError as error:
        raise ConfigError(
            f"{error.filename or args.folder}: {error.strerror}. Name a folder that can be written"
        ) from None
    print(f"{len(contents)} files in {args.folder}:" + NEXT.format(folder=args.folder))
    return 0


def found() -> dict[str, Path]:
    """Return the source path of each file to write, by its relative path in the target folder.

    Raises ConfigError if this installation has no deployment files.
    """
    sources = [path for package in PACKAGES for path in (HERE / package).rglob("*") if "__pycache__" not in path.parts]
    if (HERE / "compose.yaml").is_file():  # a checkout: leave out the scripts that generate the dashboards
        paths = [path for pattern in BESIDE for path in HERE.glob(pattern) if path.name != "checked.json"]
        beside = {str(path.relative_to(HERE)): path for path in paths if path.suffix not in (".py", ".pyc")}
    else:
        files = [(file.as_posix().partition("share/hitherto/")[2], file) for file in metadata.files("hitherto") or ()]
        beside = {name: Path(str(file.locate())) for name, file in files if name}
    if not beside:
        raise ConfigError(
            "this installation has no compose files: it was made from a folder without them. Install a wheel or a checkout"
        )
    every = {str(path.relative_to(HERE)): path for path in sources} | beside
    return {name: path for name, path in every.items() if path.is_file()}
