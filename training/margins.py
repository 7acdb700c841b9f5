"""How close the greedy choice is: the margin between the two best logits along a continuation.

The one idea: greedy text is the same on every machine only if no choice along the way is a near-tie, because sums in
another order move a logit by about 1e-6. So the prompts that the package shows are chosen among candidates by their
smallest margin, which a test watches.

    python training/margins.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from contbatch import BatchedRequest, Engine, SamplingParams, ScheduledBatch, SchedulerConfig
from contbatch.models import LoadedModel, ModelExecutor, load_model
from contbatch.models.attention import PagedAttention
from contbatch.prompts import EXAMPLE_PROMPTS

CANDIDATES = (
    "Once upon a time, there was a little duck who",
    "Ben wanted to learn to dance.",
    "Once upon a time, there was a little mouse named Pip. Pip was lonely and wanted to find a friend.",
    "The kitten was afraid of the dog.",
    "Lucy planted a seed in the garden. Every day,",
    "Once upon a time, there was a little fox who",
    "Once upon a time, there was a brave girl named Lily.",
    "Once upon a time, there was a shy rabbit named Pip.",
    "Once upon a time, there was a boy named Tom. He wanted to",
    "Once upon a time, the cat and the mouse were best friends.",
    "Once upon a time, there was a small bear who lived in the forest.",
    "Lily and her dog went to the park.",
    "Tom was very hungry.",
    "Anna lost her red ball",
    "Max found a shiny shell at the beach.",
    "One sunny day, Mia was playing in the garden.",
    "One rainy morning, the duck woke up early.",
    "It was late, but Sam could not sleep.",
    "Ben wanted to learn to swim.",
    "The little frog was afraid of the dark.",
    "Emma and Jack wanted to build a snowman.",
    "\"Can you help me?\" asked the kitten.",
    "It was Leo's birthday",
    "The squirrel had a big apple.",
    "Zoe planted a seed in the garden. Every day,",
    "There was once a clever monkey who lived by the river.",
    "Sara broke Tim's kite.",
    "The turtle walked too far and could not find the way home.",
    "Lucy was sad because she had no friends. Then",
    "Finn had a new bike and did not want to share it.",
    "One cold day, a kind hedgehog went for a walk.",
    "The horse and the pig were",
    "Oscar took his boat to the lake.",
    "Nina and her grandma went for a walk. It was a windy day.",
    "Once upon a time, there was a funny lion named Milo. Milo could not sing.",
    "The moon was in the sky, and Amy was in bed.",
    "Paul was playing by the pond when it started to rain.",
    "The puppy was stuck in the mud.",
    "One day,",
    "Once upon a time, there was a happy horse named Milo. Milo wanted to learn to sing.",
    "Lily and Tom were good friends. Lily and Tom wanted to build a castle.",
    "Sam lost his blue kite by the lake.",
    "One windy day, Nina was playing on the hill. Nina lost her",
    "Today was a big day. It was Emma's birthday.",
    "The cat and the dog were playing by the river. Then it started to rain.",
    "Jack was lost in the forest.",
    "There was one thing that made Zoe afraid.",
    "Leo broke Mia's drum.",
    "Lucy found a tiny seed and put it in the ground.",
    "Amy and her dad",
    "Once upon a time, the cow and the pig were best friends. One day, the pig was very hungry.",
    "Once upon a time, there was a clever girl named Ella. Ella found a shiny box",
    "Finn was lonely and wanted to find a friend. Then Finn met Daisy.",
    "One snowy morning, Oscar woke up early. Oscar and the bear wanted to build a",
    "Mia had a red ball. One day, the ball was gone.",
    "It was a warm day. The frog was walking by the pond and saw",
    "Paul had a new",
    "Once upon a time, there was a sleepy kitten who lived on the farm. The kitten could not find the way home.",
    "Jack and the fox were good friends. It was late, but Jack could not sleep. The fox came and read a story. Soon "
    "Jack was asleep and had a sweet dream. The next day,",
    "Ella heard a small voice in the forest.",
    "The",
)  # fmt: skip


def greedy_margins(loaded: LoadedModel, prompt: str, tokens: int) -> tuple[tuple[int, ...], list[float]]:
    """The greedy continuation of a prompt and the margin of each choice, also past the end of a story.

    Args:
        loaded: the model.
        tokens: so many.
    """
    config = SchedulerConfig(max_model_len=loaded.config.max_model_len, num_blocks=64)
    executor = ModelExecutor(loaded, config.num_blocks, config.block_size, kernels="plain")
    engine = Engine(executor, config, tokenizer=loaded.tokenizer)
    answer = engine.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True))[0]
    logits = all_logits(executor, (*answer.prompt_token_ids, *answer.token_ids))
    best = logits[len(answer.prompt_token_ids) - 1 : -1].topk(2).values
    return answer.token_ids, (best[:, 0] - best[:, 1]).tolist()


@torch.inference_mode()
def all_logits(executor: ModelExecutor, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits [T, vocab_size] after each of T tokens, from one forward pass."""
    size = executor.cache.block_size
    blocks = range(1, len(token_ids) // size + 2)
    flat = ScheduledBatch(0, [BatchedRequest.prefill("all", token_ids, 0, blocks)]).flatten(size)
    inputs, positions = torch.from_numpy(flat.input_ids), torch.from_numpy(flat.positions)
    model = executor.loaded.model
    return model.logits(model(inputs, positions, PagedAttention(executor.cache, flat)))


def main() -> None:
    """Print each candidate with its smallest margin and its text."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="pocket", help="name or folder (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to follow (%(default)s)")
    options = parser.parse_args()
    loaded = load_model(options.model)
    for prompt in dict.fromkeys((*EXAMPLE_PROMPTS, *CANDIDATES)):
        tokens, margins = greedy_margins(loaded, prompt, options.tokens)
        smallest = min(margins)
        ends = [n + 1 for n, token in enumerate(tokens) if token in loaded.eos_token_ids]
        mark = "*" if prompt in EXAMPLE_PROMPTS else " "
        print(f"{mark} {smallest:.4f} at token {margins.index(smallest) + 1}, story ends at {ends[:1] or 'none'}")
        print(f"  {prompt} |{loaded.tokenizer.decode(tokens, skip_special_tokens=False)}")


if __name__ == "__main__":
    main()
