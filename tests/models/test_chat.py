"""Chat templates give the text that `transformers` gives, run in a sandbox, and fail with a reason."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers

from contbatch import Engine, SamplingParams
from contbatch.errors import CheckpointError, InvalidRequest
from contbatch.models import ChatTemplate, Tokenizer, read_folder, read_gguf, write_folder
from contbatch.models.chat import folder_template
from tests.models.test_gguf import write_gguf
from tests.models.tiny import tiny_checkpoint, tiny_tokenizer

TEMPLATES = {
    "ChatML": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
        "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "Llama 3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}"
        "{% set content = '<|start|>' + message['role'] + '<|end|>\n\n' + message['content'] | trim + eos_token %}"
        "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|start|>assistant<|end|>\n\n' }}{% endif %}"
    ),
    "white space, namespaces, break": (
        "{%- set found = namespace(user='nobody') %}\n"
        "{%- for message in messages %}\n"
        "    {%- if message.role == 'user' %}\n"
        "        {%- set found.user = message.content %}\n"
        "        {%- break %}\n"
        "    {%- endif %}\n"
        "{%- endfor %}\n"
        "    {% if tools is none and documents is none %}\n"
        "{{ found.user | tojson }} {{ {'b': 'ä<', 'a': [1, none]} | tojson(indent=1) }}\n"
        "    {% endif %}\n"
    ),
    "marked for training": (
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{% set eos_token = 'x' %}"
        "{{ message.content }}{% endgeneration %}{{ eos_token }}{% else %}{{ message.content }}{% endif %}{% endfor %}"
    ),
    "variables": "{% if not thinking %}quick{% endif %}{{ nothing is defined }}{{ sep_token }}{{ pad_token }}",
}
HELLO = [{"role": "user", "content": "w3"}]
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [{"role": "user", "content": '  w3 <b>ä "quoted"\n'}],
    "four turns": [
        {"role": "system", "content": "w1"},
        {"role": "user", "content": "w2"},
        {"role": "assistant", "content": "w3", "name": None},
        {"role": "user", "content": "w4"},
    ],
}


def _folder(folder: Path, template: str | None, in_file: bool = False, **fields: Any) -> Path:
    """A checkpoint folder whose template lies in tokenizer_config.json or in a file of its own."""
    write_folder(folder, tiny_checkpoint(), torch.float32)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "w0",
        "eos_token": {"__type": "AddedToken", "content": "w2", "lstrip": False, "normalized": False},
        "pad_token": "w5",
        **fields,
    }
    if template is not None and not in_file:
        config["chat_template"] = template
    if template is not None and in_file:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("messages", CHATS.values(), ids=CHATS.keys())
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_texts_equal_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, Any]], in_file: bool, add_generation_prompt: bool
) -> None:
    """From both places where a template may lie; special tokens by name; the switches that templates ask for."""
    folder = _folder(tmp_path, template, in_file)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    expected = theirs.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt, thinking=False
    )
    tokenizer = read_folder(folder).tokenizer
    assert tokenizer.apply_chat_template(messages, add_generation_prompt, thinking=False) == expected


def test_the_date_is_that_of_today() -> None:
    """`strftime_now`, which Llama 3's templates write into the system message."""
    template = ChatTemplate("{{ strftime_now('%Y') }}", "here")
    years = {datetime.now().year, datetime.now().year - 1}  # the year may end between the two
    assert int(template.render(HELLO)) in years


def test_a_file_comes_before_a_field(tmp_path: Path) -> None:
    """As in `transformers`, which writes the file and reads both."""
    _folder(tmp_path, "from the field")
    _folder(tmp_path, "from the file", in_file=True, chat_template="from the field")
    assert read_folder(tmp_path).tokenizer.apply_chat_template(HELLO) == "from the file"
    assert (
        transformers.AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(HELLO, tokenize=False)
        == "from the file"
    )


def test_of_several_templates_the_default_is_taken(tmp_path: Path) -> None:
    """Older checkpoints have a list with one for tools too."""
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    _folder(tmp_path, None, chat_template=several)
    assert read_folder(tmp_path).tokenizer.apply_chat_template(HELLO) == "chat"


def test_special_tokens_of_older_folders(tmp_path: Path) -> None:
    """They lie in special_tokens_map.json; what tokenizer_config.json says counts more."""
    _folder(tmp_path, "{{ bos_token }}{{ cls_token }}")
    tokens = {"bos_token": "w9", "cls_token": {"content": "w8"}}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    assert read_folder(tmp_path).tokenizer.apply_chat_template(HELLO) == "w0w8"


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    """`write_folder` keeps template and special tokens."""
    first = read_folder(_folder(tmp_path / "one", TEMPLATES["Llama 3"]))
    write_folder(tmp_path / "two", first, torch.float32)
    messages = CHATS["four turns"]
    expected = first.tokenizer.apply_chat_template(messages)
    assert read_folder(tmp_path / "two").tokenizer.apply_chat_template(messages) == expected


