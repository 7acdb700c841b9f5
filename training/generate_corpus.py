"""Make the corpus of the embedded model: stories filled in by SmolLM2-135M-Instruct, served by this package's engine.

The one idea: the teacher is served the way the package teaches. Dozens of requests run together, and as soon as one
ends the next takes its place. A story is two requests: the sentences before its turn and those after; the second
finds the first in the prefix cache. A story depends on its index and the seed alone, and is appended to a JSON-lines
file as soon as it is whole, so that the program can be stopped at any time and goes on where it was. Several
processes can share the work: `--part 0/2` makes the even stories, `--part 1/2` the odd ones.

    python training/generate_corpus.py stories.jsonl --count 6000
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
from sentences import good_beginning
from world import REQUEST, Skeleton, skeleton

from contbatch import Engine, SamplingParams, SchedulerConfig
from contbatch.models import ModelExecutor, load_model

SEED = 20
TEACHER = "smollm2-135m"
TEMPLATE = "<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n{text}"


class Writer:
    """One story on its way: asks the teacher twice, keeps the good sentences.

    Args:
        bones: the story before the teacher has seen it.
    """

    def __init__(self, bones: Skeleton) -> None:
        self.bones = bones
        self.text = bones.start
        self.link = bones.first_link
        self.rounds = 0

    def ask(self, engine: Engine) -> str:
        """Add the next request; returns its id."""
        prompt = TEMPLATE.format(request=REQUEST, text=self.text + self.link)
        params = SamplingParams(max_tokens=36, temperature=0.7, top_k=40, top_p=0.9, seed=self.bones.seeds[self.rounds])
        return engine.add_request(prompt, params)

    def take(self, continuation: str) -> bool:
        """Add what is good in the teacher's answer; True if the story is whole."""
        new = good_beginning(self.text, self.link + continuation)
        bones = self.bones
        bridge = bones.turn if self.rounds == 0 else bones.end
        self.text = " ".join(part for part in (self.text, new, bridge) if part)
        self.link = bones.second_link
        self.rounds += 1
        return self.rounds == 2


def main() -> None:
    """Make the stories that the file does not hold yet."""
    options = _parse()
    torch.set_num_threads(options.threads)
    part, parts = map(int, options.part.split("/"))
    done = indices_in(options.file)
    missing = [index for index in range(part, options.count, parts) if index not in done]
    print(f"{len(done)} stories are there, {len(missing)} to make", flush=True)
    with options.file.open("a", encoding="utf-8") as file:
        _generate(_engine(options.batch), missing, file, time.monotonic() + 60 * options.minutes)


def indices_in(path: Path) -> set[int]:
    """Indices of the stories in a file; a last line that was cut off is removed from it."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    return {json.loads(line)["index"] for line in whole.splitlines()}


def _engine(batch: int) -> Engine:
    config = SchedulerConfig(max_num_seqs=batch, max_num_batched_tokens=512, max_model_len=512, num_blocks=batch * 24)
    teacher = load_model(TEACHER, dtype="bfloat16")
    executor = ModelExecutor(teacher, config.num_blocks, config.block_size)
    return Engine(executor, config, tokenizer=teacher.tokenizer, model_name=TEACHER)


def _generate(engine: Engine, indices: list[int], file: TextIO, deadline: float) -> None:
    stories = iter(indices)
    writers: dict[str, Writer] = {}
    start, tokens, whole = time.monotonic(), 0, 0
    _refill(engine, stories, writers)
    while writers and time.monotonic() < deadline:
        engine.step()
        for name in [name for name in writers if name in engine.completions]:
            writer, answer = writers.pop(name), engine.completions.pop(name)
            tokens += len(answer.token_ids)
            if not writer.take(answer.text):
                writers[writer.ask(engine)] = writer
                continue
            file.write(json.dumps({"index": writer.bones.index, "text": writer.text}) + "\n")
            file.flush()
            whole += 1
            if whole % 50 == 0:
                rate = tokens / (time.monotonic() - start)
                print(f"{whole} stories, {tokens} tokens by the teacher, {rate:.0f} tokens/s", flush=True)
        _refill(engine, stories, writers)
        engine.trace.steps.clear()  # hours of records that nobody looks at


def _refill(engine: Engine, indices: Iterator[int], writers: dict[str, Writer]) -> None:
    while len(writers) < engine.config.max_num_seqs:
        index = next(indices, None)
        if index is None:
            return
        writer = Writer(skeleton(index, SEED))
        writers[writer.ask(engine)] = writer


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="JSON-lines file to append to")
    parser.add_argument("--count", type=int, default=6000, help="stories wanted in all (%(default)s)")
    parser.add_argument("--part", default="0/1", help="which share of them, as part/parts (%(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="stories written together (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so long (no limit)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
