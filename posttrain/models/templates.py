"""Chat templates read from a model's files, to render rows before torch, transformers and the tokenizer are loaded."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from posttrain.errors import ModelError
from posttrain.models import adapters, tiny, tiny_vision
from posttrain.models.model_paths import Place, locate
from posttrain.path_resolution import find

# variables that a template gets with every conversation
_GIVEN = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class ChatTemplate:
    """The part of a tokenizer that `posttrain.chat` reads: a template and the special tokens (with made-up ids).

    named: bos_token, eos_token, ... as templates use them.
    """

    def __init__(self, chat_template: str | None, named: Mapping[str, str], special: Iterable[str] = ()) -> None:
        self.chat_template = chat_template
        self.named = dict(named)
        self.all_special_tokens = list(dict.fromkeys((*named.values(), *special)))
        self.added_tokens_decoder: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.all_special_tokens)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.all_special_tokens)}

    @property
    def eos_token_id(self) -> int:
        return self._ids.get(self.named.get("eos_token", ""), -1)

    def convert_tokens_to_ids(self, token: str) -> int:
        return self._ids[token]

    def apply_chat_template(self, messages: Sequence[Any], *, tokenize: bool, **how: Any) -> str:
        """Return the text that transformers' tokenizers render. how: `tools` as JSON schemas, and other variables."""
        assert not tokenize and self.chat_template is not None
        unset = {"tools": None, "documents": None, "add_generation_prompt": False}
        return str(_compile(self.chat_template).render(**{**unset, **self.named, **how, "messages": messages}))


def set_variables(template: Any, variables: Mapping[str, Any]) -> Any:
    """Return a chat template in which variables have these values, unless a caller of the template gives others.

    template: a text, several texts by name, or None; values: JSON. Raises ModelError for a template with an error, and
    for a variable that no text reads.
    """
    if not variables:
        return template
    from jinja2 import TemplateSyntaxError, meta

    environment = _environment()
    texts = dict(template) if isinstance(template, Mapping) else {"": template or ""}
    try:
        undeclared = {name: meta.find_undeclared_variables(environment.parse(text)) for name, text in texts.items()}
    except TemplateSyntaxError as error:
        raise ModelError(f"the chat template has an error in line {error.lineno}: {error.message}") from error
    read = set[str]().union(*undeclared.values()) - {*_GIVEN, *_TOKEN_NAMES, *environment.globals}
    if unknown := sorted(variables.keys() - read):
        raise ModelError(
            f"the chat template does not read {', '.join(unknown)}",
            allowed=f"it reads {', '.join(sorted(read))}" if read else "it reads no variables",
            hint="correct `model.chat_template_kwargs`" if read else "remove `model.chat_template_kwargs`",
        )
    for name in texts:
        defaults = (
            f"{{% if {variable} is not defined %}}{{% set {variable} = {_as_literal(value)} %}}{{% endif %}}\n"
            for variable, value in variables.items()
            if variable in undeclared[name]
        )
        texts[name] = "".join(defaults) + texts[name]
    return texts if isinstance(template, Mapping) else texts[""]


