"""Train the embedded model on the corpus: tokenizer, weights, and the folder that `load_model` reads.

The one idea: the library's decoder takes its attention from outside, so training needs no second model. Here attention
is a dense causal one over a rectangle of packed stories; everything else is the code that serves.

One thread and fixed seeds: on the same machine with the same PyTorch, the same weights come out. The validation loss
is measured on stories that training never sees, and the weights that did best are kept.

    python training/train.py --out contbatch/models/pocket
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor

from contbatch.models import Checkpoint, Llama, ModelConfig, Tokenizer, write_folder

SEED = 7
END = "<|endoftext|>"
CONFIG = ModelConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=448,
    num_layers=5,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_model_len=512,
)
ROW = 512
"""Tokens in a row of the training rectangle."""
ROWS = 2
PEAK_RATE, WARMUP, DECAY = 3e-3, 100, 0.1
HELD_OUT = 40
"""One story in so many is kept for validation."""


def main() -> None:
    """Train, keep the best weights, write the folder."""
    options = _parse()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    stories = read_corpus(options.corpus)
    held_out = [story for n, story in enumerate(stories) if n % HELD_OUT == 0]
    seen = [story for n, story in enumerate(stories) if n % HELD_OUT]
    core = train_tokenizer(seen)
    encoded, held = encode(core, seen), encode(core, held_out)
    tokens = sum(map(len, encoded))
    print(f"{len(seen)} stories, {tokens} tokens; {len(held)} held out, {sum(map(len, held))} tokens", flush=True)
    model = initialised(CONFIG)
    print(f"{sum(p.numel() for p in model.parameters())} parameters", flush=True)
    steps = options.epochs * (tokens // (ROW * ROWS))
    tokenizer = Tokenizer(core, frozenset([end_token(core)]))

    def keep() -> None:
        write_folder(options.out, Checkpoint(CONFIG, model.state_dict(), tokenizer), torch.float16)

    history = train(model, encoded, pack(held), steps, options.every, keep)
    final = validation_loss(rounded(model), pack(held))
    print(f"shipped weights, 16 bits: validation loss {final:.4f}, perplexity {math.exp(final):.2f}")
    options.log.write_text(json.dumps({"tokens": tokens, "shipped": final, "history": history}, indent=1) + "\n")


def read_corpus(path: Path) -> list[str]:
    """One story a line."""
    return lzma.decompress(path.read_bytes()).decode().splitlines()


def train_tokenizer(stories: Sequence[str]) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer: any text can be encoded; the end token is number 0."""
    core = tokenizers.Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG.vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(stories, trainer)
    return core


def end_token(core: tokenizers.Tokenizer) -> int:
    """The id of the token that stands behind each story."""
    token = core.token_to_id(END)
    assert token is not None, "the trainer puts its special tokens first"
    return int(token)


def encode(core: tokenizers.Tokenizer, stories: Sequence[str]) -> list[list[int]]:
    """Token ids of each story, the end token last."""
    end = end_token(core)
    return [[*encoding.ids, end] for encoding in core.encode_batch(list(stories))]


def pack(stories: Sequence[Sequence[int]]) -> Tensor:
    """Stories end to end, cut into rows of `ROW` + 1 tokens: inputs, and the targets one further."""
    flat = [token for story in stories for token in story]
    rows = (len(flat) - 1) // ROW
    return torch.stack([torch.tensor(flat[n * ROW : n * ROW + ROW + 1]) for n in range(rows)])


def batches(stories: list[list[int]]) -> Iterator[Tensor]:
    """Batches of `ROWS` packed rows for ever, the stories shuffled anew for each epoch."""
    rng = random.Random(SEED)
    while True:
        rng.shuffle(stories)
        rows = pack(stories)
        for n in range(0, len(rows) - ROWS + 1, ROWS):
            yield rows[n : n + ROWS]


def initialised(config: ModelConfig) -> Llama:
    """Small normal weights; what is added to the stream is smaller the deeper the model."""
    model = Llama(config)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            deep = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=0.02 / math.sqrt(2 * config.num_layers) if deep else 0.02)
    return model


def loss_of(model: Llama, rows: Tensor) -> Tensor:
    """Mean cross-entropy of [rows, ROW + 1] tokens, each predicted from those before it."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    count, length = inputs.shape
    positions = torch.arange(length).repeat(count)

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.view(count, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
        shared = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(shared, dim=1) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    hidden = model(inputs.flatten(), positions, attend)
    return F.cross_entropy(model.logits(hidden).float(), targets.flatten())


def train(
    model: Llama, stories: list[list[int]], held: Tensor, steps: int, every: int, keep: Callable[[], None]
) -> list[dict[str, float]]:
    """AdamW with warmup and a cosine to zero. Returns the course of the losses; leaves the best weights in `model`.

    Args:
        keep: called whenever the validation loss is the lowest so far.
    """
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95))
    best, kept, history, recent = math.inf, model.state_dict(), [], 0.0
    start = time.process_time()
    for step, rows in zip(range(1, steps + 1), batches(stories), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_RATE * rate(step, steps)
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, rows)
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        recent += loss.item()
        if step % every == 0 or step == steps:
            validation = validation_loss(model, held)
            minutes = (time.process_time() - start) / 60
            history.append({"step": step, "train": recent / ((step - 1) % every + 1), "validation": validation,
                            "cpu_minutes": minutes})  # fmt: skip
            print(", ".join(f"{key} {value:.3f}" for key, value in history[-1].items()), f"of {steps}", flush=True)
            recent = 0.0
            if validation < best:
                best, kept = validation, {key: value.clone() for key, value in model.state_dict().items()}
                keep()
    model.load_state_dict(kept)
    return history


def rate(step: int, steps: int) -> float:
    """Share of the peak learning rate."""
    return min(step / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)))


@torch.no_grad()
def validation_loss(model: Llama, rows: Tensor) -> float:
    """Loss in 32 bits on rows that training never sees."""
    parts = torch.split(rows, 8)
    return math.fsum(loss_of(model, part).item() * len(part) for part in parts) / len(rows)


def rounded(model: Llama) -> Llama:
    """The model with its weights as they are stored."""
    return model.to(torch.float16).to(torch.float32)


def _parse() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=here / "corpus.txt.xz", help="%(default)s")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument("--log", type=Path, default=here / "log.json", help="losses on the way (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="times through the corpus (%(default)s)")
    parser.add_argument("--every", type=int, default=250, help="steps between validations (%(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (%(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
