"""Compatibility checks from configs, tensor headers and tokenizers, before anything is written."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from posttrain.errors import MergeError, Problem, count_noun
from posttrain.merge.layers import count_layers, replace_layer
from posttrain.merge.plan import Plan
from posttrain.merge.sources import Source

# Config keys that may differ without a warning: where a model comes from, and how it is run.
_IGNORED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "model_type",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    "vocab_size",
}
_MAX_LISTED = 4  # names shown of a longer list


@dataclass(frozen=True)
class Check:
    """One row of the compatibility table: the property, its value in each model, and the problem or warning."""

    what: str
    values: list[str]
    problem: str = ""
    warning: str = ""
    hint: str = ""

    @property
    def verdict(self) -> str:
        return (
            "differs" if self.problem else "differs, allowed" if self.warning or len(set(self.values)) > 1 else "same"
        )


def compare(plan: Plan) -> list[Check]:
    """Run all checks and return them. The first source is the reference for the other sources."""
    sources = plan.sources
    checks = [_check_architecture(sources), _check_tied(sources)]
    if plan.stacked:
        checks.append(_check_layers(plan))
    else:
        checks += [
            _check_names(sources),
            _check_shapes(sources, plan.tokens.embeddings if plan.tokens else frozenset()),
        ]
    if plan.tokens is None or plan.tokens.tokenizer is None:
        checks.append(_check_vocabularies(sources, plan.tokens.rows if plan.tokens else None))
    return [*checks, _check_dtypes(sources), _check_configs(sources)]


def _check_layers(plan: Plan) -> Check:
    """Check for stacked layers that all tensors taken from the models exist and have consistent shapes."""
    problems = []
    shapes: dict[str, tuple[tuple[int, ...], str]] = {}  # name as of layer 0 -> shape, and where it was first seen
    for name in plan.out:
        part, position, anchored = plan.slice_of(name), plan.position(name), plan.anchor_name(name)
        wanted = {(part.anchor.name, anchored): part.anchor}
        wanted |= {(s.name, n): s for s, n in zip(part.models, position.inputs, strict=True)}
        for (model, stored), source in wanted.items():
            spec = source.tensors.get(stored)
            shape = spec.shape if spec else ()
            if plan.tokens is not None and name in plan.tokens.embeddings:
                shape = (plan.tokens.rows, *shape[1:])
            first, seen = shapes.setdefault(replace_layer(name, 0), (shape, f"{stored} of {model}"))
            if spec is None:
                problems.append(f"{model} has no {stored}")
            elif shape != first:
                problems.append(f"{stored} of {model} is {list(shape)}, {seen} {list(first)}")
    values = [str(max(count_layers(s.tensors).values(), default=0)) for s in plan.sources]
    return Check("layers", values, _list_names(problems), hint="stack layers of models of the same width")


def raise_problems(checks: Sequence[Check], sources: Sequence[Source]) -> None:
    """Raise a MergeError that lists every problem found; return if there is none."""
    names = ", ".join(source.name for source in sources)
    problems = [Problem(check.what, check.problem, f"models: {names}", check.hint) for check in checks if check.problem]
    if problems:
        raise MergeError.of(problems)


def table_rows(checks: Sequence[Check], sources: Sequence[Source]) -> list[list[str]]:
    """Return the checks as rows of text: property, one column per model, verdict. The first row has the headings."""
    return [["", *(source.name for source in sources), ""], *([c.what, *c.values, c.verdict] for c in checks)]


def _check_architecture(sources: Sequence[Source]) -> Check:
    values = [str((s.config.get("architectures") or [s.config.get("model_type", "unknown")])[0]) for s in sources]
    problem = "" if len(set(values)) == 1 else f"different architectures: {', '.join(dict.fromkeys(values))}"
    return Check("architecture", values, problem)


def _check_tied(sources: Sequence[Source]) -> Check:
    values = ["tied" if s.tied else "separate" for s in sources]
    problem = "" if len(set(values)) == 1 else "input and output embeddings are tied in some models and not in others"
    return Check("embeddings", values, problem, hint="untie them all (save with a separate lm_head) or tie them all")


def _check_names(sources: Sequence[Source]) -> Check:
    """Check that all models have the same tensor names."""
    first = sources[0].tensors.keys()
    problems = []
    for source in sources[1:]:
        missing, extra = sorted(first - source.tensors.keys()), sorted(source.tensors.keys() - first)
        if missing:
            problems.append(f"{source.name} lacks {_list_names(missing)}")
        if extra:
            problems.append(f"{source.name} has {_list_names(extra)}, which {sources[0].name} has not")
    return Check("tensors", [str(len(s.tensors)) for s in sources], "; ".join(problems))


def _check_shapes(sources: Sequence[Source], by_token: Collection[str]) -> Check:
    """Check that tensors of the same name have the same shape.

    by_token: embeddings that are reordered by token, so that their numbers of rows may differ.
    """
    problems = []
    for source in sources[1:]:
        both = [name for name in sources[0].tensors if name in source.tensors]
        wrong = [
            f"{name} {list(source.tensors[name].shape)} against {list(sources[0].tensors[name].shape)}"
            for name in both
            if source.tensors[name].shape[name in by_token :] != sources[0].tensors[name].shape[name in by_token :]
        ]
        if wrong:
            problems.append(f"{source.name} differs from {sources[0].name} in {_list_names(wrong)}")
    counts = [sum(t.nbytes // t.dtype.itemsize for t in s.tensors.values()) for s in sources]
    return Check("parameters", [f"{count:,}" for count in counts], "; ".join(problems))


def _check_vocabularies(sources: Sequence[Source], rows: int | None) -> Check:
    """Check that a token has the same id in all models.

    rows: number of rows of the merged embeddings, if smaller than in some model.
    """
    values = ["no tokenizer" if s.vocabulary is None else f"{len(s.vocabulary):,} tokens" for s in sources]
    known = [s for s in sources if s.vocabulary is not None]
    problems = []
    for source in known[1:]:
        a, b = known[0].token_ids(rows), source.token_ids(rows)
        wrong = sorted(token for token in a.keys() | b.keys() if a.get(token) != b.get(token))
        if wrong:
            token = wrong[0]
            ids = _describe_id(a, token), _describe_id(b, token)
            example = f"{token!r} is {ids[0]} in {known[0].name} and {ids[1]} in {source.name}"
            other = f"{count_noun(len(wrong), 'token')} with another id in {source.name} than in {known[0].name}"
            problems.append(f"{other}: {example}")
    unknown = [s.name for s in sources if s.vocabulary is None]
    warning = f"no tokenizer in {', '.join(unknown)}: its token ids could not be compared" if unknown else ""
    hint = "rows of the embedding would be mixed for different tokens; `tokenizer_source: union` merges them by token"
    return Check("vocabulary", values, "; ".join(problems), warning, hint)


def _describe_id(vocabulary: dict[str, int], token: str) -> str:
    return f"id {vocabulary[token]}" if token in vocabulary else "missing"


def _check_dtypes(sources: Sequence[Source]) -> Check:
    """Check that no tensor is integer in one model and float in another; warn about different float dtypes."""
    values = [
        " ".join(sorted({str(t.dtype).removeprefix("torch.") for t in s.tensors.values()})) or "none" for s in sources
    ]
    problems = []
    for source in sources[1:]:
        mixed = [
            name
            for name, spec in source.tensors.items()
            if name in sources[0].tensors
            and spec.dtype.is_floating_point != sources[0].tensors[name].dtype.is_floating_point
        ]
        if mixed:
            problems.append(
                f"{source.name} stores {_list_names(mixed)} as integers or floats where {sources[0].name} does not"
            )
    warning = "" if len(set(values)) == 1 else f"inputs are stored as {', '.join(dict.fromkeys(values))}"
    return Check("dtype", values, "; ".join(problems), warning)


def _check_configs(sources: Sequence[Source]) -> Check:
    """Compare the other config values. Differences are warnings only: most (dropout, ids) are harmless."""
    keys = sorted({key for s in sources for key in s.config} - _IGNORED)
    differing = [key for key in keys if len({repr(s.config.get(key)) for s in sources}) > 1]
    values = [" ".join(f"{key}={s.config.get(key)}" for key in differing) or "-" for s in sources]
    warning = (
        f"config differs in {', '.join(differing)}; the merged model takes {sources[0].name}'s" if differing else ""
    )
    return Check("other config", values, "", warning)


def _list_names(items: Sequence[str]) -> str:
    rest = len(items) - _MAX_LISTED
    return ", ".join(items[:_MAX_LISTED]) + (f" and {rest} more" if rest > 0 else "")
