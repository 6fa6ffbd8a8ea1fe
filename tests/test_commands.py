"""Every command in the documents is run, or read by the parser of the program that it starts.

The blocks of quickstart.md that begin with ```bash are run, in their order, against simulated engines. Of all other
blocks each line that begins with a program's name is a command; `CHECKS` says how each program's are read, and
`NOT_READ` names the programs whose own parser is not at hand, with the reason. A program in neither fails the test.
`vllm serve` is read by vLLM's own parser in tests/vllm/test_command_lines.py; clients.md is run by `make test-clients`.
"""

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest
import yaml

from gateway import cli
from gateway.model import check_roles
from gateway.settings import ENV_PREFIX, Settings, load
from loadgen.cli import build_parser as loadgen_parser
from replicas.launch import ports, profile

from .gateway.running import running
from .replicas.certificates import authority, issue

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_READ = {
    "docker": "there is no daemon; make test-compose starts the stack, and this one is another project's image",
    "vllm": "by vLLM's own parser, in tests/vllm/test_command_lines.py, and `vllm bench serve` in tests/clients",
    "vllm-router": "another project's, from its command-line reference",
    "openssl": "by the tests of TLS",
    "python -m sglang.launch_server": "there is no CPU build of SGLang; its flags are read in its source",
}
PROGRAMS = "hitherto|loadgen|vllm|vllm-router|python|make|curl|docker|pip|openssl|nginx|uv|pipx|systemctl|helm|kubectl|redis-cli|promtool"
COMMAND = re.compile(rf"(?:\$ )?(?:[A-Z0-9_]+=\S+ +)*(?:\.venv/bin/|sudo )?(?P<words>(?:{PROGRAMS})(?: .*|$))")
FENCE = re.compile(r"^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)


def fenced(page: Path) -> list[tuple[str, str]]:
    """The blocks between fences: what stands behind the first one, and the text."""
    return [(found["info"], found["text"]) for found in FENCE.finditer(page.read_text())]


def commands(page: Path) -> list[str]:
    """The commands in a page's blocks, a line each, without what was set in their environment."""
    text = page.read_text()
    shell = [block for info, block in fenced(page) if info.split(" ")[0] in ("", "sh", "bash")]
    indented = [line[4:] for line in FENCE.sub("", text).splitlines() if line.startswith("    ")]
    lines = re.sub(r"\\\n\s*", " ", "\n".join([*indented, *shell])).splitlines()
    found = [COMMAND.fullmatch(line.strip()) for line in lines]
    return [one["words"] for one in found if one and not re.match(r"\w+ \w+: ", one["words"])]  # and no message


ALL = [(page, command) for page in PAGES for command in commands(page)]


def words(command: str) -> list[str]:
    """A command's words, without a comment, an ellipsis for flags that are the reader's, and what it is piped to."""
    command = command.split(" | ")[0].replace("--replica-url ...", "--replica-url http://HOST:8000")
    return [word for word in shlex.split(command, comments=True) if word not in ("...", "…")]


def test_every_command_stands_on_its_own_line():
    """Also those that are read elsewhere, with vLLM's parser: a quote that is open at a line's end is of two lines."""
    assert all(words(command) for _, command in ALL)


# ---- how each program's commands are read


def parser_of(program: str, verb: str) -> argparse.ArgumentParser:
    """The parser of one verb of `hitherto` or `loadgen`."""
    whole = loadgen_parser("loadgen") if program == "loadgen" or verb == "plan" else cli.build_parser()
    return subparsers(whole)[verb]


def subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [one.choices for one in parser._actions if isinstance(one, argparse._SubParsersAction)]
    return found[0] if found else {}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    below = (flags_of(one) for one in subparsers(parser).values())
    return {option for one in parser._actions for option in one.option_strings}.union(*below)


def check_hitherto(given: list[str]) -> None:
    verb = given[0]
    if verb == "plan":
        parser_of("hitherto", verb).parse_args(given[1:])
    else:
        args = cli._parse(given)
        if verb in ("serve", "config", "doctor"):
            cli.load_config(args)


def check_loadgen(given: list[str]) -> None:
    _, unknown = loadgen_parser("loadgen").parse_known_args(given)
    assert not unknown


def check_make(given: list[str]) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    assert all("=" in word or word in targets for word in given), given


def check_pip(given: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert given[0] == "install"
    for word in given[1:]:
        name, _, extras = word.rstrip("]").partition("[")
        assert name in (".", project["name"]), word
        assert not extras or set(extras.split(",")) <= set(project["optional-dependencies"]), word


def check_uv(given: list[str]) -> None:
    assert given.pop(0) == "tool"
    check_pip(given)


def check_python(given: list[str]) -> None:
    assert given[0] == "-m" and importlib.util.find_spec(given[1]), given


def check_curl(given: list[str]) -> None:
    assert any(re.search(r"^(https?://)?[\w.]+:\d+/", word) for word in given), given


CHECKS = {
    "hitherto": check_hitherto, "loadgen": check_loadgen, "make": check_make, "pip": check_pip, "python": check_python,
    "uv": check_uv, "pipx": check_pip, "curl": check_curl,  # and asked below, those of the admin side
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the files that commands name."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(ENV_PREFIX)]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")  # as in a pod, where `discover` needs no address
    (tmp_path / "keys.yaml").write_text('- {name: a, sha256: "' + 64 * "0" + '"}\n')
    (tmp_path / "mine.yaml").write_text((ROOT / "replicas/simulated/profiles/cpu-tiny.yaml").read_text())
    (tmp_path / "mine.py").write_text(
        re.findall(r"```python\n(.*?)```", (ROOT / "docs/your-policy.md").read_text(), re.S)[0]
    )
    authority(tmp_path)
    issue(tmp_path, "fullchain", "DNS:gateway.example")
    shutil.copy(tmp_path / "fullchain.key", tmp_path / "key.pem")
    return tmp_path


@pytest.mark.parametrize("page, command", ALL, ids=[f"{page.stem}: {command[:60]}" for page, command in ALL])
def test_a_command_is_read_by_its_program(folder, page, command):
    program, *given = words(command)
    if program in NOT_READ or any(command.startswith(name) for name in NOT_READ):
        return
    CHECKS[program](given)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_block_of_shell_has_commands_of_known_programs_alone(page):
    text = "\n".join(text for info, text in fenced(page) if info.split(" ")[0] in ("sh", "bash"))
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        program = line.split(" ")[0]
        assert program in {"", "#", "echo", *CHECKS} or any(line.startswith(name) for name in NOT_READ), line


def test_only_the_quickstart_has_blocks_that_are_run():
    assert [page.name for page in PAGES if any(info.startswith("bash") for info, _ in fenced(page))] == [
        "quickstart.md"
    ]


def test_commands_are_found():
    programs = {command.split(" ")[0] for _, command in ALL}
    assert programs >= {"hitherto", "loadgen", "make", "curl", "vllm", "pip"} and len(ALL) > 50


def test_a_wrong_command_would_be_noticed(folder):
    for wrong in ("serve --replica-urls http://a:1", "serve --port many", "doctor --no-such", "key make"):
        with pytest.raises((Exception, SystemExit)):
            check_hitherto(shlex.split(wrong))
    with pytest.raises((Exception, SystemExit, AssertionError)):
        check_loadgen(["run", "--no-such-flag"])


# ---- what is no command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_is_what_a_program_takes(page, folder):
    for info, text in fenced(page):
        if info != "yaml":
            continue
        given = yaml.safe_load(text)
        if "engine" in given:
            (folder / "profile.yaml").write_text(text)
            profile.load(str(folder / "profile.yaml"))
        elif set(given) & set(Settings.model_fields):
            (folder / "hitherto.yaml").write_text(text)
            check_roles(load({}, file=folder / "hitherto.yaml", environ={}).settings)
        else:
            assert "model_list" in given, "YAML of no program that is known here"  # LiteLLM's: tests/clients


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_within_a_sentence_have_verbs_and_flags_that_exist(page):
    text = FENCE.sub("", page.read_text())
    for program, rest in re.findall(r"`(hitherto|loadgen) ([a-z][^`]*)`", text):
        verb = rest.split()[0]
        known = flags_of(parser_of(program, verb))
        for word in re.findall(r"(?<![\w-])--?[a-zA-Z][a-z-]*", rest):
            assert word in known, f"{program} {rest}"


def test_json_in_commands_is_json():
    for page, command in ALL:
        for word in words(command):
            if word.startswith("{") and '"' in word:
                assert json.loads(word), f"{page.name}: {word}"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="there is no nginx: apt-get install nginx-light")
def test_nginx_takes_its_configuration(tmp_path):
    blocks = [text for page in PAGES for info, text in fenced(page) if info == "nginx"]
    assert blocks
    for text in blocks:
        file = tmp_path / "nginx.conf"
        file.write_text("pid %s/pid; events {} http { server { listen 127.0.0.1:8089; %s } }" % (tmp_path, text))
        done = subprocess.run(
            ["nginx", "-t", "-q", "-c", file, "-p", tmp_path, "-e", tmp_path / "log"], capture_output=True
        )
        assert not done.returncode, done.stderr.decode()


# ---- what is run


def test_the_quickstart_runs(tmp_path):
    """With this checkout's commands on the PATH, and free ports in place of the usual ones."""
    for name in ("hitherto", "loadgen"):
        module = {"hitherto": "gateway.cli", "loadgen": "loadgen.__main__"}[name]
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        script.write_text(f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n")
        script.chmod(0o755)
    port, admin = ports.pick(2, "127.0.0.1", set())
    env = {
        **os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
        "HITHERTO_PORT": str(port), "HITHERTO_ADMIN_PORT": str(admin),
    }  # fmt: skip
    blocks = [(info, text) for info, text in fenced(ROOT / "docs/quickstart.md") if info.startswith("bash")]
    assert [info for info, _ in blocks][:2] == ["bash background", "bash"] and len(blocks) == 6
    options = {"shell": True, "executable": "/bin/bash", "cwd": tmp_path, "env": env}
    all_ready = threading.Event()

    def read(said):
        ready = 0
        for line in said:
            ready += "-> ready" in line
            if ready == 4:
                all_ready.set()

    with subprocess.Popen("exec " + blocks[0][1], stderr=subprocess.PIPE, text=True, **options) as gateway:
        reader = threading.Thread(target=read, args=(gateway.stderr,))
        reader.start()
        try:
            for number, (_, text) in enumerate(blocks[1:]):
                if number:  # the first block waits by itself, and one engine is enough for it
                    assert all_ready.wait(60)
                text = text.replace(":8080", f":{port}").replace(":8081", f":{admin}")
                done = subprocess.run(
                    "set -eo pipefail\n" + text, capture_output=True, text=True, timeout=100, **options
                )
                assert not done.returncode, text + done.stdout[-3000:] + done.stderr[-3000:]
                assert done.stdout
                assert "x-hitherto-replica" in done.stdout.lower() or "curl -si" not in text
        finally:
            gateway.terminate()
            reader.join()
    assert (tmp_path / "load.html").stat().st_size > 1000


async def test_the_whole_example_with_keys_and_classes_starts_and_puts_each_key_into_its_class(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/security.md"
    [example] = [text for info, text in fenced(page) if info == "yaml"]
    (tmp_path / "hitherto.yaml").write_text(example)
    makes = [words(command) for command in commands(page) if command.startswith("hitherto key new")]
    for given in makes[-2:]:
        assert cli.main(given[1:]) == 0
    keys = re.findall(r"sk-hitherto-\S+", capsys.readouterr().out)
    assert len(keys) == 2 and cli.main(["config"]) == 0
    async with running(
        "--config", str(tmp_path / "hitherto.yaml"), "--api-keys", str(tmp_path / "keys.yaml")
    ) as gateway:
        await gateway.ready(1)
        await gateway.until(lambda status: status["ready"])
        asked = [{"role": "user", "content": "hi"}]
        assert (await gateway.chat(asked)).status_code == 401
        for key, qos in zip(keys, ("premium", "batch"), strict=True):
            gateway.client.headers["authorization"] = f"Bearer {key}"
            assert (await gateway.chat(asked)).status_code == 200
            admitted = {one["class"]: one["admitted"] for one in (await gateway.status())["admission"]}
            assert admitted[qos] == 1, admitted


async def test_the_example_of_simulated_prefill_and_decode_takes_two_legs(tmp_path):
    page = ROOT / "docs/disaggregation.md"
    [example] = [text for info, text in fenced(page) if info == "yaml" and "pd-sim" in text]
    (tmp_path / "hitherto.yaml").write_text(example)
    async with running("--config", str(tmp_path / "hitherto.yaml"), "--policy", "round_robin") as gateway:
        replicas = (await gateway.ready_for_legs(3))["replicas"]
        roles = {one["id"]: one["role"] for one in replicas}
        assert sorted(roles.values()) == ["decode", "decode", "prefill"]
        answer = await gateway.chat([{"role": "user", "content": "Down the rabbit hole. " * 200}])
        assert answer.status_code == 200 and roles[answer.headers["x-hitherto-replica"]] == "decode"
        assert await gateway.counted("hitherto_legs_total", leg="prefill", outcome="complete") == 1


# Of the requests to the admin side that operations.md shows, those that a simulated engine has no answer for.
NOT_ANSWERED = {
    "engine/sleep": "no simulated engine sleeps",
    "model=qwen": "asks for a model that is not served: it is 503",
}


async def test_what_operators_ask_the_admin_side_is_answered():
    asked = [words(command) for command in commands(ROOT / "docs/operations.md") if command.startswith("curl")]
    assert len(asked) >= 6
    async with running("--launch", "1") as gateway:
        await gateway.ready(1)
        status = await gateway.until(lambda status: status["ready"])  # its tokenizer is loaded after that
        name = status["replicas"][0]["id"]
        # Last what ends the engine.
        for given in sorted(asked, key=lambda given: ("DELETE" in given, "drain" in str(given))):
            if any(part in word for part in NOT_ANSWERED for word in given):
                continue
            [url] = [word for word in given if word.startswith("localhost:")]
            method = given[given.index("-X") + 1] if "-X" in given else "GET"
            path = url.removeprefix("localhost:8081").replace("10.0.0.7:8000", name)
            body = given[given.index("-d") + 1].replace("10.0.0.7:8000", name) if "-d" in given else None
            headers = {"content-type": "application/json"} if body else {}
            answer = await gateway.admin.request(method, path, content=body, headers=headers)
            assert answer.status_code < 400 or "already" in answer.text, (given, answer.text)
