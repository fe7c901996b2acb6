"""The commands beside the demo, as a user calls them."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ascend_suite._app import COMMANDS, build_app, commands_for
from ascend_suite._version import __version__
from ascend_suite.commands import doctor as doctor_command
from ascend_suite.doctor import Machine
from ascend_suite.doctor.machine import Accelerator, Device, HostMemory, Library, Processors
from ascend_suite.plan import Plan
from ascend_suite.rules import RULES

NPU = Device(name="Ascend910B2", total_bytes=64 << 30)
GOOD = Machine(
    system="Linux",
    python="3.11.7",
    torch=Library(version="2.13.0"),
    torch_npu=Library(version="2.13.0"),
    accelerators=(Accelerator(kind="npu", devices=(NPU,) * 8),),
    memory=HostMemory(total_bytes=1 << 40),
    processors=Processors(count=8, allowed=frozenset(range(8)), threads=4),
)
LOCKED = HostMemory(total_bytes=1 << 40, memlock_bytes=8 << 20, memlock_hard_bytes=8 << 20)
ESCAPE = "\x1b"
MODEL = ["--layers=4", "--hidden=256", "--heads=4", "--seq=128", "--vocab=1000"]
FINE = "[recompute-norm]\n[swap-optimizer]\n"
REFUSED = "[swap-optimizer]\nswap_optimizer_tims = 4\n[reuse-fp32-param]\n"
BUSY = "[fused-ops]\n[recompute-activation]\n[training]\ndropout = 1\n"


def run(
    *arguments: str, stdin: str = "", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ascend_suite", *arguments],
        input=stdin,
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], str]:
    def write_plan(text: str, name: str = "plan.toml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_plan


Invoke = Callable[..., tuple[int, str, str]]


@pytest.fixture
def invoke(capsys: pytest.CaptureFixture[str]) -> Invoke:
    """Call the command in this process, as its entry point does."""
    from ascend_suite.cli import main

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert isinstance(caught.value.code, int)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err and ESCAPE not in captured.out
        return caught.value.code, captured.out, captured.err

    return call


def parsed(text: str, command: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(text)
    assert list(found)[:4] == ["format", "suite", "command", "ok"]
    assert (found["format"], found["suite"], found["command"]) == (1, __version__, command)
    return found


# check


def test_a_fine_plan_is_said_to_be_fine_with_its_order(
    invoke: Invoke, write: Callable[[str], str]
) -> None:
    path = write(FINE)
    code, out, err = invoke("check", path)
    assert (code, err) == (0, "")
    order = "recompute-norm, swap-optimizer"
    looked = f"2 features, {len(RULES)} rules looked at, in this order: {order}."
    assert out == f"{path} is fine: {looked}\n"


def test_all_that_is_wrong_is_said_with_why_and_instead(
    invoke: Invoke, write: Callable[[str], str]
) -> None:
    path = write(REFUSED)
    code, out, _ = invoke("check", path)
    assert code == 1
    lines = out.splitlines()
    assert lines[0] == "2 errors"
    assert "  error    swap-optimizer has no option 'swap_optimizer_tims'." in lines
    assert "  instead  did you mean swap_optimizer_times?" in lines
    assert "  error    swap-optimizer and reuse-fp32-param cannot be used together." in lines
    assert "  rule     swap-optimizer/reuse-fp32-param" in lines
    assert lines[-1].startswith(f"{path} is refused: 2 features, ")


def test_the_json_of_check_has_all_plans_and_findings(
    invoke: Invoke, write: Callable[..., str]
) -> None:
    fine, refused = write(FINE), write(REFUSED, "other.toml")
    code, out, _ = invoke("check", fine, refused, "--json")
    assert code == 1
    found = parsed(out, "check")
    assert found["ok"] is False
    first, second = found["plans"]
    assert first == {
        "source": fine,
        "ok": True,
        "features": ["recompute-norm", "swap-optimizer"],
        "rules": len(RULES),
        "findings": [],
    }
    assert second["ok"] is False
    keys = ["severity", "subject", "what", "why", "instead", "rule"]
    assert [list(finding) for finding in second["findings"]] == [keys, keys]
    assert {finding["rule"] for finding in second["findings"]} == {
        None,
        "swap-optimizer/reuse-fp32-param",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [("plan.json", '{"recompute-norm": {}}'), ("plan.yaml", "recompute-norm: {}\n")],
)
def test_plans_in_json_and_yaml_are_read(
    invoke: Invoke, write: Callable[..., str], name: str, text: str
) -> None:
    code, out, _ = invoke("check", write(text, name))
    assert code == 0 and "1 feature," in out


def test_standard_input_is_toml() -> None:
    done = run("check", "-", stdin=FINE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("standard input is fine")
    done = run("check", "-", stdin="[recompute-norm")
    assert done.returncode == 1
    assert "standard input cannot be read" in done.stdout and "Traceback" not in done.stderr


def test_flags_behind_two_dashes_are_a_plan(invoke: Invoke) -> None:
    flags = ["--swap-optimizer", "--bf16", "--reuse-fp32-param"]
    code, out, _ = invoke("check", "--json", "--", *flags)
    assert code == 1
    [plan] = parsed(out, "check")["plans"]
    assert plan["source"] == "flags"
    assert sorted(plan["features"]) == ["reuse-fp32-param", "swap-optimizer"]
    rules = {finding["rule"] for finding in plan["findings"]}
    assert {"swap-optimizer/reuse-fp32-param", "swap-optimizer/distributed-optimizer"} <= rules
    code, out, _ = invoke("check", "--json", "--framework=pytorch", "--", *flags)
    [plan] = parsed(out, "check")["plans"]
    rules = {finding["rule"] for finding in plan["findings"]}
    assert "swap-optimizer/reuse-fp32-param" in rules
    assert "swap-optimizer/distributed-optimizer" not in rules


def test_strict_makes_a_warning_an_error(invoke: Invoke, write: Callable[[str], str]) -> None:
    path = write('[swap-optimizer]\n[training]\nframework = "pytorch"\nbf16 = true\n')
    code, out, _ = invoke("check", path)
    assert code == 0
    assert out.startswith("1 warning\n") and f"{path} can be applied" in out
    code, out, _ = invoke("check", path, "--strict")
    assert code == 1 and f"{path} is refused" in out
    code, out, _ = invoke("check", path, "--strict", "--json")
    assert code == 1 and parsed(out, "check")["ok"] is False


def test_here_checks_against_what_is_installed(
    invoke: Invoke, write: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write("[swap-optimizer]\n")
    assert invoke("check", path)[0] == 0
    monkeypatch.setattr("ascend_suite.versions.installed_version", {"torch": "2.1.0"}.get)
    code, out, _ = invoke("check", path, "--here")
    assert code == 1 and "the suite needs torch" in out


def test_here_looks_for_cann(
    invoke: Invoke, write: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ascend_suite.versions.installed_version", {"torch-npu": "2.13.0"}.get)
    path = write('[swap-optimizer]\n[training]\ndevice = "npu"\n')
    for variable in ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"):
        monkeypatch.delenv(variable, raising=False)
    assert "CANN was not found" in invoke("check", path, "--here")[1]
    home = tmp_path / "cann"
    (home / "aarch64-linux").mkdir(parents=True)
    monkeypatch.setenv("ASCEND_HOME_PATH", str(home))
    assert "CANN" not in invoke("check", path, "--here")[1]
    (home / "aarch64-linux/ascend_toolkit_install.info").write_text("version=8.2.RC1\n")
    assert "CANN is older" in invoke("check", path, "--here")[1]


def test_a_rule_that_can_be_allowed_is_allowed(invoke: Invoke, write: Callable[[str], str]) -> None:
    path = write("[recompute-layers]\n[swap-attention]\n")
    code, out, _ = invoke("check", path, "--json")
    findings = parsed(out, "check")["plans"][0]["findings"]
    errors = [finding["rule"] for finding in findings if finding["severity"] == "error"]
    assert code == 1 and errors
    allowed = [argument for rule in errors for argument in ("--allow", rule)]
    code, out, _ = invoke("check", path, *allowed)
    assert code == 0 and "the plan allows it" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is no plan to look at"),
        (["nosuch.toml"], "nosuch.toml cannot be read"),
        ([os.curdir], "it is a folder"),
        ([""], "a path is empty"),
        (["-", "-"], "given twice"),
        (["--nosuch", "plan.toml"], "No such option"),
        (["--framework=jax", "--", "--bf16"], "--framework"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_checked_is_exit_code_2(
    invoke: Invoke, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    code, out, err = invoke("check", *arguments)
    assert (code, out) == (2, "")
    assert message in err


# features, explain


def test_features_are_listed_with_their_packages(invoke: Invoke) -> None:
    code, out, _ = invoke("features")
    assert code == 0
    assert "swap-optimizer" in out and "ascend-swap 0.1.0" in out
    code, out, _ = invoke("features", "--json")
    features = {one["name"]: one for one in parsed(out, "features")["features"]}
    swap = features["swap-optimizer"]
    assert (swap["package"], swap["target"], swap["moves_to_host"]) == (
        "ascend-swap",
        "optimizer",
        True,
    )
    options = {option["name"]: option for option in swap["options"]}
    assert options["swap_optimizer_times"]["default"] == "None"
    assert all(option["meaning"] for one in features.values() for option in one["options"])


def test_one_feature_is_shown_with_its_options(invoke: Invoke) -> None:
    code, out, _ = invoke("features", "swap-optimizer")
    assert code == 0 and "swap_optimizer_times" in out and "recompute-norm" not in out
    code, out, err = invoke("features", "nosuch")
    assert (code, out) == (2, "") and "there is no feature called 'nosuch'" in err
    assert "did you mean swap-optimizer?" in invoke("features", "swap_optimizer")[2]


def test_explain_says_why_two_do_not_go_together(invoke: Invoke) -> None:
    code, out, _ = invoke("explain", "swap-optimizer", "reuse-fp32-param")
    assert code == 0
    assert out.startswith("swap-optimizer and reuse-fp32-param cannot be used together.\n")
    assert "\n  why      " in out and "\n  instead  " in out and "order" not in out
    code, out, _ = invoke("explain", "swap-optimizer", "reuse-fp32-param", "--json")
    verdict = parsed(out, "explain")
    assert verdict["kind"] == "refused"
    assert "swap-optimizer/reuse-fp32-param" in {rule["id"] for rule in verdict["rules"]}


def test_explain_says_that_two_go_together_and_in_which_order(invoke: Invoke) -> None:
    code, out, _ = invoke("explain", "swap-optimizer", "recompute-norm")
    assert code == 0
    assert "recompute-norm" in out and "in this order: recompute-norm, swap-optimizer." in out


def test_explain_takes_a_flag_behind_two_dashes(invoke: Invoke) -> None:
    code, out, _ = invoke("explain", "swap-optimizer", "--", "--bf16")
    assert code == 0 and "swap-optimizer and bf16" in out


def test_a_name_that_is_none_is_exit_code_2(invoke: Invoke) -> None:
    code, out, err = invoke("explain", "swap-optimiser", "recompute-norm")
    assert (code, out) == (2, "") and "did you mean swap-optimizer" in err


# doctor


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machine], None]:
    def put(machine: Machine) -> None:
        monkeypatch.setattr(doctor_command, "read_machine", lambda *, seconds: machine)

    return put


def test_doctor_on_a_good_machine(invoke: Invoke, on_machine: Callable[[Machine], None]) -> None:
    on_machine(GOOD)
    code, out, _ = invoke("doctor")
    assert code == 0
    assert "npu              8 x Ascend910B2, 64.0 GiB" in out
    assert out.endswith("\nNothing here will make training fail or slow.\n")
    code, out, _ = invoke("doctor", "--json")
    found = parsed(out, "doctor")
    assert code == 0 and found["ok"] is True and found["findings"] == []
    assert set(found["machine"]) == {field.name for field in dataclasses.fields(Machine)}


def test_doctor_exit_codes(invoke: Invoke, on_machine: Callable[[Machine], None]) -> None:
    on_machine(dataclasses.replace(GOOD, memory=LOCKED))  # a warning
    assert invoke("doctor")[0] == 0
    assert invoke("doctor", "--strict")[0] == 1
    broken = dataclasses.replace(GOOD.torch, failure="OSError: libgomp.so.1")
    on_machine(dataclasses.replace(GOOD, torch=broken))
    code, out, _ = invoke("doctor", "--json")
    found = parsed(out, "doctor")
    assert code == 1 and found["ok"] is False
    assert found["findings"][0]["rule"] == "machine/torch"
    code, out, err = invoke("doctor", "--timeout=0")
    assert (code, out) == (2, "") and "--timeout is 0" in err


# the whole


def test_help_lists_every_command_and_version_is_said(invoke: Invoke) -> None:
    code, out, _ = invoke("--help")
    assert code == 0
    for command in COMMANDS:
        assert f" {command} " in out
    assert invoke("--version")[:2] == (0, f"ascend-suite {__version__}\n")


def test_one_command_is_made_where_one_is_asked_for(invoke: Invoke) -> None:
    assert commands_for(["check", "plan.toml"]) == ["check"]
    assert commands_for([]) == commands_for(["--help"]) == commands_for(["chek"]) == COMMANDS
    for command in COMMANDS:
        assert [one.name for one in build_app([command]).registered_commands] == [command]
    code, _, err = invoke("chek")
    assert code == 2 and "'check'" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_its_exit_codes(invoke: Invoke, command: str) -> None:
    code, out, _ = invoke(command, "--help")
    assert code == 0
    assert "Exit code 0" in " ".join(out.split()) and "--json" in out


def test_suggest_takes_fused_ops_where_it_may_round_otherwise(invoke: Invoke) -> None:
    words = ("suggest", "--hbm=100MiB", "--json", *MODEL)
    exact, other = (json.loads(invoke(*words, *more)[1]) for more in ([], ["--not-bitwise"]))
    looked_at = [[one["features"] for one in found["runners_up"]] for found in (exact, other)]
    assert not any("fused-ops" in features for features in looked_at[0])
    assert "fused-ops" in other["chosen"]["features"]


LIGHT = [
    ["--help"],
    ["check", "-"],
    ["check", "--here", "--json", "-"],
    ["check", "--", "--bf16"],
    ["explain", "swap-optimizer", "recompute-norm"],
    ["features"],
    ["estimate", "--layers=2"],
    ["estimate", *MODEL],
    ["suggest", "--hbm=1GiB", *MODEL],
    ["doctor", "--timeout=0"],
]


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_no_command_but_demo_and_doctor_loads_what_is_slow(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from ascend_suite.cli import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'torch_npu', 'numpy', 'matplotlib', 'megatron', 'triton'}\n"
        "plain = {'pygments', 'markdown_it', 'rich.markdown', 'rich.traceback'}\n"
        f"found = heavy | (plain if {arguments != ['--help']} else set())\n"
        "sys.exit(', '.join(sorted(found & set(sys.modules))) or None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], input=FINE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def on_terminal(arguments: Sequence[str], **env: str) -> str:
    """What a command prints when its output is a terminal."""
    above, below = pty.openpty()
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "ascend_suite", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=below,
            env={**environment, "TERM": "xterm-256color", "COLUMNS": "60", **env},
        )
        os.close(below)
        printed = b""
        while True:
            try:
                chunk = os.read(above, 1 << 16)
            except OSError:  # Linux says so that the other end is closed
                break
            if not chunk:
                break
            printed += chunk
        assert process.wait() == 1
    finally:
        os.close(above)
    return printed.decode()


def test_colours_and_line_breaks_are_for_terminals(write: Callable[[str], str]) -> None:
    path = write(REFUSED)
    colour = re.compile(r"\x1b\[[0-9;]*(3[0-9]|1;3[0-9])m")
    shown = on_terminal(["check", path])
    assert colour.search(shown)
    assert not colour.search(on_terminal(["check", path], NO_COLOR="1"))
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    found = [line for line in plain.splitlines() if line.startswith("  ")]
    assert len(found) > 10 and max(map(len, found)) <= 60
    piped = run("check", path, env={"COLUMNS": "60"})
    assert ESCAPE not in piped.stdout
    assert max(map(len, piped.stdout.splitlines())) > 100, "lines of a pipe are whole"


@pytest.mark.parametrize("arguments", [["features"], ["check", "-", "--json"]], ids=" ".join)
def test_a_pipe_that_is_closed_ends_it_without_a_word(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "ascend_suite", *arguments],
        input=FINE.encode(),
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert done.returncode == -signal.SIGPIPE
    assert done.stderr == b""


@pytest.mark.parametrize("arguments", [["features"], ["suggest", "--help"]], ids=" ".join)
def test_an_output_that_lacks_letters_gets_the_others(arguments: list[str]) -> None:
    done = run(*arguments, env={"PYTHONIOENCODING": "ascii", "COLUMNS": "80"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii() and "?" in done.stdout


@pytest.mark.parametrize("arguments", [["features"], ["features", "--json"]], ids=" ".join)
def test_without_an_output_the_exit_code_is_the_same(arguments: list[str]) -> None:
    words = [sys.executable, "-m", "ascend_suite", *arguments]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *words]
    done = subprocess.run(closed, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def completions(words: str) -> list[str]:
    env = {
        "_ASCEND_SUITE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    return run(env=env).stdout.splitlines()


def test_a_shell_is_offered_features_rules_and_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("plan.toml", "plan.txt"):
        (tmp_path / name).touch()
    assert completions("ascend-suite features recompute-n") == ["recompute-norm"]
    assert completions("ascend-suite explain swap-o") == ["swap-optimizer"]
    assert completions("ascend-suite check pl") == ["plan.toml"]
    assert completions("ascend-suite demo --features recompute-norm,recompute-a") == [
        "recompute-norm,recompute-activation"
    ]
    allowed = [rule.id for rule in RULES if rule.proof is not None]
    assert allowed
    offered = completions("ascend-suite check --allow ")
    assert sorted(offered) == sorted(allowed)


# estimate, suggest


def test_estimate_adds_up_and_compares_with_plain(
    invoke: Invoke, write: Callable[[str], str]
) -> None:
    path = write("[swap-optimizer]\n")
    code, out, _ = invoke("estimate", path, *MODEL)
    assert code == 0
    assert "plain" in out and "with the plan" in out and "swap-optimizer, on npu." in out
    code, out, _ = invoke("estimate", path, *MODEL, "--json")
    found = parsed(out, "estimate")
    assert code == 0 and found["plan"]["features"] == ["swap-optimizer"]
    assert found["plain"]["features"] == []
    for one in (found["plain"], found["plan"]):
        [peak] = [m for m in one["moments"] if m["name"] == one["peak_at"]]
        assert sum(peak["bytes"].values()) == one["peak_bytes"] > 0
    assert found["plan"]["peak_bytes"] < found["plain"]["peak_bytes"]
    assert found["plan"]["host_bytes"] > 0


def test_a_model_is_given_by_options_a_file_and_the_plan_in_this_order(
    invoke: Invoke, write: Callable[..., str]
) -> None:
    plan = write("[training]\nnum_layers = 2\nhidden_size = 128\nseq_length = 64\nbf16 = true\n")
    model = write("[model]\nhidden = 192\nheads = 4\nvocab = 500\n", "model.toml")
    code, out, _ = invoke("estimate", plan, f"--model={model}", "--vocab=1000", "--json")
    shape = parsed(out, "estimate")["plan"]["shape"]
    assert code == 0
    given = {"layers": 2, "hidden": 192, "heads": 4, "seq": 64, "vocab": 1000, "dtype": "bfloat16"}
    assert {name: shape[name] for name in given} == given


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["estimate", "--layers=4"], "the model's hidden, heads, seq, vocab are not known"),
        (["estimate", *MODEL, "--layers=0"], "layers"),
        (["estimate", *MODEL, "--heads=3"], "hidden=256 cannot be split into heads=3"),
        (["estimate", *MODEL, "--flops=0"], "flops is 0"),
        (["estimate", *MODEL, "--dtype=int8"], "--dtype"),
        (["estimate", *MODEL, "nosuch.toml"], "nosuch.toml cannot be read"),
        (["estimate", *MODEL, "{refused}"], "did you mean swap_optimizer_times"),
        (["estimate", *MODEL, "--model={model}"], "a model has no 'hiden'"),
        (["estimate", *MODEL, "--model=nosuch.toml"], "nosuch.toml cannot be read"),
        (["suggest", *MODEL], "--hbm"),
        (["suggest", *MODEL, "--hbm=much"], "'much' is no size"),
        (["suggest", "--hbm=1GiB"], "are not known"),
    ],
    ids=" ".join,
)
def test_a_wrong_model_is_exit_code_2(
    invoke: Invoke,
    write: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    files = {"refused": write(REFUSED), "model": write("[model]\nhiden = 1\n", "model.toml")}
    code, out, err = invoke(*(argument.format(**files) for argument in arguments))
    assert (code, out) == (2, "")
    assert message in err


def test_suggest_names_a_plan_that_fits_and_others(invoke: Invoke) -> None:
    code, out, _ = invoke("estimate", *MODEL, "--json")
    peak = parsed(out, "estimate")["plain"]["peak_bytes"]
    code, out, _ = invoke("suggest", *MODEL, f"--hbm={peak - 1}", "--json")
    found = parsed(out, "suggest")
    assert code == 0 and found["ok"] is True and found["hbm"] == peak - 1
    assert found["chosen"]["features"] and found["chosen"]["peak_bytes"] < peak
    assert found["chosen"]["why"] and found["short_by"] == 0
    plan = Plan.from_mapping(found["chosen"]["plan"])
    assert sorted(plan.features) == found["chosen"]["features"]
    assert all("plan" in other for other in found["runners_up"])
    code, out, _ = invoke("suggest", *MODEL, f"--hbm={peak - 1}")
    assert code == 0 and found["chosen"]["features"][0] in out


def test_suggest_says_by_how_much_nothing_fits(invoke: Invoke) -> None:
    code, out, _ = invoke("suggest", *MODEL, "--hbm=1MiB", "--json")
    found = parsed(out, "suggest")
    assert code == 1 and found["ok"] is False
    assert found["chosen"] is None and found["short_by"] > 0
    code, out, _ = invoke("suggest", *MODEL, "--hbm=1MiB")
    assert code == 1 and out.startswith("No plan fits 1.00 MiB: the smallest takes ")
