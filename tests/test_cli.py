"""The command line: flags are the fields of the configs, and each mistake gives one sentence."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import __version__
from paceline.cli import _api_key, main
from paceline.cli.parser import build_parser
from paceline.cli.services import SERVICES
from paceline.core.speculative import speculative_help
from paceline.models.files.folder_lease import FolderLease

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


def paceline(*arguments: str, program: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, after the Python code in `program`."""
    code = f"{program}\nimport sys\nfrom paceline.cli import main\nsys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def code_of(arguments: list[str]) -> int | str | None:
    """Run the command in this process, for mistakes that it finds before it starts anything; return its exit code."""
    try:
        return main(arguments)
    except SystemExit as ended:
        return ended.code


def test_python_m_paceline_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "paceline", "version"], cwd=ROOT, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout.decode()) == (0, f"paceline {__version__}\n")


def test_the_overview_names_every_command_and_fits_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert all(f"\n  {name} " in text for name in (*SERVICES, "prepare", "cache", "version"))
    assert len(text.splitlines()) <= 35


@pytest.mark.parametrize(("given", "meant"), [("fp8", "fp8_e4m3"), ("FP8", "fp8_e4m3"), ("INT8", "int8")])
def test_a_choice_may_have_another_name(given: str, meant: str) -> None:
    parsed = build_parser().parse_args(["decode", "folder", "--kv-cache-dtype", given])
    assert parsed.kv_cache_dtype == meant


