"""What `pip install` gets: all of the packages, with what they read besides Python."""

import os
import re
import shutil
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
    needed = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert needed and not [line for line in needed if "torch" in line]


def test_links_of_its_description_lead_to_files_of_the_repository(wheel):
    """A package registry shows it by itself, where a relative link leads nowhere."""
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    links = re.findall(r"(!?)\[[^\]]*\]\(([^)\s]+)\)", wheel.read(name).decode())
    assert len(links) > 10
    for image, target in links:
        start = f"{REPOSITORY}/{'raw' if image else 'blob'}/v1/"
        assert target.startswith(start), target
        assert (ROOT / target.removeprefix(start).partition("#")[0]).exists(), target


def test_its_urls_lead_to_files_of_the_repository_that_was_named(wheel):
    [name] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    urls = dict(re.findall(r"^Project-URL: (\w+), (.*)$", wheel.read(name).decode(), re.M))
    assert urls.pop("Repository") == REPOSITORY
    assert urls.keys() == {"Documentation", "Changelog", "Security"}
    assert all((ROOT / url.removeprefix(f"{REPOSITORY}/blob/v1/")).is_file() for url in urls.values())


def test_without_a_repository_it_is_the_checkouts_as_it_stands(wheel, tmp_path):
    done = subprocess.run(
        [sys.executable, "deploy/wheel.py", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    plain = zipfile.ZipFile(done.stdout.strip())
    assert plain.namelist() == wheel.namelist()
    [name] = [name for name in plain.namelist() if name.endswith("/METADATA")]
    text = plain.read(name).decode()
    assert "Project-URL" not in text and text.endswith((ROOT / "README.md").read_text())


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """Where the wheel's packages are, installed without what they need."""
    prefix = tmp_path_factory.mktemp("prefix")
    install = "-m pip install --quiet --no-index --no-deps --no-compile --ignore-installed --prefix".split()
    subprocess.run([sys.executable, *install, str(prefix), wheel.filename], check=True, timeout=60)
    (found,) = prefix.glob("lib/python*/site-packages")
    return found


def test_without_a_checkout_it_says_where_other_routers_rules_are(site, tmp_path):
    """Nor does it need them: the gateway's own policies are simulated as ever."""

    def simulated(policy: str) -> subprocess.CompletedProcess:
        words = ["simulate", "--policies", policy, "--dataset-name", "random", "--num-prompts", "3", "--replicas", "2"]
        return subprocess.run([sys.executable, "-m", "loadgen", *words], cwd=tmp_path, capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(site)}, timeout=60)  # fmt: skip

    assert simulated("least_time").returncode == 0
    refused = simulated("dynamo")
    assert refused.returncode == 2 and "the rules of other routers are in a checkout of Hitherto" in refused.stderr


def test_its_assets_are_those_of_the_checkout(site, tmp_path):
    """`hitherto assets` of an installed wheel: the same files, from which the image can be built."""
    written = {}
    for name, place in (("wheel", site), ("checkout", ROOT)):
        words = [sys.executable, "-m", "gateway", "assets", str(tmp_path / name)]
        subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(place)}, check=True, timeout=60)
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file()]
        written[name] = {str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files}
    assert written["wheel"].keys() == written["checkout"].keys(), "pyproject.toml: data-files"
    differ = [name for name, content in written["wheel"].items() if content != written["checkout"][name]]
    assert sorted(differ) == ["README.md", "pyproject.toml"], "whose links are absolute, and which names the project"
    dockerfile = written["wheel"]["deploy/Dockerfile"].decode()
    for source in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.M):
        for name in source.split():
            assert (tmp_path / "wheel" / name).exists(), "the image is built from this folder"


def test_without_those_files_it_says_so(tmp_path):
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    code = "import sys, importlib.metadata as it; it.files = lambda name: []; from gateway.cli import main; sys.exit(main(['assets', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.returncode == 2 and "Install a wheel or a checkout" in done.stderr
    assert not (tmp_path / "x").exists()
