"""Text to token ids and back: a thin layer over the `tokenizers` library.

Left out: releasing text token by token while a character is still incomplete; that is the engine's
incremental detokeniser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from contbatch.errors import CheckpointError


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` together with the ids that end a text.

    Args:
        core: the tokenizer itself.
        eos_token_ids: ids that end a text; from the checkpoint, because `tokenizer.json` does not say.
    """

    def __init__(self, core: tokenizers.Tokenizer, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.core = core
        self.eos_token_ids = eos_token_ids

    @classmethod
    def from_file(cls, path: Path, eos_token_ids: frozenset[int] = frozenset()) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; get tokenizer.json from the model's source")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), eos_token_ids)
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{path} is not a usable tokenizer: {error}; get it again") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids that stand for text, added special tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the beginning-of-text token if the model was trained with one."""
        return list(self.core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no complete character become U+FFFD."""
        return self.core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