@pytest.mark.parametrize("name", SERVICES)
def test_help_shows_every_option_except_hidden_ones(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--help"])
    text = capsys.readouterr().out
    assert end.value.code == 0
    names = SERVICES[name].config.model_fields.keys() - {"ready_fd", "supervisor_socket", "model"}
    assert all(re.search(rf"  --{field.replace('_', '-')}[ ,]", text) for field in names)
    assert "ready-fd" not in text


def test_help_shows_defaults_that_say_something(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("--port") and line.endswith("[8000]") for line in lines)
    assert not any(line.endswith("[]") for line in lines)


@pytest.mark.parametrize("command", ["serve", "prefill", "decode"])
def test_help_lists_the_fields_of_speculative_config(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([command, "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert set(map(str.strip, speculative_help().splitlines())) <= set(lines)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serve", "--port", "x"], "paceline: argument --port: invalid int value: 'x'; see paceline serve --help"),
        (["serve", "--prot", "1"], "paceline: unrecognized arguments: --prot; see paceline --help"),
        (["serve", "--log-format", "xml"], "paceline: argument --log-format: invalid choice: 'xml'"),
        (["decode", "m", "--quantization", "int2"], "paceline: argument --quantization: invalid choice: 'int2'"),
        (["prepare"], "paceline: the following arguments are required: MODEL"),
        (["serve", "--decode", "0"], "paceline: --decode must be at least 1 without --planner"),
        (["decode"], "paceline: decode needs a model: paceline decode MODEL"),
        (["serve", "org/m", "--models-file", "models.toml"], "paceline: MODEL and --models-file exclude each other"),
        (["decode", "m", "--log-level", "loud"], "paceline: argument --log-level: invalid choice: 'loud'"),
        (
            ["decode", "org/m"],
            "paceline: decode takes the folder of a model; run: paceline prepare org/m, which prints",
        ),
        (["serve", "--config", "/no/such.toml"], "paceline: cannot read /no/such.toml"),
        (["serve", "--kv-tier-memory", "1GiB"], "paceline: there is no option --kv-tier-memory: it is --kv-memory now"),
        (
            ["decode", "m", "--kv-memory", "1GiB"],
            "paceline: there is no option --kv-memory: the size of a worker's own",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(sentence)
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("toml", "sentence"),
    [
        ('log-format = "xml"', "--log-format must be text or json, not 'xml'"),
        ("[serve]\ndecode = 'two'", "--decode must be of type int, not str"),
        ("[serve]\ndecoders = 2", "[serve] has no option 'decoders'"),
        ("[serve]\ndecode = 0", "--decode must be at least 1"),
    ],
)
def test_a_mistake_in_the_file_is_one_sentence(
    tmp_path: Path, toml: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "stack.toml"
    file.write_text(toml)
    assert code_of(["serve", "--config", str(file)]) == 2
    printed = capsys.readouterr().err
    assert sentence in printed
    assert printed.count("\n") == 1


def test_a_flag_wins_over_the_file_even_with_its_default(tmp_path: Path) -> None:
    file = tmp_path / "stack.toml"
    # If the file won, the error would be about decode workers.
    file.write_text("[serve]\ndecode = 0\nprefill = -1")
    done = paceline("serve", "--config", str(file), "--decode", "1")
    assert "--prefill must be at least 0" in done.stderr


def test_workers_images_need_no_packages_of_the_gateway(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['fastapi'] = None"
    for arguments in (["token", str(tmp_path / "a"), str(tmp_path / "b")], ["--help"], ["version"]):
        code = f"{hide}; from paceline.cli import main; sys.exit(main({arguments!r}))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
    assert (tmp_path / "b").exists()


def test_a_missing_package_is_told_with_its_extra() -> None:
    hide_torch = "import sys; sys.modules['torch'] = None"
    done = paceline("decode", ".", program=hide_torch)
    assert done.returncode == 2
    assert done.stderr == "paceline: decode needs torch, which is not installed: pip install 'paceline[worker]'\n"


def test_the_gateway_runs_where_torch_is_not_installed(tmp_path: Path) -> None:
    hide = "import sys\nfor name in ('torch', 'transformers', 'safetensors'): sys.modules[name] = None"
    done = paceline("gateway", str(tmp_path), "--port=0", program=hide)
    assert done.returncode == 2
    assert f"{tmp_path} has no tokenizer.json" in done.stderr


def test_a_bug_keeps_its_traceback() -> None:
    break_it = "import paceline.services.serve.main as m\nasync def run(config): 1 / 0\nm.run = run"
    done = paceline("serve", program=break_it)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "ZeroDivisionError" in done.stderr


def test_a_failure_while_running_is_one_sentence_and_exit_code_1() -> None:
    fail = (
        "import paceline.services.serve.main as m\nfrom paceline.core.errors import UnavailableError\n"
        "async def run(config): raise UnavailableError('it went away')\nm.run = run"
    )
    done = paceline("serve", program=fail)
    assert (done.returncode, done.stderr) == (1, "paceline: it went away\n")


def test_a_draft_model_that_is_not_there_is_one_sentence() -> None:
    done = paceline("serve", "--port=0", "-sc", '{"model": "/no/such"}')
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("paceline: prepare (draft model) failed: /no/such does not exist; give a")


def test_the_command_line_itself_loads_nothing_heavy() -> None:
    look = "import atexit, sys; atexit.register(lambda: print({'torch', 'grpc', 'transformers'} & set(sys.modules)))"
    assert paceline("version", program=look).stdout.splitlines()[-1] == "set()"


def write_toy_folder(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")


def test_prepare_prints_the_folder_alone(tmp_path: Path) -> None:
    write_toy_folder(tmp_path)
    done = paceline("prepare", str(tmp_path))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}\n")


def test_prepare_reads_the_file_of_all_services(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_toy_folder(tmp_path / "model")
    file = tmp_path / "paceline.toml"
    file.write_text('port = 7300\ntrust-remote-code = true\nmodel-impl = "native"\n[decode]\nmax-seqs = 64\n')
    arguments = ["prepare", str(tmp_path / "model"), f"--config={file}"]
    assert code_of(arguments) == 2
    assert "--trust-remote-code needs --model-impl auto or transformers" in capsys.readouterr().err
    done = paceline(*arguments, "--no-trust-remote-code")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'model'}\n")


def test_prepare_links_to_the_folder(tmp_path: Path) -> None:
    link = tmp_path / "served" / "org" / "name"
    for name in ("one", "two"):
        write_toy_folder(tmp_path / name)
        done = paceline("prepare", str(tmp_path / name), f"--link={link}")
        assert (done.returncode, done.stdout) == (0, f"{tmp_path / name}\n")
        assert link.readlink() == tmp_path / name
    assert paceline("prepare", str(link), f"--link={link}").returncode == 0
    assert link.readlink() == tmp_path / "two"
    done = paceline("prepare", str(link), f"--link={tmp_path / 'one'}")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "cannot make the link" in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "served", "two"]


def test_prepare_tells_what_a_folder_lacks(tmp_path: Path) -> None:
    done = paceline("prepare", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"paceline: {tmp_path} lacks config.json")


def test_a_new_key_is_printed_with_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert code_of(["key", "alice"]) == 0
    key, _, lines = capsys.readouterr().out.partition("\n\n")
    assert re.fullmatch(r"pl-[\w-]{43}", key)
    assert re.fullmatch(r'\["alice"\]\nsha256 = "[0-9a-f]{64}"\n', lines)


def test_commands_send_the_admin_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_API_KEY", "client")
    assert _api_key({"api_key": ""}) == "client"
    monkeypatch.setenv("PACELINE_ADMIN_KEY", "admin, other")
    assert _api_key({"api_key": ""}) == "admin"
    assert _api_key({"api_key": "given"}) == "given"


def test_the_cache_is_shown_and_pruned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tmp_path / f"small-{'0' * 16}" / "small"
    model.mkdir(parents=True)
    (model / "config.json").write_bytes(b" " * 2000)
    os.utime(model, (1e9, 1e9))
    place = f"--cache-dir={tmp_path}"
    assert code_of(["cache", place, "--cache-size=1GiB"]) == 0
    heading, line, total = capsys.readouterr().out.splitlines()
    assert heading.split() == ["MODEL", "WHAT", "SIZE", "LAST", "USE", "IN", "USE"]
    assert re.fullmatch(r"small +conversion +2 kB +2001-09-0\d \d\d:\d\d +no", line)
    assert total == f"{tmp_path}: 2 kB of 1.1 GB"
    assert code_of(["cache", "prune", place, "--older-than=100000"]) == 0
    assert code_of(["cache", "prune", place, "--cache-size=1MiB"]) == 0
    assert capsys.readouterr().out == f"removed 0 results of 0 kB from {tmp_path}\n" * 2
    lease = FolderLease(model)
    assert code_of(["cache", "prune", place, "--all"]) == 0
    assert capsys.readouterr().out == f"removed 0 results of 0 kB from {tmp_path}; 1 in use stay\n"
    lease.close()
    os.utime(model, (1e9, 1e9))
    assert code_of(["cache", "prune", place, "--older-than=30"]) == 0
    assert capsys.readouterr().out == f"removed 1 result of 2 kB from {tmp_path}\n"
    assert not model.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--all"], "--all and --older-than are for paceline cache prune"),
        (["prune", "--all", "--older-than=3"], "--all and --older-than exclude each other; leave one of them out"),
        (["prune", "--older-than=-1"], "--older-than must be at least 0 days, not -1"),
        (["prune", "--cache-size=0"], "--cache-size must not be 0; write it like 512MiB or 4GiB"),
    ],
)
def test_wrong_options_of_the_cache_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert code_of(["cache", f"--cache-dir={tmp_path}", *arguments]) == 2
    assert capsys.readouterr().err == f"paceline: {said}\n"
