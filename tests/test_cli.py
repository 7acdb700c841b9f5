"""The `contbatch` command: what it says, what it writes, and that bad input ends in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from contbatch.cli import run
from contbatch.commands import doctor
from contbatch.commands.bars import model_bars
from contbatch.nbtools import notebook_folder
from contbatch.policies import POLICIES
from contbatch.verify import verify

GOLDEN = Path(__file__).parent / "golden"


def call(*arguments: object) -> int:
    return run([str(argument) for argument in arguments])


def golden(name: str) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads((GOLDEN / name).read_text(encoding="utf-8"))
    return recording


def save(recording: object, folder: Path) -> Path:
    path = folder / "recording.json"
    path.write_text(recording if isinstance(recording, str) else json.dumps(recording), encoding="utf-8")
    return path


BAD = {
    "unknown command": (["frob"], "frob"),
    "unknown option": (["demo", "--frob"], "--frob"),
    "not a number": (["demo", "--budget", "many"], "--budget"),
    "unknown model": (["demo", "--model", "pockte"], "did you mean 'pocket'"),
    "unknown policy": (["demo", "--policy", "VllmV2"], "did you mean VllmV1"),
    "absent device": (["demo", "--device", "tpu"], "tpu"),
    "unknown dtype": (["demo", "--dtype", "int3"], "int3"),
    "budget of 0": (["demo", "--budget", "0"], "max_num_batched_tokens is 0"),
    "no blocks": (["demo", "--blocks", "0"], "num_blocks is 0"),
    "pool too small": (["demo", "--blocks", "2"], "num_blocks=2"),
    "no tokens": (["demo", "--max-tokens", "0"], "max_tokens is 0"),
    "page in no folder": (["demo", "--out", "nowhere/run.html"], "nowhere"),
    "page is a folder": (["demo", "--out", "."], "is a folder"),
    "no file to verify": (["verify"], "files"),
    "no such recording": (["verify", "none.json"], "none.json"),
    "unknown model to fetch": (["models", "fetch", "pockte"], "pockte"),
    "no such notebook": (["notebooks", "check", "none.ipynb"], "none.ipynb"),
    "no notebooks in a folder": (["notebooks", "update", "."], "no notebooks"),
    "no notebook command": (["notebooks"], "command"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_status_2(
    case: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, said = BAD[case]
    monkeypatch.chdir(tmp_path)
    assert call(*arguments) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(r"contbatch: [^\n]+\n", err), err
    assert said in err
    assert list(tmp_path.iterdir()) == []


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--help") == call() == call("demo", "--help") == 0
    shown = capsys.readouterr().out
    for command in ("demo", "lab", "doctor", "models", "verify", "notebooks"):
        assert command in shown
    assert call("--version") == 0
    assert re.fullmatch(r"contbatch \d+\.\d+\.\d+\n", capsys.readouterr().out)


def test_help_does_not_load_what_the_commands_need() -> None:
    script = (
        "import sys; from contbatch.cli import run; run(['--help']);"
        "sys.exit(bool({'torch', 'numpy', 'matplotlib', 'nbformat', 'ipywidgets'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=False).returncode == 0


# demo


@pytest.fixture(scope="module")
def demonstrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What `contbatch demo` printed, and its page."""
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "contbatch", "demo", "--max-tokens", "24", "--out", "run.html"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in folder.iterdir()] == ["run.html"]
    return done.stdout, (folder / "run.html").read_text(encoding="utf-8")


def test_demo_shows_every_request_and_the_totals(demonstrated: tuple[str, str]) -> None:
    printed, _ = demonstrated
    rows = re.findall(r"^ r(\d) .* (\d+) +(\d+) +\d+\.\d+ +\d+\.\d+ +\d+\.\d+ +(\d+) +(\w+)", printed, re.MULTILINE)
    assert [int(row[0]) for row in rows] == list(range(8))
    assert all(1 <= int(row[2]) <= 24 for row in rows)
    for word in ("TTFT", "TPOT", "E2E", "preempted", "finish", "8 completed", "token budget used"):
        assert word in printed
    assert "run.html" in printed and "file://" in printed


