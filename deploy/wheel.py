"""Build the wheel.

    python deploy/wheel.py [--repository https://HOST/OWNER/hitherto [--ref v0.1.0]] [--out dist]

A package registry shows the README without the rest of the repository, so it needs `--repository`: the README's links
then become absolute (REPOSITORY/blob/REF/PATH, images REPOSITORY/raw/REF/PATH), and the metadata gets the project's
URLs. pyproject.toml has no URLs, since only whoever publishes knows where the repository is.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
NEEDED = (
    *("gateway", "cachemap", "policies", "replicas", "loadgen", "pyproject.toml", "README.md", "LICENSE"),
    *(
        "compose.yaml",
        "compose.gpu.yaml",
        "compose.gateway.yaml",
        "constraints.txt",
        "deploy",
    ),  # what `hitherto assets` writes
)


def absolute(text: str, repository: str, ref: str) -> str:
    """Return a Markdown text with its relative links made absolute, into branch or tag `ref` of `repository`."""

    def lead(found: re.Match[str]) -> str:
        image, label, target = found.groups()
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        return f"{image}[{label}]({repository.rstrip('/')}/{'raw' if image else 'blob'}/{ref}/{target})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)", lead, text)


def urls(repository: str, ref: str) -> str:
    """Return the table of pyproject.toml with the project's URLs."""
    pages = {"Documentation": "docs/README.md", "Changelog": "CHANGELOG.md", "Security": "SECURITY.md"}
    repository = repository.rstrip("/")
    each = {"Repository": repository} | {name: f"{repository}/blob/{ref}/{path}" for name, path in pages.items()}
    return "\n[project.urls]\n" + "".join(f'{name} = "{url}"\n' for name, url in each.items())


def build(repository: str | None, ref: str, out: Path) -> Path:
    """Build the wheel from a copy of its files, with absolute links if `repository` is given; return its path."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in NEEDED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, tree)
        if repository is not None:
            readme, pyproject = tree / "README.md", tree / "pyproject.toml"
            readme.write_text(absolute(readme.read_text(), repository, ref))
            pyproject.write_text(pyproject.read_text() + urls(repository, ref))
        hook = "import setuptools.build_meta as backend; print(backend.build_wheel('out'))"
        subprocess.run([sys.executable, "-W", "ignore", "-c", hook], cwd=tree, check=True, capture_output=True)
        [made] = (tree / "out").glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(made, out))


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the wheel.")
    parser.add_argument("--repository", metavar="URL", help="make the README's links absolute, to this repository")
    parser.add_argument("--ref", default="main", help="branch or tag that links lead to (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", metavar="DIR", help="default: dist")
    args = parser.parse_args()
    print(build(args.repository, args.ref, args.out))


if __name__ == "__main__":
    main()
