"""`hitherto assets DIR`: a folder that `docker compose up` works in, which harms nothing that was there."""

import subprocess
from pathlib import Path

import pytest

from gateway import cli

ROOT = Path(__file__).parents[2]


def tracked(*places: str) -> set[str]:
    """Files of the checkout at these places; without git (a tree that was unpacked) those that are there."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *places], cwd=ROOT, capture_output=True, text=True
    )
    if not done.returncode:
        return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}
    found = [
        path for place in places for path in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
    ]
    return {str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_that_the_compose_files_the_image_and_a_monitoring_need(tmp_path, capsys):
    assert cli.main(["assets", str(tmp_path / "new" / "folder")]) == 0
    written = contents(tmp_path / "new" / "folder")
    packages = tracked("gateway", "cachemap", "policies", "replicas", "loadgen")
    composed = ("compose.yaml", "compose.gpu.yaml", "compose.gateway.yaml")
    beside = tracked(*composed, "pyproject.toml", "constraints.txt", "README.md", "deploy")
    assert set(written) == packages | {name for name in beside if not name.endswith((".py", "checked.json"))}
    assert {"deploy/alerts.yml", "deploy/grafana/dashboards/overview.json", "deploy/hitherto.service"} < set(written)
    assert all(content == (ROOT / name).read_bytes() for name, content in written.items())
    assert "docker compose up" in capsys.readouterr().out


def test_the_help_says_that_most_of_it_is_sources(tmp_path, capsys):
    assert cli.main(["assets", str(tmp_path)]) == 0
    written = contents(tmp_path)
    assert 2 * sum(name.endswith(".py") for name in written) > len(written)
    capsys.readouterr()
    for argv, said in (
        (["assets", "--help"], "all sources of its image (most of the files)"),
        (["--help"], "what a deployment needs besides Python"),
    ):
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert said in " ".join(capsys.readouterr().out.split())


def test_what_is_there_and_differs_is_left_unless_forced(tmp_path, capsys):
    mine = tmp_path / "deploy" / "prometheus.yml"
    mine.parent.mkdir()
    mine.write_text("mine")
    assert cli.main(["assets", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "deploy/prometheus.yml" in told and "--force" in told
    assert contents(tmp_path) == {"deploy/prometheus.yml": b"mine"}, "nothing was written"
    assert cli.main(["assets", str(tmp_path), "--force"]) == 0
    assert mine.read_bytes() == (ROOT / "deploy" / "prometheus.yml").read_bytes()
    assert cli.main(["assets", str(tmp_path)]) == 0, "twice is as good as once"


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["assets", str(tmp_path / "file" / "below")]) == 2
    told = capsys.readouterr().err
    assert str(tmp_path / "file") in told and "Name a folder" in told
