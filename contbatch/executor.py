"""What runs the forward pass: the one thing the engine does not do itself.

An executor gets a batch and returns one token for each request that samples in it. The model's executor lives in
`contbatch.models.runner`; `ScriptedExecutor` here makes tokens up, so that scheduling can be tested and shown
without a model. Anything with these members can take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from contbatch.batch import BatchedRequest, ScheduledBatch
from contbatch.request import SamplingParams


class Executor(Protocol):
    """Runs one mixed forward pass and samples.

    One that can also start a step without waiting for it has `launch`; see `contbatch.overlap.Launcher`.
    """

    vocab_size: int | None
    """Token ids below this are valid; None accepts any."""
    max_model_len: int | None
    """Longest sequence the model can process; None for no limit."""
    eos_token_ids: frozenset[int]
    """Tokens that end a sequence unless a request says `ignore_eos`."""

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """Compute the batch; return one token per request whose part says `sample`.

        A request whose sampling failed gets the exception in place of its token: it alone ends with an error.
        Raising from here fails the whole step, which the engine then runs again.
        """
        ...

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy cache blocks to host memory, (block, host block) each, before anything is written in this step.

        Host blocks are numbered from 1 to `num_host_blocks`. Called only with preemption by swap.
        """
        ...

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Copy blocks back from host memory, (host block, block) each, before the forward pass of the step."""
        ...


class ScriptedExecutor:
    """Made-up tokens: the n-th token of a request comes from a script.

    Args:
        script: for each request id its output tokens in order, or a function (request id, position of the new
            token) -> token. Where a script has no token, and without one, the token is made of the position.
        vocab_size, max_model_len, eos_token_ids: as in `Executor`.
    """

    def __init__(
        self,
        script: Mapping[str, Sequence[int]] | Callable[[str, int], int] | None = None,
        vocab_size: int | None = None,
        max_model_len: int | None = None,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.script = script or {}
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self._made: dict[str, tuple[int, list[int]]] = {}
        """Position of the first token made up for each request, and the tokens so far."""

    def execute(self, batch: ScheduledBatch, sampling: Mapping[str, SamplingParams]) -> Mapping[str, int | Exception]:
        """One scripted token per sampling request; nothing is computed."""
        del sampling
        return {part.request_id: self._token(part) for part in batch if part.sample}

    def swap_out(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Made-up tokens need no cache: nothing to copy."""

    def swap_in(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Nothing to copy."""

    def _token(self, part: BatchedRequest) -> int:
        if callable(self.script):
            return self.script(part.request_id, part.seq_len)
        start, made = self._made.get(part.request_id, (0, []))
        index = part.seq_len - start
        if not 0 < index <= len(made) or made[index - 1] != part.token_ids[-1]:
            start, made, index = part.seq_len, [], 0  # its first token; the id may have been used before
            self._made[part.request_id] = start, made
        script = self.script.get(part.request_id, ())
        made_up = 1000 + part.seq_len
        if self.vocab_size is not None:
            made_up %= self.vocab_size
        made[index:] = [script[index] if index < len(script) else made_up]
        return made[index]
