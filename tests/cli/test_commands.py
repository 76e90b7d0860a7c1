from __future__ import annotations

import json
import os
import pkgutil
import pty
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import typer
from typer.main import get_group

import skerry.cli
from skerry.cli.main import COMMANDS
from tests import warm
from tests.cli.conftest import RUN, Skerry


def test_run_passes_on_output_and_exit_code(skerry: Skerry) -> None:
    done = skerry("run", "--", "python3", "-c", "import sys; print(1); print(2, file=sys.stderr); sys.exit(7)")
    assert (done.returncode, done.stdout, done.stderr) == (7, b"1\n", b"2\n")
    assert skerry("ls").stdout == b""


@pytest.mark.parametrize("command", [["providers"], ["run", "--", "true"]])
@pytest.mark.parametrize(
    ("variable", "value"),
    [("SANDBOX_BACKEND", "fly.io"), ("SKERRY_SERVICE_SECRET", "a-secret"), ("SKERRY_HOSTS", "a/b")],
)
def test_a_setting_that_cannot_be_used_is_told_by_its_name_and_not_its_value(
    environment: dict[str, str], command: list[str], variable: str, value: str
) -> None:
    done = warm.run(RUN, *command, env={**environment, variable: value}, timeout=100)
    assert (done.returncode, done.stdout) == (1, b"")
    (line,) = done.stderr.decode().splitlines()
    assert line.startswith(f"error: {variable} cannot be used: ")
    assert value not in line


def test_one_word_is_read_by_a_shell(skerry: Skerry) -> None:
    assert skerry("run", "-e", "A=b", "-w", "/tmp", "echo $A $PWD | tr a-z A-Z").stdout == b"B /TMP\n"


def test_every_byte_arrives_as_it_was(skerry: Skerry, tmp_path: Path) -> None:
    blob = os.urandom(2_000_000)
    assert skerry("run", "--", "cat", stdin=blob).stdout == blob
    (tmp_path / "blob").write_bytes(blob[:100_000])
    assert skerry("run", "--", "sh", "-c", "cat; cat >&2", stdin=blob[:100_000]).stdout == blob[:100_000]


def test_input_that_never_ends_does_not_hold_a_command_up(environment: dict[str, str]) -> None:
    with warm.Popen(
        RUN, "run", "--", "head", "-n1", stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"first\n")
        process.stdin.flush()
        assert process.stdout.read() == b"first\n"
        assert process.wait(60) == 0