def test_demo_writes_a_page_that_needs_nothing(demonstrated: tuple[str, str]) -> None:
    _, page = demonstrated
    assert "Once upon a time" in page
    assert not re.search(r"(?:src|href)=[\"']?https?:", page)


def test_quiet_demo_says_only_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("demo", "--quiet", "--max-tokens", 2, "--out", tmp_path / "run.html") == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert (tmp_path / "run.html").exists()


# lab


def test_lab_copies_and_never_replaces_without_being_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "lessons"
    assert call("lab", folder, "--no-start") == 0
    ours = sorted(path.name for path in notebook_folder().glob("*.ipynb"))
    assert sorted(path.name for path in folder.glob("*.ipynb")) == ours
    mine = folder / ours[0]
    mine.write_text("my answers")
    (folder / ours[-1]).unlink()
    capsys.readouterr()
    assert call("lab", folder, "--no-start") == 0
    said = capsys.readouterr().out
    assert mine.read_text() == "my answers"
    assert f"kept yours: {ours[0]}" in said and "--overwrite" in said
    assert (folder / ours[-1]).exists()
    assert call("lab", folder, "--no-start", "--overwrite") == 0
    assert mine.read_bytes() == (notebook_folder() / ours[0]).read_bytes()


def test_lab_says_when_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert call("lab", tmp_path / "file", "--no-start") == 2
    assert "choose another place" in capsys.readouterr().err


def test_lab_starts_jupyterlab_in_the_folder_with_our_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[list[str]] = []

    class Process:
        def __init__(self, command: list[str]) -> None:
            started.append(command)

        def wait(self) -> int:
            return 5

    monkeypatch.setattr(subprocess, "Popen", Process)
    assert call("lab", tmp_path / "lessons", "--", "--no-browser") == 5
    assert started == [[sys.executable, "-m", "jupyterlab", "--no-browser", str(tmp_path / "lessons")]]


# doctor


def test_doctor_finds_everything_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("doctor") == 0
    said = capsys.readouterr().out
    for subject in (
        "Python",
        "torch",
        "devices",
        "threads",
        "CPU kernels",
        "model pocket",
        "notebooks",
        "Jupyter kernel",
        "Chromium",
    ):
        assert subject in said


def _without_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_declared", lambda: ["absent-package>=1", "pytest>=8; extra == 'test'"])


def _with_old_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_declared", lambda: ["numpy>=99"])


def _without_notebooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("contbatch.nbtools.files.notebook_folder", lambda: Path("nowhere"))


def _without_model(monkeypatch: pytest.MonkeyPatch) -> None:
    from contbatch.models import ModelInfo

    lost = [ModelInfo("pocket", "", "included", Path("nowhere"))]
    monkeypatch.setattr("contbatch.models.list_models", lambda: lost)


