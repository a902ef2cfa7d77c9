"""Tokenizer of a merged model, and embeddings reordered by token for models with different vocabularies.

Implements mergekit's `tokenizer_source` and `tokenizer`: every model's embedding is rebuilt with one row for each token
of the result. A token that a model lacks gets the row of the base, else the mean over the models that have it, else
zeros.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from posttrain.errors import MergeError, count_noun
from posttrain.merge.rules import to_sum_dtype
from posttrain.merge.sources import Source
from posttrain.recipe.merge_sections import MergeTokenizer, TokenEmbedding, TokenFrom
from posttrain.recipe.stages import MergeRecipe

CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
LLAMA3 = """\
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3}  # the names are in recipe.merging.NAMED_TEMPLATES
_MAX_LISTED = 3  # tokens listed in an error


@dataclass(frozen=True)
class Vocabulary:
    """Tokens of the output, and their embedding rows in each model.

    tokenizer: None if the tokenizer of a model is used. rows: of the written embeddings, including padding rows.
    tokens: number of rows that are tokens. embeddings: names of the tensors with one row per token. ids: folder -> row
    of each token in that model, -1 if it lacks the token. fixed: token -> (folder, row) of its source, None for zeros.
    forced: tokens for which `fixed` also overrides models that have them.
    """

    tokenizer: Any | None
    rows: int
    tokens: int
    embeddings: frozenset[str]
    ids: Mapping[Path, Tensor]
    fixed: Mapping[int, tuple[Path, int] | None]
    forced: frozenset[int]
    base: Path | None


def reorder_embeddings(vocabulary: Vocabulary, tensors: Mapping[Path, Tensor]) -> dict[Path, Tensor]:
    """Return the embeddings of several models (folder -> tensor) with the rows of the merged vocabulary.

    Shapes: [V, ...], V the tokens of a model; the results have one row for each token of the merged vocabulary.
    """
    count = vocabulary.tokens
    replacements = _rows_for_missing_tokens(vocabulary, tensors)
    for token, place in vocabulary.fixed.items():
        replacements[token] = 0 if place is None else tensors[place[0]][place[1]]
    forced = torch.zeros(count, dtype=torch.bool)
    forced[list(vocabulary.forced)] = True
    embeddings = {}
    for folder, tensor in tensors.items():
        ids = vocabulary.ids[folder]
        reordered = tensor.new_zeros((vocabulary.rows, *tensor.shape[1:]))
        has_token = (ids >= 0) & ~forced
        reordered[:count][has_token] = tensor[ids[has_token]]
        reordered[:count][~has_token] = replacements[~has_token].to(tensor.dtype)
        reordered[count:] = to_sum_dtype(reordered[:count]).mean(0).to(tensor.dtype)
        embeddings[folder] = reordered
    return embeddings


def _rows_for_missing_tokens(vocabulary: Vocabulary, tensors: Mapping[Path, Tensor]) -> Tensor:
    """Return the row for models that lack a token: the base's row, else the mean over the models that have it."""
    first = to_sum_dtype(next(iter(tensors.values())))
    total = first.new_zeros((vocabulary.tokens, *first.shape[1:]))
    count = torch.zeros(vocabulary.tokens, dtype=first.dtype)
    for folder, tensor in tensors.items():
        ids = vocabulary.ids[folder]
        has = ids >= 0
        total[has] += to_sum_dtype(tensor[ids[has]])
        count += has
    rows = total / count.clamp(min=1).view(-1, *[1] * (first.dim() - 1))
    if vocabulary.base in tensors and vocabulary.base is not None:
        ids = vocabulary.ids[vocabulary.base]
        rows[ids >= 0] = to_sum_dtype(tensors[vocabulary.base][ids[ids >= 0]])
    return rows


