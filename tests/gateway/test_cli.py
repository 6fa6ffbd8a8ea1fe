"""The command line: verbs, flags made from the schema, exit codes, and what errors look like."""

import json
import logging
import re
import signal
import subprocess
import sys

import pytest
import shtab

from gateway import __version__, cli
from gateway.settings import Settings, flag

from ..conftest import HANDLED


@pytest.fixture
def as_found():
    """Puts back what a command sets for its process: signals, and where its log goes."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    level, outputs = logging.root.level, logging.root.handlers[:]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    logging.root.setLevel(level)
    logging.root.handlers[:] = outputs


pytestmark = pytest.mark.usefixtures("empty_folder")


def refused(capsys, *argv: str) -> str:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("hitherto: ") and err.endswith("\n")
    return err.removeprefix("hitherto: ").rstrip("\n")


def test_config_shows_value_and_source(capsys):
    assert cli.main(["config", "--port", "9000", "--no-response-headers"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^port: 9000 +# flag --port$", out, re.M)
    assert re.search(r"^response_headers: false +# flag --response-headers$", out, re.M)


def test_config_as_json(capsys, monkeypatch):
    monkeypatch.setenv("HITHERTO_LAUNCH", "3")
    assert cli.main(["config", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["launch"] == {"value": 3, "source": "environment HITHERTO_LAUNCH"}
    assert set(shown) == set(Settings.model_fields)


def test_every_field_is_a_flag_of_serve_under_its_subject(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, field in Settings.model_fields.items():
        assert flag(name) in text
        assert field.description.split()[0] in text
    assert "--admin-token @FILE" in text and "--redis-url URL" in text
    at = [text.index(f"\n{subject}:\n") for subject in cli.SUBJECTS.values()]
    assert at == sorted(at) and len(text.split("\n\n")[0].splitlines()) == 1, "and the usage is a line"
    assert set(cli.SUBJECTS) <= set(Settings.model_fields)


def test_replica_url_takes_many_may_be_repeated_and_has_aliases(capsys):
    argv = "config --json --replica-url http://a:1 http://b:1 --worker-urls http://c:1 --backend-url http://d:1".split()
    assert cli.main(argv) == 0
    urls = json.loads(capsys.readouterr().out)["replica_url"]["value"]
    assert urls == ["http://a:1", "http://b:1", "http://c:1", "http://d:1"]


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        ("serve", "there is no replica to send requests to. Give --replica-url http://HOST:PORT"),
        ("serve --polcy x", "unknown argument '--polcy'. Did you mean '--policy'?"),
        ("serve --port", "flag --port: expected one argument. `hitherto serve --help`"),
        ("serve --port --admin-port 3", "flag --port: expected one argument. `hitherto serve --help`"),
        ("serve --access-log=maybe", "ignored explicit argument 'maybe'. "),
        ("serve --cache-budget -1MiB", "flag --cache-budget: '-1MiB' is not a size; write"),
        (
            "serve --replica-url http://h:1 --host 203.0.113.7",
            "Cannot assign requested address. Stop what holds the port, or give another",
        ),
        ("serve --port http", "flag --port: 'http' is not a whole number. It takes port"),
        ("serve --replica-url ftp://localhost:8000", "flag --replica-url: replica URL 'ftp"),
        ("serve --config gone.yaml", "gone.yaml: cannot read the configuration"),
        ("srve --port 1", "unknown command 'srve'. Did you mean 'serve'?"),
        ("xyzzy", "unknown command 'xyzzy'. Known: serve, config"),
        ("--prot 8", "unknown argument '--prot': a command comes first"),
        ("serve --port 99999", "flag --port: '99999' is not a whole number up to 65535"),
        ("serve --launch two", "flag --launch: 'two' is not a whole number"),
        ("serve --pools nonsense", "flag --pools: 'nonsense' is not a table of names and values. It takes kinds"),
        ("serve --redis-url redis:6379", "flag --redis-url: it is no URL: write redis://HOST:PORT"),
        ("config nonsense", "unknown argument 'nonsense'. `hitherto config --help` lists what there is"),
        ("key nw", "'nw' is none of new. Did you mean 'new'?"),
        ("key new x --fil y", "unknown argument '--fil'. Did you mean '--file'?"),
        ("replica --prt 9000", "unknown argument '--prt'. Did you mean '--port'?"),
        ("replica --port 99999", "'99999' is no port: it reads 0 (any free one) to 65535"),
        ("replica --seed x", "--seed: invalid int value: 'x'"),
        ("explain", "required: BODY.json"),
        ("explain --replica-url http://a:1 one.json", "required: BODY.json"),
        ("replicas --replica-url http://a:1 drain", "flag --replica-url: replica URL 'drain'"),
        ("explain --prot", "unknown argument '--prot'. Did you mean '--port'?"),
        ("assets --forec", "unknown argument '--forec'. Did you mean '--force'?"),
        ("key new --clas=x", "unknown argument '--clas'. Did you mean '--class'?"),
        ("key --vrsion x", "unknown argument '--vrsion'. Did you mean '--version'?"),
        ("completion --hlp", "unknown argument '--hlp'. Did you mean '--help'?"),
        ("completion --hlp x", "unknown argument '--hlp'. Did you mean '--help'?"),
        ("explain -5 --wrong=-3", "unknown argument '--wrong'"),
        ("serve --dp-aware", "lists what there is; docs/migrating.md has the flags of other routers"),
        ("serve --policy cache_aware", "flag --policy: 'cache_aware' is none of least_time, "),
        ("key new --decode", "unknown argument '--decode'. `hitherto key new"),
    ],
)
def test_bad_use_is_one_line_with_a_remedy_and_exit_code_2(capsys, argv, expected, as_found):
    error = refused(capsys, *argv.split())
    assert expected in error and "\n" not in error


TABLES = ["discover", "pools", "scheduler", "request_router"]


@pytest.mark.parametrize("value", ["[]", "text", "[1]", "7", "true", "[{}]"])
@pytest.mark.parametrize("name", TABLES)
def test_what_is_no_table_where_one_belongs_is_refused_with_place_and_remedy(capsys, tmp_path, name, value):
    (tmp_path / "h.yaml").write_text(f"{name}: {value}\n")
    flag = "--" + name.replace("_", "-")
    for argv in (["config", flag, value], ["config", "--config", str(tmp_path / "h.yaml")]):
        error = refused(capsys, *argv)
        place = f"flag {flag}: " if flag in argv else f"file {tmp_path / 'h.yaml'}:1: {name}: "
        assert error.startswith(place) and "\n" not in error
        assert name not in error.removeprefix(place) and flag not in error.removeprefix(place), "named once"


def test_serve_hands_the_settings_to_the_gateway(monkeypatch):
    given = []
    monkeypatch.setitem(sys.modules, "gateway.app", type(sys)("gateway.app"))
    import gateway

    monkeypatch.setattr(gateway, "app", sys.modules["gateway.app"], raising=False)
    sys.modules["gateway.app"].serve = lambda settings: given.append(settings) or 7
    assert cli.main(["serve", "--launch", "2", "--policy", "random"]) == 7
    assert given == [Settings(launch=2, policy="random")]


def test_module_runs_and_stays_light():
    """`hitherto config` must not pay for numpy, aiohttp or a tokenizer."""
    code = (
        "import sys; from gateway.cli import main; assert main(['config']) == 0; "
        "heavy = {'numpy', 'aiohttp', 'tokenizers', 'jinja2', 'zmq', 'redis'} & set(sys.modules); assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "gateway", "config", "--port", "x"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2 and done.stderr.startswith("hitherto: flag --port")


def test_plan_is_the_load_generators_found_by_name(capsys):
    assert cli.main(["plan", "--model", "/nowhere"]) == 2
    assert "hitherto plan: --model /nowhere: there is no such folder" in capsys.readouterr().err


def test_plan_without_the_load_generator_says_so(capsys, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda **which: ())
    assert "pip install" in refused(capsys, "plan")


def test_the_command_alone_helps(capsys):
    assert cli.main([]) == 0
    out = capsys.readouterr().out
    assert "usage: hitherto" in out and all(f"\n    {verb} " in out for verb in ("serve", "doctor", "plan", "key"))


VERBS = "serve config explain doctor replicas completion key replica assets plan".split()


@pytest.mark.parametrize("words", ["version", "-V", "--version", *(f"{verb} --version" for verb in VERBS)])
def test_the_version_by_any_name(words, capsys):
    try:
        assert cli.main(words.split()) == 0
    except SystemExit as stopped:  # as argparse does it
        assert stopped.code == 0
    assert capsys.readouterr().out == f"hitherto {__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_flags(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "replica-url" in script and "doctor" in script


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("ser", ["serve"]),
        ("serve --policy least_t", ["least_time"]),
        ("replica --max-num-s", ["--max-num-seqs"]),
        ("key new --fil", ["--file"]),
    ],
)
def test_bash_completes_verbs_flags_and_policies(words, completed, capsys):
    assert cli.main(["completion", "bash"]) == 0
    check = f'eval "$(cat)"; COMP_WORDS=(hitherto {words}); COMP_CWORD=$(({len(words.split())})); _shtab_hitherto; echo "${{COMPREPLY[@]}}"'
    script = capsys.readouterr().out
    done = subprocess.run(["bash", "-c", check], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.split() == completed


def test_help_names_the_shells_and_the_path_that_is_taken(capsys):
    for argv, said in (
        (["completion", "--help"], ", ".join(shtab.SUPPORTED_SHELLS)),
        (["explain", "--help"], "/v1/chat/completions)"),
    ):
        with pytest.raises(SystemExit):
            cli.main(argv)
        assert said in " ".join(capsys.readouterr().out.split())


def test_a_variable_that_is_no_setting_is_named_and_those_of_kubernetes_are_not(monkeypatch, capsys):
    monkeypatch.setenv("HITHERTO_FOOBAR", "1")
    for name in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8080_TCP", "PORT_8080_TCP_ADDR"):
        monkeypatch.setenv(f"HITHERTO_{name}", "10.0.0.1")
        monkeypatch.setenv(f"HITHERTO_ADMIN_{name}", "10.0.0.1")  # a Service called hitherto-admin
    monkeypatch.setenv("HITHERTO_PORT", "tcp://10.0.0.1:8080")
    assert cli.main(["config"]) == 0
    assert (
        capsys.readouterr().err == "hitherto: environment HITHERTO_FOOBAR: this is no setting, so it changes nothing\n"
    )


OTHERS = (
    "ADMIN ADMIN_URL REPLICAS REPLICA_COUNT TLS_SECRET LOG LOG_FILE MODEL_DIR MODEL_NAME REDIS WORKERS_MAX DEMO_PORT "
    "HTTP_PORT HOME USER UID TAG KEYS CACHE_DIR TOKEN"
)


@pytest.mark.parametrize("name", OTHERS.split())
def test_a_variable_that_may_be_somebody_elses_stops_nothing_and_is_given_no_guess(monkeypatch, capsys, name):
    monkeypatch.setenv(f"HITHERTO_{name}", "x")
    assert cli.main(["config"]) == 0
    said = f"hitherto: environment HITHERTO_{name}: this is no setting, so it changes nothing\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("variable", "meant"),
    [("PROT", "PORT"), ("PRT", "PORT"), ("ADMINPORT", "ADMIN_PORT"), ("DRAIN_TIMEOUT", "DRAIN_TIMEOUT_S")],
)
def test_a_variable_that_is_nearly_a_setting_names_it_and_is_refused_however_near(monkeypatch, capsys, variable, meant):
    variable, meant = f"HITHERTO_{variable}", f"HITHERTO_{meant}"
    monkeypatch.setenv(variable, "1")
    assert cli.main(["config"]) == 2
    assert capsys.readouterr().err == f"hitherto: environment {variable}: unknown setting. Did you mean {meant}?\n"
    assert cli.main(["key", "new", "a"]) == 0
    said = f"hitherto: environment {variable}: this is no setting, so it changes nothing. Did you mean {meant}?\n"
    assert capsys.readouterr().err.startswith(said), "verbs with flags of their own, which read no settings"


def test_explain_says_why_nobody_answers(tmp_path, capsys):
    body = tmp_path / "body.json"
    body.write_text("{}")
    assert "--admin ftp://x: scheme 'ftp' is not supported, write http://HOST:PORT" in refused(
        capsys, "explain", str(body), "--admin", "ftp://x"
    )
    said = refused(capsys, "explain", str(body), "--admin", "http://nowhere.invalid:1")
    assert "no gateway answers at http://nowhere.invalid:1 (its host name does not resolve)" in said
    assert "nothing listens there" in refused(capsys, "explain", str(body), "--admin", "http://127.0.0.1:1")