def _with_the_kernel_of_another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from jupyter_client.kernelspec import KernelSpec, KernelSpecManager

    other = KernelSpec(argv=["/elsewhere/python", "-m", "ipykernel_launcher"])
    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", lambda self, name: other)


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (_without_package, "pip install 'absent-package>=1'"),
        (_with_old_package, "needed is >=99"),
        (_without_notebooks, "install contbatch again"),
        (_without_model, "install contbatch again"),
        (_with_the_kernel_of_another_environment, "ipykernel install --sys-prefix"),
    ],
)
def test_doctor_says_what_is_wrong_and_how_to_mend_it(
    break_it: Any, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_it(monkeypatch)
    assert call("doctor") == 1
    shown = capsys.readouterr().out
    assert "MISSING" in shown and "To mend: 1" in shown
    assert said in shown


def test_doctor_does_not_need_what_only_tests_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_declared", lambda: ["absent-package>=1; extra == 'test'"])
    monkeypatch.setattr(doctor, "find_chromium", lambda: None)
    assert call("doctor") == 0
    shown = capsys.readouterr().out
    assert "only to run the tests" in shown and "apt-get install chromium" in shown


# models


def test_models_are_listed_with_where_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("models") == 0
    shown = capsys.readouterr().out
    assert re.search(r"pocket\s+│ yes\s+│ included", shown)
    assert re.search(r"smollm2-135m\s+│ (?:yes|no)\s+│ .*93 MB", shown)


def test_fetching_announces_before_it_downloads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said_before: list[str] = []

    def no_network(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        said_before.append(capsys.readouterr().out)
        return subprocess.CompletedProcess(command, 1, "", "no network")

    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", no_network)
    assert call("models", "fetch", "smollm2-135m") == 2
    assert "93 MB" in said_before[0]
    assert "no network" in capsys.readouterr().err


@pytest.mark.parametrize(("is_terminal", "quiet"), [(True, False), (True, True), (False, False)])
def test_bars_are_drawn_on_a_terminal_only(is_terminal: bool, quiet: bool) -> None:
    """Bytes of a download, then tensors; not into a pipe, and not if quiet was asked for."""
    shown = StringIO()
    with model_bars(Console(file=shown, force_terminal=is_terminal, width=100), quiet) as progress:
        progress("downloading", 31_000_000, 93_000_000)
        progress("loading", 7, 272)
    if not is_terminal or quiet:
        assert shown.getvalue().strip() == ""
    else:
        assert "31 of 93 MB" in shown.getvalue() and "7 of 272 tensors" in shown.getvalue()


# verify


def test_verify_says_how_much_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("verify", GOLDEN / "vllm_v1.json") == 0
    assert "42 of 42 runs equal, 4,067 of 4,067 steps" in capsys.readouterr().out


def _more_tokens(step: dict[str, Any]) -> None:
    name = next(iter(step["scheduled"]))
    step["scheduled"][name] += 1


def _other_victim(step: dict[str, Any]) -> None:
    step["preempted"].append("nobody")


def _other_end(step: dict[str, Any]) -> None:
    step["finished"].append("nobody")


def _other_free(step: dict[str, Any]) -> None:
    step["free_blocks"] += 1


def _other_blocks(step: dict[str, Any]) -> None:
    next(iter(step["blocks"].values()))[-1] += 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_more_tokens, "scheduled recorded"),
        (_other_victim, "preempted recorded"),
        (_other_end, "finished recorded"),
        (_other_free, "free_blocks recorded"),
        (_other_blocks, "blocks of"),
    ],
)
def test_verify_finds_the_first_difference(
    change: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recording = golden("vllm_v1.json")
    recording["cases"] = recording["cases"][:3]
    case = recording["cases"][1]
    change(case["steps"][4])
    assert call("verify", save(recording, tmp_path)) == 1
    shown = capsys.readouterr().out
    assert f"first difference: case {case['case']}, step {case['steps'][4]['step']}: {said}" in shown
    others = sum(len(recording["cases"][index]["steps"]) for index in (0, 2))
    assert f"2 of 3 runs equal, {others + 4:,} of " in shown


def test_a_step_that_is_missing_in_the_recording_is_a_difference(tmp_path: Path) -> None:
    recording = golden("vllm_v1.json")
    recording["cases"] = recording["cases"][:1]
    del recording["cases"][0]["steps"][4]
    report = verify(save(recording, tmp_path))
    assert not report.equal and report.equal_units == 4


def test_a_request_that_we_refuse_is_a_difference(tmp_path: Path) -> None:
    recording = golden("vllm_v1.json")
    recording["cases"] = recording["cases"][:1]
    recording["cases"][0]["config"]["num_blocks"] = 3
    report = verify(save(recording, tmp_path))
    assert report.equal_cases == 0 and "num_blocks" in report.first_difference


BROKEN = {
    "cut": (lambda: (GOLDEN / "vllm_v1.json").read_text()[:5000], "cut"),
    "empty": (lambda: "", "not JSON"),
    "other kind": (lambda: golden("workloads.json"), "not a recording"),
    "a list": (lambda: [1, 2], "not a recording"),
    "no steps": (lambda: {"policy": "VllmV1", "cases": [{"case": "c", "config": {"num_blocks": 3}}]}, "is missing"),
    "no policy": (lambda: {"cases": []}, "'policy' is missing"),
    "unknown policy": (lambda: {"policy": "NoSuchPolicy", "cases": []}, "NoSuchPolicy"),
    "wrong type": (lambda: {"policy": "VllmV1", "cases": [3]}, "not recorded decisions"),
    "bad limit": (
        lambda: {"policy": "VllmV1", "cases": [{"case": 1, "config": {"num_blocks": 1}, "requests": [], "steps": []}]},
        "num_blocks is 0",
    ),
    "no tokens": (lambda: {"model": "pocket", "requests": [{"id": "a", "prompt": [1]}]}, "'output' is missing"),
    "unknown model": (lambda: {"model": "NoSuchModel", "requests": []}, "NoSuchModel"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_recording_is_one_line_and_status_2(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, said = BROKEN[case]
    path = save(make(), tmp_path)
    assert call("verify", path, GOLDEN / "vllm_v1.json") == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"contbatch: [^\n]+\n", err), err
    assert str(path) in err and said in err
    assert "42 of 42" in out, "the other files are still replayed"


RECORDED = [path for path in sorted(GOLDEN.glob("*.json")) if golden(path.name).get("policy") in POLICIES]


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recordings_of_policies_that_exist_are_equal(path: Path) -> None:
    report = verify(path)
    assert report.equal and report.units > 900


def test_recorded_tokens_of_a_model_are_generated_again(tmp_path: Path) -> None:
    from contbatch import Engine, SamplingParams

    prompts = [[5, 9, 12], [30, 4, 4, 17, 8], [7]]
    engine = Engine.load("pocket", enable_prefix_caching=False)
    params = SamplingParams(max_tokens=9, ignore_eos=True)
    alone = [engine.generate([prompt], params)[0].token_ids for prompt in prompts]
    requests = [
        {"id": f"r{i}", "prompt": p, "max_tokens": 9, "output": list(o)}
        for i, (p, o) in enumerate(zip(prompts, alone, strict=True))
    ]
    report = verify(save({"model": "pocket, the embedded one", "requests": requests}, tmp_path))
    assert report.equal and str(report) == "pocket: 3 of 3 requests equal, 27 of 27 tokens"
    requests[1]["output"][5] += 1
    report = verify(save({"model": "pocket", "requests": requests}, tmp_path))
    assert "request r1, token 5" in report.first_difference
    assert (report.equal_cases, report.equal_units) == (2, 23)


# notebooks


def _notebook(source: str, folder: Path) -> Path:
    from nbformat import write
    from nbformat.v4 import new_code_cell, new_notebook

    path = folder / "mine.ipynb"
    write(new_notebook(cells=[new_code_cell(source, id="only")]), path)
    return path


def test_check_and_update_work_on_other_peoples_notebooks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _notebook("1 + 1", tmp_path)
    assert call("notebooks", "check", path) == 1
    assert "not executed" in capsys.readouterr().out
    assert call("notebooks", "update", tmp_path) == 0
    assert "updated" in capsys.readouterr().out
    assert call("notebooks", "check", tmp_path) == 0
    assert call("notebooks", "check", tmp_path, "--skeleton") == 1
    assert 'no section "Goals"' in capsys.readouterr().out


def test_update_goes_on_after_a_notebook_that_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    bad, good = _notebook("missing", tmp_path / "a"), _notebook("3", tmp_path)
    assert call("notebooks", "update", tmp_path) == 1
    out, err = capsys.readouterr()
    assert f"{bad}: cell only" in err and "NameError" in err
    assert f"{good}: updated" in out