def _as_literal(value: Any) -> str:
    """Return a value of JSON as Jinja writes it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(str(key))}: {_as_literal(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_as_literal, value)) + "]"
    return "none" if value is None else json.dumps(value)


@lru_cache(maxsize=8)
def _compile(template: str) -> Any:
    return _environment().from_string(template)


@cache
def _environment() -> Any:
    """Return a Jinja environment with the settings, tags, filters and functions that transformers gives to templates.

    Importing transformers' own function takes a second. `{% generation %}` marks what is trained on; it is written as
    it is.
    """
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("write"), [], [], body).set_lineno(line)

        def write(self, caller: Callable[[], str]) -> str:
            return caller()

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda how: datetime.now().strftime(how),
    }
    return environment


def read_template(section: Mapping[str, Any], base_dir: Path | None) -> ChatTemplate | None:
    """Return the chat template of a recipe's `model` section; None if it cannot be read without loading the model.

    section: its keys. Raises ModelError if the model or file does not exist, or if the template does not read a
    variable of `chat_template_kwargs`.
    """
    found = _read_template_of(locate(str(section.get("path")), base_dir), base_dir)
    chat_template = section.get("chat_template")
    if chat_template:
        found = found or ChatTemplate(None, {name: f"<{name}>" for name in _TOKEN_NAMES})  # model elsewhere
        found.chat_template = find(chat_template, base_dir, "chat template", ModelError).read_text()
    if found is not None:
        found.chat_template = set_variables(found.chat_template, section.get("chat_template_kwargs") or {})
    return found


def _read_template_of(place: Place, base_dir: Path | None) -> ChatTemplate | None:
    """Return the chat template of a place; None if it cannot be read without loading the model."""
    if place.kind == "tiny":
        named = {"pad_token": tiny.PAD, "bos_token": tiny.BOS, "eos_token": tiny.EOS, "unk_token": tiny.UNK}
        if place.name == "tiny-vision":
            return ChatTemplate(tiny_vision.CHAT_TEMPLATE, named, (*tiny.ROLES, tiny_vision.IMAGE))
        return ChatTemplate(tiny.CHAT_TEMPLATE, named, tiny.ROLES)
    if place.kind == "hub":
        return _read_template_files({name: _cached_file(place.name, name) for name in _FILES})
    if place.path is None:
        return None
    if place.kind == "gguf":
        with place.path.open("rb") as file:
            return _read_gguf_header(file)
    if place.kind == "adapter" and not (place.path / "tokenizer_config.json").is_file():
        return _read_template_of(locate(adapters.base_of(place.path), base_dir), base_dir)
    return _read_template_files({name: place.path / name for name in _FILES})


# --- directories


_FILES = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "tokenizer.json")


def _cached_file(name: str, file: str) -> Path | None:
    """Return a file of a hub model if it is in the local cache."""
    from huggingface_hub import try_to_load_from_cache

    try:
        found = try_to_load_from_cache(name, file)
    except ValueError:  # not a valid hub id
        return None
    return Path(found) if isinstance(found, str) else None


def _read_template_files(files: Mapping[str, Path | None]) -> ChatTemplate | None:
    """Return the chat template from a tokenizer's JSON files; None without tokenizer_config.json."""
    texts = {name: path.read_text() for name, path in files.items() if path is not None and path.is_file()}
    if "tokenizer_config.json" not in texts:
        return None
    config = json.loads(texts["tokenizer_config.json"])
    template = texts.get("chat_template.jinja", config.get("chat_template"))
    if isinstance(template, list):  # several named templates
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    named = {**json.loads(texts.get("special_tokens_map.json", "{}")), **config}
    added = config.get("added_tokens_decoder")
    tokens = added.values() if added else json.loads(texts.get("tokenizer.json", "{}")).get("added_tokens", [])
    special = [token["content"] for token in tokens if token.get("special")]
    return ChatTemplate(template, {key: _token_text(named[key]) for key in _TOKEN_NAMES if named.get(key)}, special)


def _token_text(token: Any) -> str:
    return str(token["content"]) if isinstance(token, Mapping) else str(token)


# --- GGUF: its header holds the template and the vocabulary (github.com/ggml-org/ggml, docs/gguf.md)


def read_special_tokens(file: Path) -> dict[str, str]:
    """Return the special tokens that a GGUF file defines, among bos_token, eos_token, unk_token and pad_token."""
    with file.open("rb") as opened:
        found = _read_gguf_header(opened)
    return found.named if found else {}


_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _CONTROL = 8, 9, 3


def _read_gguf_header(file: BinaryIO) -> ChatTemplate | None:
    """Return the chat template and special tokens from a GGUF header; None if the file is not GGUF."""
    if file.read(4) != b"GGUF":
        return None
    file.seek(12, 1)  # skip the version and the number of tensors
    header = {
        _read_value(file, _STRING): _read_value(file, _read_number(file, "I")) for _ in range(_read_number(file, "Q"))
    }
    tokens = header.get("tokenizer.ggml.tokens", [])
    types = header.get("tokenizer.ggml.token_type", [])
    special = [token for token, kind in zip(tokens, types, strict=False) if kind == _CONTROL]
    ids = {name: header.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "unknown", "padding")}
    short = {"unknown": "unk", "padding": "pad"}
    named = {
        f"{short.get(name, name)}_token": tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)
    }
    return ChatTemplate(header.get("tokenizer.chat_template"), named, special)


def _read_number(file: BinaryIO, code: str) -> Any:
    return struct.unpack(f"<{code}", file.read(struct.calcsize(code)))[0]


def _read_value(file: BinaryIO, kind: int) -> Any:
    """Read one GGUF metadata value of a type."""
    if kind == _STRING:
        return file.read(_read_number(file, "Q")).decode(errors="replace")
    if kind == _ARRAY:
        inner, count = _read_number(file, "I"), _read_number(file, "Q")
        if inner in _NUMBERS:
            code = f"{count}{_NUMBERS[inner]}"
            return list(struct.unpack(f"<{code}", file.read(struct.calcsize(f"<{code}"))))
        return [_read_value(file, inner) for _ in range(count)]
    return _read_number(file, _NUMBERS[kind])
