"""`posttrain data audit`: checks whether the data of a recipe is fit to train on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli.guard import say
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json, Overrides, Recipe
from posttrain.errors import count_noun

if TYPE_CHECKING:
    from posttrain.recipe.sections import Data

GENERATED_ROWS = 500  # rows generated for `--against gym:TASK` and `FILE.py:FUNCTION`

Against = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="DATA|RECIPE",
        help="More evaluation data to check for overlap (a data source, or a recipe's data); repeatable.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command to the group."""
    app.command("audit")(audit)


def audit(recipe: Recipe, overrides: Overrides = None, against: Against = None, as_json: Json = False) -> None:
    """Check data for duplicates, overlap with evaluation data, over-long rows, unusable gold answers and label
    imbalance.

    Needs the tokenizer and the model's configuration, no weights. Gold answers are scored by the recipe's own reward.
    Exit code 1 if a check finds something.
    """
    from posttrain.cli import packages, preflight
    from posttrain.data import inspect as looking

    checked = preflight.load(recipe, overrides or [], without=["run", "gpu"])
    stage = choose_row_stage(checked.recipe)
    looking.check_stage(stage)
    packages.require(checked, packages.is_for_tokens)
    report = audit_data(checked.recipe, stage, against or [])
    if as_json:
        print_json(report)
    else:
        show(report)
    end_with_findings(report["checks"], as_json=as_json)


def end_with_findings(checks: Sequence[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print how many checks found something after a text report; raise Exit with code 1 if any did."""
    bad = sum(not finding["ok"] for finding in checks)
    if not as_json:
        say(f"{count_noun(bad, 'finding')}, marked LOOK" if bad else "no findings")
    if bad:
        raise typer.Exit(1)


def choose_row_stage(recipe: Any) -> str:
    """Return the stage whose row format the recipe reads: a reward model reads pairs like dpo, or answers like sft."""
    if recipe.verb == "reward-model":
        return "dpo" if recipe.objective.pairs else "sft"
    return str(recipe.verb)


def audit_data(recipe: Any, stage: str, against: Sequence[str]) -> dict[str, Any]:
    """Return the report that `--json` prints: the parts of `evaluate.data_audit`, and `checks` with the verdict on
    each.
    """
    from posttrain.data.inspect import inspect
    from posttrain.data.rows import load_rows
    from posttrain.evaluate import data_audit
    from posttrain.models import load as models

    base_dir = recipe.base_dir
    with models.read_gguf_once(recipe.model, base_dir):
        tokenizer = models.load_tokenizer(recipe.model, base_dir)
        eos = models.load_eos_ids(recipe.model, base_dir, tokenizer)
        positions = models.max_positions(models.config_of(recipe.model, base_dir))
        reader = models.load_image_reader(recipe.model, base_dir, tokenizer)
    single = recipe.verb == "dpo" and "labels" in recipe.loss.needs
    rules = recipe.pairs if recipe.verb == "dpo" else None
    found = inspect(stage, recipe.data, tokenizer, base_dir, eos, 0, single=single, rules=rules, reader=reader)
    rows = load_rows(recipe.data, base_dir)
    sampling = getattr(recipe, "rollout", None) or getattr(recipe, "sampling", None)
    rewards = getattr(recipe, "rewards", None)
    golds = data_audit.check_golds(rewards, recipe.scoring, base_dir, rows) if rewards else None
    columns = ["label", *([golds["column"]] if golds and "column" in golds else [])]
    report = {
        **{key: found[key] for key in ("stage", "rows", "items", "dropped", "cut", "noted", "lengths")},
        "window": data_audit.check_window(found, positions, sampling.max_new_tokens if sampling else 0),
        "duplicates": data_audit.find_duplicates(rows),
        "evaluation": [
            data_audit.find_overlap(rows, load_rows(data, base), str(data.source or "a mixture"))
            for data, base in list_evaluation_data(recipe, against)
        ],
        "golds": golds,
        "labels": [one for column in columns if (one := data_audit.count_labels(rows, column))],
        "pairs": data_audit.compare_pair_lengths(rows),
    }
    return {**report, "checks": data_audit.build_verdicts(report)}


def list_evaluation_data(recipe: Any, against: Sequence[str]) -> Iterator[tuple[Data, Path]]:
    """Yield the evaluation data of the recipe and of `--against` (a recipe with data, or a source), each with its
    directory.
    """
    from posttrain.cli import preflight
    from posttrain.path_resolution import known_files
    from posttrain.recipe.eval_sections import held_out_data
    from posttrain.recipe.sections import Data

    if getattr(recipe, "eval", None) is not None and hasattr(recipe.eval, "data"):
        yield held_out_data(recipe.data, recipe.eval.data), recipe.base_dir
    shipped = {name.removesuffix(".yaml") for name in known_files("recipes", [".yaml"])}
    for name in against:
        if name.endswith((".yaml", ".yml")) or name in shipped:
            other: Any = preflight.load(name, without=["model", "run"]).recipe
            yield other.data, other.base_dir
        else:
            generated = name.startswith(("gym:", "task:")) or ".py:" in name  # such sources need a size
            yield Data.model_validate({"source": name, **({"size": GENERATED_ROWS} if generated else {})}), Path.cwd()


def show(report: dict[str, Any]) -> None:
    """Print the report as text on stdout."""
    terminal.say(f"{report['stage']}: {count_noun(report['rows'], 'row')}, {report['items']} kept")
    width = max(len(part) for part in report["lengths"])
    for part, lengths in report["lengths"].items():
        numbers = "  ".join(f"{name} {count}" for name, count in lengths.items())
        terminal.say(f"  {part:<{width}}  tokens: {numbers}")
    terminal.say()
    for finding in report["checks"]:
        terminal.say(f"{'ok  ' if finding['ok'] else 'LOOK'} {finding['name']}: {finding['text']}")
