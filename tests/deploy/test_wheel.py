"""What `pip install` gets: all of the packages, with what they read besides Python."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPOSITORY = "https://code.example/somebody/hitherto"
PACKAGES = ("gateway", "cachemap", "policies", "replicas", "loadgen")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    command = [sys.executable, "deploy/wheel.py", "--repository", REPOSITORY, "--ref", "v1", "--out"]
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run([*command, out], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return zipfile.ZipFile(next(out.glob("hitherto-*.whl")))


def test_every_file_of_the_packages_is_in_it(wheel):
    here = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*") if path.is_file()}
    here = {path for path in here if "__pycache__" not in path}
    assert here - set(wheel.namelist()) == set()


def test_it_says_what_it_is(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    text = wheel.read(name).decode()
    assert "\nRequires-Python: >=3.11\n" in text and "\nClassifier: Typing :: Typed\n" in text
    assert "torch" not in [
        line.split(":")[1].split()[0]
        for line in text.splitlines()
        if line.startswith("Requires-Dist:") and "extra ==" not in line
    ]


def test_links_of_its_description_lead_to_files_of_the_repository(wheel):
    """A package registry shows it by itself, where a relative link leads nowhere."""
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", wheel.read(name).decode())
    assert len(links) > 10
    for image, target in links:
        start = f"{REPOSITORY}/{'raw' if image else 'blob'}/v1/"
        assert target.startswith(start), target
        assert (ROOT / target.removeprefix(start).partition("#")[0]).exists(), target