def build_vocabulary(
    recipe: MergeRecipe, together: Sequence[Sequence[Source]], models: Mapping[str, Source], default: Source
) -> Vocabulary | None:
    """Return the vocabulary that the recipe asks for; None if it asks for none or all models already have it.

    together: for each slice of the output, the models merged with each other. Raises MergeError if a model has no
    tokenizer.
    """
    settings = recipe.tokenizer
    if settings is None:
        if recipe.tokenizer_source is None:
            return _truncate_to_common_rows(together, default)
        settings = MergeTokenizer(source=recipe.tokenizer_source)
    source = settings.source.removeprefix("model:")
    everyone = list({s.folder: s for part in together for s in part}.values())
    if missing := [s.name for s in [*everyone, default] if s.vocabulary is None]:
        raise MergeError(f"no tokenizer in {', '.join(missing)}, so embeddings cannot be ordered by token")
    if source == "union":
        tokenizer = _unite_tokenizers(default, everyone)
    else:
        tokenizer = _load_without_unused_tokens(default if source == "base" else models[source])
    tokenizer.add_tokens([token for token in settings.tokens if token not in tokenizer.get_vocab()])
    return _build_layout(tokenizer, settings, together, models, default if recipe.base_model else None, default)


def _truncate_to_common_rows(together: Sequence[Sequence[Source]], default: Source) -> Vocabulary | None:
    """Return a vocabulary of the rows that all embeddings have; None if all have the same number of rows.

    Also None if the tokenizer's model has more rows. The compatibility report checks that these rows are the same
    tokens.
    """
    everyone = list({s.folder: s for part in together for s in part}.values())
    names = frozenset(name for s in everyone for name in embedding_names(s))
    if all(len({s.tensors[name].shape[0] for s in everyone if name in s.tensors}) == 1 for name in names):
        return None
    rows = min(_count_rows(s) for s in everyone)
    if _count_rows(default) != rows:
        return None
    ids = {s.folder: torch.arange(rows) for s in everyone}
    return Vocabulary(None, rows, rows, names, ids, {}, frozenset(), None)