def test_the_template_of_a_gguf_file(tmp_path: Path) -> None:
    """It lies in the metadata, and so do the special tokens, by id."""
    template = "{{ bos_token }}|{{ eos_token }}|{{ messages[0].content }}"
    write_gguf(tmp_path / "m.gguf", tokenizer__chat_template=template, tokenizer__ggml__bos_token_id=1)
    tokenizer = read_gguf(tmp_path / "m.gguf").tokenizer
    assert tokenizer.apply_chat_template(CHATS["one turn"]) == f"<turn>|<end>|{CHATS['one turn'][0]['content']}"


def test_the_beginning_of_text_comes_once() -> None:
    """The template writes it; `encode` would add a second one, `encode_chat` does not."""
    core = tiny_tokenizer().core
    core.post_processor = tokenizers.processors.TemplateProcessing(single=["w7", "$A"], special_tokens=[("w7", 7)])
    template = ChatTemplate("{{ bos_token }} {{ messages[0].content }}", "here", {"bos_token": "w7"})
    tokenizer = Tokenizer(core, frozenset(), template)
    chat = [{"role": "user", "content": "w3 w4"}]
    assert tokenizer.encode("w3 w4") == [7, 3, 4]
    assert tokenizer.encode_chat(chat) == [7, 3, 4]
    assert tokenizer.encode(tokenizer.apply_chat_template(chat)) == [7, 7, 3, 4]


def test_an_engine_continues_a_chat(tmp_path: Path) -> None:
    """Through the engine's own tokenizer."""
    engine = Engine.load(str(_folder(tmp_path, "{{ messages[0].content }} w9")), num_blocks=8)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode_chat([{"role": "user", "content": "w3"}])
    assert prompt == [3, 9]
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(done.token_ids) == 2


# What goes wrong


def test_no_template(tmp_path: Path) -> None:
    """It says so, and what to do."""
    tokenizer = read_folder(_folder(tmp_path, None)).tokenizer
    with pytest.raises(CheckpointError, match=r"no chat template.*chat_template\.jinja"):
        tokenizer.apply_chat_template(CHATS["one turn"])


FAILING: dict[str, tuple[str, str]] = {
    "refuses": ("{{ raise_exception('roles must alternate') }}", "these 1 messages: roles must alternate"),
    "lacks a key": ("{{ 'a' + messages[0].nothing }}", "nothing"),
    "leaves the sandbox": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "changes the messages": ("{{ messages.append(1) }}", "unsafe|not safely callable"),
    "calls what is not there": ("{{ open('/etc/passwd') }}", "'open' is undefined"),
}


@pytest.mark.parametrize(("source", "message"), FAILING.values(), ids=FAILING.keys())
def test_a_template_that_fails_says_which_and_why(tmp_path: Path, source: str, message: str) -> None:
    """One that refuses the messages on purpose, one with a fault, and one that reaches for what is not its own."""
    tokenizer = read_folder(_folder(tmp_path, source)).tokenizer
    with pytest.raises(InvalidRequest, match=rf"tokenizer_config\.json refused or failed on .*(?:{message})"):
        tokenizer.apply_chat_template(CHATS["one turn"])


def test_a_damaged_template_is_no_obstacle_until_it_is_used(tmp_path: Path) -> None:
    """The model can still continue texts."""
    tokenizer = read_folder(_folder(tmp_path, "{% if %}")).tokenizer
    assert tokenizer.encode("w3") == [3]
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read.*get it again"):
        tokenizer.apply_chat_template(HELLO)


def test_messages_are_plain_data() -> None:
    """An object in a message could lend the template its methods."""
    template = ChatTemplate("{{ messages }}", "here")
    with pytest.raises(InvalidRequest, match=r"holds .*PosixPath.*; use texts"):
        template.render([{"role": "user", "content": Path("x")}])


@pytest.mark.parametrize("messages", ["Hello", [], ["Hello"], None, {"role": "user", "content": "Hello"}])
def test_what_is_no_conversation_is_refused(messages: Any) -> None:
    """A text would be taken for a list of letters."""
    with pytest.raises(InvalidRequest, match=r"give a list such as .*'role': 'user'"):
        ChatTemplate("{{ messages }}", "here").render(messages)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "tokenizer_config.json").write_text("{"), r"tokenizer_config\.json is truncated"),
        (lambda f: (f / "chat_template.jinja").write_bytes(b"\xff\xfe"), r"chat_template\.jinja is damaged"),
        (lambda f: (f / "tokenizer_config.json").write_text('{"chat_template": 3}'), r"chat_template in .* is 3"),
    ],
)
def test_damaged_files(tmp_path: Path, damage: Callable[[Path], object], message: str) -> None:
    """Bad input: named when the folder is read."""
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        folder_template(tmp_path)
