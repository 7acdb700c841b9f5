"""Chat templates: from a list of messages to the text that a chat model was trained to continue.

The one idea: the template is a small program that comes with the checkpoint, so it runs in a sandbox (jinja2's, which
hides Python's internals and changes no object), sees plain data only, and finds the few functions that templates
expect from `transformers`: `raise_exception`, `strftime_now`, `tojson`, `break` and `continue`, `generation` blocks.

Left out: a limit on how long a template may run. Do not render one from a source that you would not load a model from.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from contbatch.errors import CheckpointError, InvalidRequest
from contbatch.models.files import read_json_if_there, write_json

Messages = Sequence[Mapping[str, Any]]
"""What was said so far, oldest first: `{"role": "user", "content": "Hello"}` and so on."""


class ChatTemplate:
    """A template and the special tokens that it may name.

    Args:
        source: the jinja2 program.
        place: where it was found, for messages.
        special_tokens: texts such as `bos_token` and `eos_token`, by those names.
    """

    def __init__(self, source: str, place: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.place = place
        self.special_tokens = dict(special_tokens or {})

    def render(self, messages: Messages, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The text of a conversation; arguments and errors as in `Tokenizer.apply_chat_template`."""
        _check(messages)
        try:
            template = _environment().from_string(self.source)
        except jinja2.TemplateError as error:
            raise CheckpointError(f"the chat template in {self.place} cannot be read: {error}; get it again") from error
        plain = {"messages": _plain(messages), "tools": None, "documents": None, **_plain(variables)}
        plain["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(**{**self.special_tokens, **plain})
        except Exception as error:  # a template can fail in as many ways as a program
            raise InvalidRequest(
                f"the chat template in {self.place} refused or failed on these {len(messages)} messages: "
                f"{error or type(error).__name__}; check their roles and contents"
            ) from error


def folder_template(folder: Path) -> ChatTemplate | None:
    """The template of a checkpoint folder: chat_template.jinja, or else a field of tokenizer_config.json.

    Raises:
        CheckpointError: a file is damaged, or the field is no template.
    """
    fields = read_json_if_there(folder / _CONFIG)
    tokens = _texts({**read_json_if_there(folder / "special_tokens_map.json"), **fields})
    file = folder / _FILE
    if file.is_file():
        try:
            return ChatTemplate(file.read_text(encoding="utf-8"), str(file), tokens)
        except ValueError as error:
            raise CheckpointError(f"{file} is damaged: {error}; get the file again") from error
    source = fields.get("chat_template")
    if isinstance(source, list):  # several by name; one of them is meant for chats without tools
        source = next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    if source is not None and not isinstance(source, str):
        raise CheckpointError(f"chat_template in {folder / _CONFIG} is {source!r}; it must be a text")
    return None if source is None else ChatTemplate(source, str(folder / _CONFIG), tokens)


def write_template(folder: Path, template: ChatTemplate) -> None:
    """Write the files from which `folder_template` reads the same template."""
    (folder / _FILE).write_text(template.source, encoding="utf-8")
    write_json(folder / _CONFIG, template.special_tokens)


_FILE, _CONFIG = "chat_template.jinja", "tokenizer_config.json"


def _texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is a text, or an object with the text and how to match it."""
    tokens = {name: value for name, value in fields.items() if name.endswith("_token")}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _check(messages: Any) -> None:
    """Refuse what is no conversation: a text alone would be taken for a list of letters."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidRequest(
            f"the messages of a chat are {messages!r}; give a list such as [{{'role': 'user', 'content': 'Hello'}}]"
        )


def _plain(data: Any) -> Any:
    """A copy made of plain objects, for the sandbox to see: what is in the messages may have methods.

    Keys with None are dropped, since templates ask whether a key is there.

    Raises:
        InvalidRequest: something is no text, number, list or mapping.
    """
    if isinstance(data, Mapping):
        return {str(key): _plain(value) for key, value in data.items() if value is not None}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if type(data) in (str, int, float, bool):
        return data
    raise InvalidRequest(f"a chat message holds {data!r}; use texts, numbers, lists and mappings")


class _GenerationBlocks(Extension):
    """`{% generation %}` marks what the model wrote, for training; it changes no text."""

    tags = {"generation"}  # noqa: RUF012  # as the library declares it

    def parse(self, parser: Parser) -> Node:
        """The block as if it was not marked."""
        line = next(parser.stream).lineno
        return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _environment() -> ImmutableSandboxedEnvironment:
    """A fresh one for each use, so that no template can leave anything behind for the next."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlocks, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is: the library's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
