"""Corrections for command-line overrides typed in the syntax or the key names of other tools.

--learning_rate 1e-5, --optim.lr=1e-5, --set optim.lr=1e-5, optim.lr 1e-5, +optim.lr=1e-5   ->   optim.lr=1e-5
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from posttrain.errors import nearest
from posttrain.recipe import keys
from posttrain.recipe.foreign.words import replacement_hint
from posttrain.recipe.stages import Stage

OVERRIDE_FORM = "an override is written key.path=value"


def suggest_override(typed: str, value: str, stages: Sequence[type[Stage]]) -> str:
    """Return the correction for a key as it was typed: `write optim.lr=1e-5`, or a sentence; empty if no known key is
    similar."""
    last = typed.rpartition(".")[2].replace("-", "_")
    for stage in stages:
        paths = list(keys.all_paths(stage))
        if key := _find_same_key(typed, paths):
            inner = next((f"{key}.{subkey}" for subkey in ("path", "source") if f"{key}.{subkey}" in paths), key)
            return f"write {inner}={value}"  # a section given as a value means its path or source
        if hint := replacement_hint(last, stage.model_fields["stage"].default):
            named = re.match(r"write `([\w.]+)`(?: \([^)]*\))?$", hint)
            return f"write {named[1]}={value}" if named else hint
        if "." in typed and (near := nearest(typed, paths, alike=0.85)):
            return f"did you mean {near}={value}?"
    for stage in stages:
        if "." in typed and (hint := replacement_hint(typed.replace(".", "_"), stage.model_fields["stage"].default)):
            return hint
        if "." in typed and last in keys.GENERIC_KEYS:
            continue
        if ends := keys.keys_by_last_part(stage).get(last):
            return f"write {' or '.join(f'{key}={value}' for key in ends[:2])}"
    for stage in stages:
        head, dot, _ = typed.partition(".")
        if dot and head in keys.components_of(stage.model_fields["stage"].default):  # argument of a component
            return f"write {typed}={value}"
        if near := nearest(typed, keys.all_paths(stage), alike=0.75):
            return f"did you mean {near}={value}?"
    return ""


def _find_same_key(typed: str, paths: Sequence[str]) -> str | None:
    """Return the key that equals `typed` except for dots, dashes and underscores, or that is the end of a longer key of
    another tool."""
    if typed in paths:
        return typed
    plain = re.sub(r"[.-]", "_", typed)
    alike = [key for key in paths if key.replace(".", "_") == plain]
    ends = [key for key in paths if "." in key and typed.endswith(f".{key}")]
    return next(iter([*alike, *ends]), None)


def correct_overrides(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each override of a command line with its correction; the correction is empty if the override is well
    formed.

    `key value`, `key = value` and `key: value` each count as one override.
    """
    left = list(words)
    while left:
        word = left.pop(0)
        key, equals, value = word.partition("=")
        if word.endswith((".yaml", ".yml")) and "=" not in word:
            yield word, f"a command takes one recipe: give {word} to a command of its own"
        elif plain := re.match(r"(\++)(?=[\w.]+=)", word):
            yield word, f"write {word.removeprefix(plain[1])}, without {plain[1]}"
        elif word.startswith("~"):
            yield word, f"write {word[1:].partition('=')[0]}=null, where the key may be empty"
        elif equals and value.count("[") + value.count("{") > value.count("]") + value.count("}") and left:
            whole = " ".join([word, *left])  # the shell has split a list or a mapping
            left.clear()
            yield whole, f"write '{whole}', in quotes"
        elif equals and (value or not left or not _is_value(left[0])):
            yield word, ""
        elif not equals and (colon := re.match(r"([A-Za-z_][\w.]*):(.+)$", word)):
            yield word, f"write {colon[1]}={colon[2]}"
        elif re.fullmatch(r"[A-Za-z_][\w.]*:?", key) and left and (_is_value(left[0]) or left[0].startswith("=")):
            parts = [word, left.pop(0)]
            if parts[-1] == "=" and left:
                parts.append(left.pop(0))
            yield " ".join(parts), f"write {key.rstrip(':')}={parts[-1].removeprefix('=')}, without a space"
        else:
            yield word, f"write {word}=VALUE" if re.fullmatch(r"[A-Za-z_][\w.]*", word) else OVERRIDE_FORM


def _is_value(word: str) -> bool:
    """Return whether a word can be the value after `=`, and is not an override itself."""
    return "=" not in word or bool(re.match(r"[\[{\"']", word))
