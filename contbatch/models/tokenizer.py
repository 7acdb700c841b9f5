"""Text, and conversations, to token ids and back: a thin layer over the `tokenizers` library.

Left out: releasing text token by token while a character is still incomplete; that is the engine's
incremental detokeniser.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from contbatch.errors import CheckpointError
from contbatch.models.chat import ChatTemplate, Messages


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer` together with the ids that end a text.

    Args:
        core: the tokenizer itself.
        eos_token_ids: ids that end a text; from the checkpoint, because `tokenizer.json` does not say.
        chat_template: how a conversation is written; None where the checkpoint has none.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.core = core
        self.eos_token_ids = eos_token_ids
        self.chat_template = chat_template

    @classmethod
    def from_file(
        cls, path: Path, eos_token_ids: frozenset[int] = frozenset(), chat_template: ChatTemplate | None = None
    ) -> Tokenizer:
        """Read a `tokenizer.json`.

        Raises:
            CheckpointError: the file is missing or damaged.
        """
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; get tokenizer.json from the model's source")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), eos_token_ids, chat_template)
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{path} is not a usable tokenizer: {error}; get it again") from error

    @property
    def vocab_size(self) -> int:
        """Number of ids that stand for text, added special tokens included."""
        return self.core.get_vocab_size(with_added_tokens=True)

    @property
    def highest_id(self) -> int:
        """The largest id that stands for text; `vocab_size - 1` unless there are gaps, and -1 without any."""
        return max(self.core.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the beginning-of-text token if the model was trained with one."""
        return list(self.core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `token_ids`; bytes that are no complete character become U+FFFD.

        An id that stands for no text gives none. A model whose vocabulary is larger than its tokenizer's, padded to a
        round number, can in principle produce one; it was trained not to.
        """
        return self.core.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation, special tokens included, as the model's chat template writes it.

        Args:
            messages: what was said so far, oldest first: `[{"role": "user", "content": "Hello"}]`.
            add_generation_prompt: end with the words that make it the model's turn.
            variables: what else the template asks for, such as `enable_thinking=False`.

        Raises:
            CheckpointError: the checkpoint has no template, or a damaged one.
            InvalidRequest: the template refuses these messages, or fails on them.
        """
        if self.chat_template is None:
            raise CheckpointError(
                "this checkpoint has no chat template, so it may be no chat model; pass a prompt that you write "
                "yourself, or put the model's chat_template.jinja into its folder"
            )
        return self.chat_template.render(messages, add_generation_prompt, **variables)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> list[int]:
        """Ids of `apply_chat_template`, to be passed as a prompt.

        Not `encode` of that text: the template has written the beginning-of-text token already, and `encode` would
        add a second one.
        """
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)