def test_output_is_shown_while_the_command_runs(environment: dict[str, str]) -> None:
    with warm.Popen(
        RUN,
        *("run", "--", "sh", "-c", "echo ready; cat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.stdin.write(b"and more\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"and more\n"
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_destroys_the_sandbox_of_a_run(
    number: int, code: int, environment: dict[str, str], skerry: Skerry
) -> None:
    with warm.Popen(
        RUN, "run", "echo up; sleep 1000", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        process.send_signal(number)
        assert process.wait(60) == code
    assert skerry("ls").stdout == b""


def test_a_signal_that_is_said_twice_is_as_one(environment: dict[str, str], skerry: Skerry) -> None:
    line = (RUN, "run", "echo up; sleep 1000")
    with warm.Popen(
        *line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"up\n"
        for _ in range(20):
            process.terminate()
            time.sleep(0.005)
        assert (process.wait(60), process.stderr.read()) == (143, b"")
    assert skerry("ls").stdout == b""


def test_a_command_out_of_time_is_killed_and_said_so(skerry: Skerry) -> None:
    done = skerry("run", "--timeout", "0.3", "sleep 1000")
    assert done.returncode == 124
    assert b"killed after 0.3 seconds" in done.stderr


def test_a_sandbox_is_used_listed_looked_into_and_removed(skerry: Skerry) -> None:
    assert skerry("exec", "box", "--", "sh", "-c", "echo $0 > note; mkdir sub", "zero").returncode == 0
    assert skerry("exec", "box", "cat note").stdout == b"zero\n"
    name, state, image, *_ = skerry("ls").stdout.decode().rstrip("\n").split("\t")
    assert (name, state, image) == ("box", "hibernated", "host")
    assert [info["id"] for info in json.loads(skerry("ls", "--json").stdout)] == ["box"]
    files = [line.split("\t") for line in skerry("ls", "box:").stdout.decode().splitlines()]
    assert [(mode[0], shown) for mode, _, _, shown in files] == [("-", "note"), ("d", "sub")]
    assert json.loads(skerry("info", "box", "--json").stdout)["state"] == "hibernated"
    assert skerry("start", "box").stdout == b"active\n"
    assert skerry("stop", "box").stdout == b"hibernated\n"
    assert skerry("rm", "box").stdout == b"box\n"
    assert skerry("ls").stdout == b""


def test_create_takes_options(skerry: Skerry) -> None:
    made = json.loads(skerry("create", "opts", "-e", "A=1", "-l", "k=v", "--sleep-after", "1h", "--json").stdout)
    assert (made["env"], made["labels"], made["sleepAfter"]) == ({"A": "1"}, {"k": "v"}, 3600)
    assert skerry("exec", "opts", "echo $A").stdout == b"1\n"
    assert skerry("ls", "-l", "k=v").stdout.startswith(b"opts\t")
    assert skerry("ls", "-l", "k=w").stdout == b""
    assert skerry("create", "opts").returncode == 1
    assert skerry("rm", "opts").returncode == 0


def test_files_and_directories_are_copied_in_and_out(skerry: Skerry, tmp_path: Path) -> None:
    source = tmp_path / "app"
    (source / "deep").mkdir(parents=True)
    (source / "deep/data").write_bytes(os.urandom(100_000))
    (tmp_path / "single").write_text("one file")
    assert skerry("cp", source, tmp_path / "single", "copies:/workspace").returncode == 0
    assert skerry("exec", "copies", "cat single").stdout == b"one file"
    assert skerry("cp", "copies:/workspace/app", tmp_path / "back").returncode == 0
    assert (tmp_path / "back/deep/data").read_bytes() == (source / "deep/data").read_bytes()
    assert skerry("cp", "copies:single", tmp_path / "back").returncode == 0
    assert (tmp_path / "back/single").read_text() == "one file"
    assert skerry("cp", tmp_path / "missing", "never-made:/x").returncode == 1
    assert b"never-made" not in skerry("ls").stdout
    assert skerry("rm", "copies").returncode == 0


def test_looking_at_a_name_that_does_not_exist_does_not_make_it(skerry: Skerry) -> None:
    for line in (["ps", "typo"], ["logs", "typo", "p"], ["ls", "typo:/"], ["info", "typo"], ["cp", "typo:/a", "."]):
        done = skerry(*line)
        assert (done.returncode, done.stdout) == (1, b"")
        assert done.stderr.startswith(b"error: ")
        assert b"Traceback" not in done.stderr
    assert skerry("ls").stdout == b""


@pytest.mark.parametrize(
    "line",
    [
        [],
        ["nonsense"],
        ["exec"],
        ["exec", "box"],
        ["exec", "box", "--"],
        ["run", "--env", "novalue", "true"],
        ["cp", "a"],
        ["cp", "a", "b"],
        ["ls", "not-a-place"],
        ["serve", "--port", "70000"],
    ],
    ids=" ".join,
)
def test_a_line_that_makes_no_sense_exits_with_2(line: list[str], skerry: Skerry) -> None:
    done = skerry(*line)
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"Traceback" not in done.stderr


def test_a_server_that_is_not_there_is_one_line_and_a_hint(skerry: Skerry) -> None:
    done = skerry("--url", "http://127.0.0.1:9", "ls")
    assert done.returncode == 1
    assert [line.split(":")[0] for line in done.stderr.decode().splitlines()] == ["error", "hint"]


def test_the_machine_is_examined(skerry: Skerry) -> None:
    done = skerry("doctor", "--json")
    report = json.loads(done.stdout)
    assert report["ok"] is (done.returncode == 0)
    assert {"name", "ok", "fatal", "detail", "remedy"} <= set(report["findings"][0])
    assert skerry("version").stdout.startswith(b"skerry ")


def test_the_demo_does_real_work(skerry: Skerry) -> None:
    done = skerry("demo")
    assert done.returncode == 0, done.stderr
    assert b"25 primes below 100" in done.stdout
    assert b"2, 3, 5, 7, 11" in done.stdout
    assert skerry("ls").stdout == b""


def test_images_are_listed(skerry: Skerry) -> None:
    assert "host" in [image["name"] for image in json.loads(skerry("image", "list", "--json").stdout)]
    assert skerry("image", "remove", "nothing").returncode == 1


def test_help_names_every_command(skerry: Skerry) -> None:
    said = skerry("--help").stdout.decode()
    commands = "serve run exec shell ls ps logs cp rm image doctor demo create info stop start version"
    for command in commands.split():
        assert f"\n  {command} " in said
        assert skerry(command, "--help").returncode == 0


def test_a_shell_is_a_real_terminal(program: list[str], environment: dict[str, str], skerry: Skerry) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvpe(program[0], [*program, "shell", "term"], environment)
    shown = b""
    try:
        os.write(terminal, b"stty size; test -t 0 && echo is-a-tty; exit 9\n")
        while True:
            try:
                data = os.read(terminal, 65536)
            except OSError:
                break
            if not data:
                break
            shown += data
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 9
    assert b"is-a-tty\r\n" in shown
    assert skerry("rm", "term").returncode == 0


def test_a_shell_reads_a_script_from_a_pipe(skerry: Skerry) -> None:
    done = skerry("shell", "piped", stdin=b"echo $((6*7))\nexit 3\n")
    assert done.returncode == 3
    assert b"42" in done.stdout
    assert skerry("rm", "piped").returncode == 0


def test_every_command_is_found_in_the_module_that_has_it() -> None:
    modules = {found.name for found in pkgutil.iter_modules(skerry.cli.__path__)}
    having = {name for name in modules if hasattr(import_module(f"skerry.cli.{name}"), "register")}
    assert set(COMMANDS) == having
    for module, names in COMMANDS.items():
        part = typer.Typer()
        import_module(f"skerry.cli.{module}").register(part)
        part.callback()(lambda: None)
        assert set(get_group(part).commands) == set(names)


def test_the_version_is_an_option_as_well(skerry: Skerry) -> None:
    assert skerry("--version").stdout == skerry("version").stdout


def test_what_whoever_started_it_ignores_is_not_ignored_inside(tmp_path: Path) -> None:
    """As under nohup; what a shell finds ignored when it starts it cannot trap."""
    script = "for signal in HUP QUIT INT; do trap 'echo heard' $signal; kill -$signal $$; done"

    def ignore() -> None:
        for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)

    line = [sys.executable, "-m", "skerry.cli.main", "--home", str(tmp_path / "home"), "run", "--", "sh", "-c", script]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=60, preexec_fn=ignore, check=False)
    assert (ran.stdout, ran.returncode) == ("heard\n" * 3, 0), ran.stderr