def _build_layout(
    tokenizer: Any,
    settings: MergeTokenizer,
    together: Sequence[Sequence[Source]],
    models: Mapping[str, Source],
    base: Source | None,
    default: Source,
) -> Vocabulary | None:
    """Return the vocabulary of a tokenizer with each token's row in every model; None if nothing has to change."""
    vocabulary = tokenizer.get_vocab()
    size, step = max(vocabulary.values(), default=-1) + 1, settings.pad_to_multiple_of or 1
    everyone = list({s.folder: s for part in together for s in part}.values())
    names = frozenset(name for s in everyone for name in embedding_names(s))
    ids = {}
    for source in everyone:
        rows = min((source.tensors[n].shape[0] for n in names if n in source.tensors), default=0)
        rows_of_tokens = torch.full((size,), -1, dtype=torch.long)
        for token, new in vocabulary.items():
            place = (source.vocabulary or {}).get(token, -1)
            rows_of_tokens[new] = place if place < rows else -1
        ids[source.folder] = rows_of_tokens
    fixed, forced = _fix_tokens(settings.tokens, vocabulary, together, models)
    same = all(torch.equal(rows_of_tokens, torch.arange(size)) for rows_of_tokens in ids.values())
    no_padding = all(s.tensors[n].shape[0] == size for s in everyone for n in names if n in s.tensors)
    if same and no_padding and size % step == 0 and not fixed and vocabulary == default.vocabulary:
        return None
    return Vocabulary(
        tokenizer, -(-size // step) * step, size, names, ids, fixed, forced, None if base is None else base.folder
    )


def _fix_tokens(
    tokens: Mapping[str, TokenEmbedding],
    vocabulary: Mapping[str, int],
    together: Sequence[Sequence[Source]],
    models: Mapping[str, Source],
) -> tuple[dict[int, tuple[Path, int] | None], frozenset[int]]:
    """Return the source rows of the tokens named in the recipe, and the tokens forced on every model."""
    fixed: dict[int, tuple[Path, int] | None] = {}
    for token, entry in tokens.items():
        asked, at = entry.source, f"tokenizer.tokens.{token}.source"
        if asked is None:
            continue
        if isinstance(asked, TokenFrom) and asked.kind == "zero":
            fixed[vocabulary[token]] = None
            continue
        source = models[asked if isinstance(asked, str) else asked.model or ""]
        if not all(source.folder in {s.folder for s in part} for part in together):
            raise MergeError(f"{at}: {source.name} is not merged, or not in every slice")
        wanted: str | int = token
        if isinstance(asked, TokenFrom):
            wanted = asked.token if asked.token is not None else int(asked.token_id or 0)
        row = wanted if isinstance(wanted, int) else (source.vocabulary or {}).get(wanted)
        rows = min(source.tensors[name].shape[0] for name in embedding_names(source))
        if row is None or row >= rows:
            raise MergeError(f"{at}: {source.name} has no embedding of {wanted!r}")
        fixed[vocabulary[token]] = (source.folder, row)
    return fixed, frozenset(vocabulary[token] for token, entry in tokens.items() if entry.force)


def embedding_names(source: Source) -> list[str]:
    """Return the names of a model's tensors with one row per token: input embedding, head and the head's bias."""
    ends = _embedding_suffixes(source.folder, (source.config.get("architectures") or [""])[0])
    return [name for name in source.tensors if _name_suffix(name) in ends]


def _name_suffix(name: str) -> str:
    """Return the last two parts of a tensor's name; the prefix differs between a model and its files."""
    return ".".join(name.split(".")[-2:])


@functools.lru_cache(maxsize=32)
def _embedding_suffixes(folder: Path, architecture: str) -> frozenset[str]:
    """Return the name suffixes of a model's input and output embedding parameters."""
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    loader = getattr(transformers, architecture, None) if architecture else None
    with torch.device("meta"):
        model = loader(config) if loader else AutoModelForCausalLM.from_config(config)
    layers = [model.get_input_embeddings(), model.get_output_embeddings()]
    wanted = {id(p) for layer in layers if layer is not None for p in layer.parameters(recurse=False)}
    return frozenset(_name_suffix(n) for n, p in model.named_parameters(remove_duplicate=False) if id(p) in wanted)


def _load_without_unused_tokens(source: Source) -> Any:
    """Return a model's tokenizer without tokens that have no embedding row.

    Raises MergeError if they cannot be removed.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(source.folder)
    rows = _count_rows(source)
    unused = {token for token, place in tokenizer.get_vocab().items() if place >= rows}
    if not unused:
        return tokenizer
    core = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else {"model": {}}
    if core["model"].get("type") != "BPE":
        raise MergeError(
            f"{count_noun(len(unused), 'token')} of {source.name} have no row in its embedding, such as "
            f"{', '.join(sorted(unused)[:_MAX_LISTED])}; they can be removed from fast BPE tokenizers only"
        )
    core["added_tokens"] = [entry for entry in core["added_tokens"] if entry["id"] < rows]
    core["model"]["vocab"] = {token: i for token, i in core["model"]["vocab"].items() if token not in unused}
    merges = core["model"]["merges"]
    core["model"]["merges"] = [m for m in merges if not unused & set(m.split(" ") if isinstance(m, str) else m)]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(core))
    return tokenizer


def _unite_tokenizers(first: Source, sources: Sequence[Source]) -> Any:
    """Return the tokenizer of `first` with the missing tokens of all other sources appended."""
    from transformers import AutoTokenizer

    found = _load_without_unused_tokens(first)
    known = set(found.get_vocab())
    ordinary: list[Any] = []
    added: list[Any] = []
    for source in (s for s in sources if s.folder != first.folder):
        tokenizer: Any = AutoTokenizer.from_pretrained(source.folder)
        special = {info.content: info for _, info in sorted(tokenizer.added_tokens_decoder.items())}
        order = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
        own = [token for token, place in order if place < _count_rows(source) and token not in known]
        ordinary += [token for token in own if token not in special]
        added += [special[token] for token in special if token in own]
        known |= set(own)
    found.add_tokens(ordinary)
    found.add_tokens(added)
    return found


def _count_rows(source: Source) -> int:
    return min((source.tensors[name].shape[0] for name in embedding_names(source)), default=0)


def select_template(asked: str | None, models: Sequence[Source], tokenizer: Source) -> str | None:
    """Return the chat template to write, None for the tokenizer's own.

    Raises MergeError if the model has no tokenizer.
    """
    if asked is None:
        return None
    if tokenizer.vocabulary is None:
        raise MergeError(f"chat_template: {tokenizer.name} has no tokenizer that it could be written to")
    if asked != "auto":
        return TEMPLATES.get(asked, asked)
    from transformers import AutoTokenizer

    found = Counter(
        select_template.strip()
        for model in models
        if model.vocabulary is not None
        and (select_template := _default_template(AutoTokenizer.from_pretrained(model.folder)))
    )
    return found.most_common(1)[0][0] if found else None


def _default_template(tokenizer: Any) -> str:
    own = tokenizer.chat_template
    return str((own.get("default") if isinstance(own, dict) else own) or "")
