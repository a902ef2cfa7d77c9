"""Tokenizer in GGUF's form: llama.cpp's vocabulary types and its names for pre-tokenizers.

Byte-level BPE only: GGUF does not store how text is split before merging, llama.cpp knows the pre-tokenizers by name.
So a tokenizer is accepted if its split has such a name, and refused otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from posttrain import chat
from posttrain.errors import DataError, ModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # token types of GGUF

# The split of Llama 3, and that of Qwen2 and Qwen3, which splits off single digits.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_OTHER_CHARACTERS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORDS + r"\p{N}{1,3}" + _OTHER_CHARACTERS: "llama-bpe", _WORDS + r"\p{N}" + _OTHER_CHARACTERS: "qwen2"}
IGNORE_MERGES = {"llama-bpe"}  # a word that is a token is not merged from bytes (`ignore_merges`)

COMPARED_TEXTS = (  # on which both tokenizers must agree
    "What is 17 + 25? 1234567 apples, 3.14 pears; it's they'll I'D",
    "def add(a, b):\n    return a + b\n\n\n\tx  =  add( 1,2 ) # done\r\n",
    "Größe, naïve café: 你好，世界。 Привет! مرحبا 👩\u200d🚀 \u00a0 end  ",
    '{"name": "f", "arguments": {"x": [1, 2.5e-3]}}</s><think>\nso\n</think>\n\n\\boxed{\\frac{1}{2}}',
)


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer in GGUF's form.

    pre: llama.cpp's name of the pre-tokenizer. types: type of each token. add_bos: whether readers of the file prepend
    BOS to every text.
    """

    pre: str
    tokens: Sequence[str]
    types: Sequence[int]
    merges: Sequence[str]
    add_bos: bool


def build_vocabulary(tokenizer: Any, rows: int, refuse: Any) -> Vocabulary:
    """Return the tokenizer's vocabulary, padded to the model's `rows` embeddings.

    refuse: makes an exception from a reason; it is raised for a tokenizer that GGUF cannot represent exactly.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise refuse("its tokenizer has no tokenizer.json")
    core = json.loads(tokenizer.backend_tokenizer.to_str())
    model = core["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise refuse(f"its tokenizer is no byte-level BPE ({model.get('type')}{_fallback(model)})")
    pre = find_split_name(core.get("pre_tokenizer"), core.get("normalizer"))
    if pre is None:
        raise refuse("its tokenizer splits text in a way for which posttrain knows no name of llama.cpp's")
    if bool(model.get("ignore_merges")) != (pre in IGNORE_MERGES):
        raise refuse(f"its tokenizer merges otherwise than llama.cpp's `{pre}` (ignore_merges)")
    added = {token["id"]: token for token in core.get("added_tokens", ())}
    odd = next((t["content"] for t in added.values() if t["lstrip"] or t["rstrip"] or t["single_word"]), None)
    if odd is not None:
        raise refuse(f"its token {odd!r} also takes blanks beside it (lstrip, rstrip or single_word)")
    names = {number: token for token, number in model["vocab"].items()}
    names |= {number: token["content"] for number, token in added.items()}
    tokens = [names.get(number, f"[PAD{number}]") for number in range(rows)]
    types = [_token_type(number, names, added) for number in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return Vocabulary(pre, tokens, types, merges, adds_bos(tokenizer))


def _fallback(model: Mapping[str, Any]) -> str:
    return ", byte_fallback" if model.get("byte_fallback") else ""


def _token_type(number: int, names: Mapping[int, str], added: Mapping[int, Any]) -> int:
    if number in added:
        return CONTROL if added[number]["special"] else USER_DEFINED
    return NORMAL if number in names else UNUSED


def find_split_name(pre: Mapping[str, Any] | None, normalizer: Mapping[str, Any] | None) -> str | None:
    """Return llama.cpp's name of a pre-tokenizer; None if no known name matches.

    pre, normalizer: those parts of tokenizer.json. llama.cpp omits NFC for these vocabularies.
    """
    if normalizer is not None and normalizer.get("type") != "NFC":
        return None
    parts = list(pre["pretokenizers"]) if pre and pre.get("type") == "Sequence" else [pre] if pre else []
    if not parts or parts[-1].get("type") != "ByteLevel" or parts[-1].get("add_prefix_space"):
        return None
    before, regex = parts[:-1], parts[-1].get("use_regex", True)
    if not before:
        return "gpt-2" if regex else None
    if len(before) > 1:
        return None
    (one,) = before
    if one.get("type") == "Digits":
        return "smollm" if regex and one.get("individual_digits") else None
    plain = one.get("type") == "Split" and one.get("behavior") == "Isolated" and not one.get("invert") and not regex
    return SPLITS.get((one.get("pattern") or {}).get("Regex", "")) if plain else None


def adds_bos(tokenizer: Any) -> bool:
    """Return whether readers should prepend BOS: the tokenizer does, and so does its chat template, if it has one."""
    ids = tokenizer("a")["input_ids"]
    if tokenizer.bos_token_id is None or ids[:1] != [tokenizer.bos_token_id]:
        return False
    return not tokenizer.chat_template or render_sample(tokenizer).startswith(tokenizer.bos_token)


def render_sample(tokenizer: Any) -> str:
    """Render a short conversation with the chat template; "" without a template or if it refuses the conversation."""
    if not tokenizer.chat_template:
        return ""
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4."}]
    try:
        return chat.render(tokenizer, [*talk, {"role": "user", "content": "Why?"}], generation_prompt=True)
    except DataError:
        return ""


def check_tokenizer(found: Any, expected: Any) -> None:
    """Raise ModelError if the tokenizer that was read back gives other ids or has another chat template."""
    for text in (*COMPARED_TEXTS, render_sample(expected)):
        one, other = (t(text, add_special_tokens=False)["input_ids"] for t in (found, expected))
        if one != other:
            at = next(
                (n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
            )
            raise ModelError(f"the tokenizer in the file gives different ids from token {at} of {text[:60]!r} on")
    if (found.chat_template or None) != (expected.chat_template or None):
        raise ModelError("the chat template in the file differs from the model's")
