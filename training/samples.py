"""Twenty samples of the embedded model for its card: ten greedy, ten drawn with a seed.

The one idea: nothing is chosen. The prompts are the first ten examples of the package, the seeds are 1 to 10, and the
engine serves all twenty together.

    python training/samples.py
"""

from __future__ import annotations

import argparse

from contbatch import Engine, SamplingParams
from contbatch.prompts import EXAMPLE_PROMPTS


def main() -> None:
    """Print the samples as Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="pocket", help="name or folder (%(default)s)")
    engine = Engine.load(parser.parse_args().model)
    prompts = EXAMPLE_PROMPTS[:10]
    greedy = [SamplingParams(max_tokens=120)] * len(prompts)
    drawn = [SamplingParams(max_tokens=120, temperature=0.8, top_p=0.95, seed=n + 1) for n in range(len(prompts))]
    for n, done in enumerate(engine.generate([*prompts, *prompts], [*greedy, *drawn])):
        how = "greedy" if n < len(prompts) else f"temperature 0.8, top-p 0.95, seed {n - len(prompts) + 1}"
        print(f"{n + 1}. ({how}, {done.finish_reason.value}) **{done.prompt}**{done.text}\n")


if __name__ == "__main__":
    main()
