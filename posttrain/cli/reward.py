"""`posttrain reward test`: tests of reward scripts that need no GPU. Does not load torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from posttrain import terminal
from posttrain.cli import imports
from posttrain.cli.guard import say
from posttrain.cli.help import App
from posttrain.cli.show import print_json
from posttrain.cli.stage import Json, Overrides
from posttrain.errors import RewardError, count_noun, nearest
from posttrain.path_resolution import find, known_files

if TYPE_CHECKING:
    from posttrain.recipe.load import Loaded
    from posttrain.recipe.reward_sections import Reward, Scoring
    from posttrain.recipe.sections import Data
    from posttrain.verify.examples import Outcome
    from posttrain.verify.trial import Trial

app = App()

Target = Annotated[
    str,
    typer.Argument(
        metavar="TARGET", help="What to test: FILE.py[:function], a shipped reward (math, math.accuracy), or a recipe."
    ),
]
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="SECONDS", help="Time limit for the reward call of each example.")
]
Labeled = Annotated[
    Path | None,
    typer.Option(
        "--labelled",
        metavar="FILE",
        help="JSONL of rows with completion, label (true or false) and data columns: report agreement with the labels.",
    ),
]
SHOWN_ROWS = 5  # rows listed under a finding


@app.callback()
def group() -> None:
    """Test reward scripts without a GPU."""


@app.command()
def test(
    target: Target,
    overrides: Overrides = None,
    as_json: Json = False,
    timeout: Timeout = 10.0,
    labeled: Labeled = None,
) -> None:
    """Run a script's EXAMPLES; with a recipe, also score right and wrong completions of the recipe's own rows.

    A script may define rows of its own (`ROWS`), which are scored in the same way.

    Exit code 2 if an example fails, a call raises or times out, the gold answer does not score best, or a trick scores
    as high as the gold answer: gold only in the thought, every answer named, an injection for judges, and others.
    """
    script = _find_script(target)
    if script:
        imports.check_script(script[0])
    if labeled is not None:
        _report_labels(target, script, overrides or [], labeled, as_json)
        return
    if script:
        found = _test_script(script, timeout, as_json)
    else:
        found = _test_recipe(target, overrides or [], timeout, as_json)
    if as_json:
        print_json(found)
    if _has_failures(found):
        raise typer.Exit(2)


def _report_labels(
    target: str, script: tuple[Path, str | None] | None, overrides: Sequence[str], path: Path, as_json: bool
) -> None:
    """Report how the rewards of a script or recipe agree with the labels of a file."""
    from posttrain.cli import preflight
    from posttrain.errors import DataError
    from posttrain.recipe.reward_sections import Reward, Scoring
    from posttrain.verify.label_agreement import read_labeled, try_labeled

    rows = read_labeled(find(str(path), None, "labelled rows", DataError))
    if script and script[1] is None:
        raise RewardError(f"{target} names no function", hint=f"write {target}:FUNCTION, or script.function")
    if script:
        report = try_labeled([Reward(use=f"{script[0]}:{script[1]}")], Scoring(), None, rows)
    else:
        loaded = preflight.load(target, overrides, without=["model", "data", "run"])
        parts = _graded_parts(loaded)
        if not parts:
            raise RewardError(f"stage {loaded.recipe.verb} has no rewards of data rows", where=str(loaded.path))
        report = try_labeled(parts[0][2], parts[0][3], loaded.recipe.base_dir, rows)
    if as_json:
        print_json(report)
    else:
        _print_labeled(report)


def _print_labeled(report: Mapping[str, Any]) -> None:
    """Print agreement with labels: a confusion matrix and kappa per reward, and kappa between rewards."""
    for name, labeled in report["rewards"].items():
        c = labeled["confusion"]
        terminal.say(
            f"{name}: agreement with {count_noun(report['rows'], 'label')}, kappa {_format_kappa(labeled['kappa'])}"
        )
        terminal.say(f"  labelled right: {c['right_right']} right, {c['right_wrong']} wrong")
        terminal.say(f"  labelled wrong: {c['wrong_right']} right, {c['wrong_wrong']} wrong")
        if c["unscored"]:
            terminal.say(f"  without a score: {c['unscored']}")
        if labeled["wrong_rows"]:
            terminal.say(f"  against the label: {', '.join(labeled['wrong_rows'][:SHOWN_ROWS])}")
    for pair, labeled in report["pairs"].items():
        apart = f"; apart on {', '.join(labeled['rows'][:SHOWN_ROWS])}" if labeled["rows"] else ""
        terminal.say(f"{pair}: kappa {_format_kappa(labeled['kappa'])}{apart}")


def _format_kappa(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _find_script(target: str) -> tuple[Path, str | None] | None:
    """Return (file, function or None for all) of a target that names a script; None for a recipe."""
    stem, _, name = target.partition(".py:")
    if name or target.endswith((".py", ".py:")):
        path = f"{stem}.py" if name else target.removesuffix(":")
        return find(path, None, "reward script", RewardError), name or None
    if target.endswith((".yaml", ".yml")):  # a recipe, even if a shipped script has the same name
        return None
    shipped = known_files("rewards", [".py"])
    script, _, function = target.partition(".")
    if script in shipped:
        return shipped[script], function or None
    if Path(f"{script}.py").is_file():
        hint = f"write {script}.py{f':{function}' if function else ''}"
        raise RewardError(f"no shipped reward script `{script}`", hint=hint)
    near = nearest(script, shipped)
    is_recipe = Path(target).exists() or nearest(target, known_files("recipes", [".yaml"]))
    if near and not is_recipe:
        allowed = f"known: {', '.join(sorted(shipped))}, FILE.py:FUNCTION, or a recipe"
        raise RewardError(f"no reward script `{target}`", allowed=allowed, hint=f"did you mean `{near}`?")
    return None


def _test_script(script: tuple[Path, str | None], timeout: float, quiet: bool) -> dict[str, Any]:
    """Test a script's EXAMPLES, then its ROWS."""
    from posttrain.recipe.reward_sections import Scoring
    from posttrain.verify.script_rows import own_rows

    report: dict[str, Any] = {"examples": _run_examples([script], timeout, quiet), "rows": []}
    for own in own_rows(*script):
        report["rows"].append(_run_trial(own.function, own.rows, own.rewards, Scoring(workers=2), None, quiet))
    if not report["rows"]:
        say("right answers and tricks were not scored: they need rows (name a recipe, or define ROWS in the script)")
    return report


def _run_examples(scripts: Sequence[tuple[Path, str | None]], timeout: float, quiet: bool) -> list[dict[str, Any]]:
    """Run the EXAMPLES of scripts; return a report per function."""
    from posttrain.verify.examples import run_examples

    report = []
    for path, function in scripts:
        outcomes = run_examples(path, function, timeout_s=timeout)
        for name in dict.fromkeys(o.function for o in outcomes):
            of_function = [o for o in outcomes if o.function == name]
            report.append(_to_dict(path, name, of_function))
            if not quiet:
                _print_examples(report[-1], [o for o in of_function if not o.ok])
    return report


def _to_dict(path: Path, name: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {
        "script": str(path),
        "function": name,
        "passed": sum(o.ok for o in outcomes),
        "failed": sum(not o.ok for o in outcomes),
        "call_ms": 1000 * sum(o.result.seconds for o in outcomes) / max(1, len(outcomes)),
        "outcomes": [
            {"completion": o.example.completion, "expected": o.example.expected, "got": o.result.value, "ok": o.ok}
            for o in outcomes
        ],
    }


def _print_examples(report: Mapping[str, Any], failures: Sequence[Outcome]) -> None:
    total = report["passed"] + report["failed"]
    name = f"{Path(report['script']).name}:{report['function']}"
    terminal.say(
        f"{name}  {report['passed']} of {count_noun(total, 'example')} right, {report['call_ms']:.2f} ms a call"
    )
    for o in failures:
        terminal.say(f"  {o.example.completion!r} {dict(o.example.columns)}")
        terminal.say(f"    expected {o.example.expected}, got {o.outcome}")


def _test_recipe(name: str, overrides: Sequence[str], timeout: float, quiet: bool) -> dict[str, Any]:
    """Test the EXAMPLES of a recipe's reward scripts, then its rewards on its rows."""
    from posttrain.cli import packages, preflight
    from posttrain.data.rows import load_rows
    from posttrain.verify.load import load_reward

    loaded = preflight.load(name, overrides, without=["model", "run"])
    parts = list(_graded_parts(loaded))
    if not parts:
        raise RewardError(f"stage {loaded.recipe.verb} has no rewards of data rows", where=str(loaded.path))
    packages.require(loaded, packages.is_for_rows)
    base_dir = loaded.recipe.base_dir
    rewards = [load_reward(section, base_dir) for _, _, sections, _ in parts for section in sections]
    scripts = {_split_target(reward.target): None for reward in rewards}
    with_examples = [s for s in scripts if s and _has_examples(s)]
    for script in scripts:
        if script and script not in with_examples:
            say(f"{script[0]}: {script[1]} has no EXAMPLES")
    report: dict[str, Any] = {"examples": _run_examples(with_examples, timeout, quiet), "recipe": []}
    for stage, data, sections, scoring in parts:
        rows = load_rows(data, base_dir)
        report["recipe"].append({"stage": stage, **_run_trial(stage, rows, sections, scoring, base_dir, quiet)})
    return report


def _graded_parts(loaded: Loaded) -> list[tuple[str, Data, Sequence[Reward], Scoring]]:
    """Return (stage, data, rewards, scoring) of a recipe, or of each stage of a pipeline, without duplicates.

    The marks of `model.thoughts` are recognized from then on, as in a run, which loads the tokenizer.
    """
    from posttrain import thoughts
    from posttrain.recipe.reward_sections import Reward, Scoring
    from posttrain.recipe.sections import Data

    for stage in loaded.resolved.get("stages") or [loaded.resolved]:
        if marks := (stage.get("model") or {}).get("thoughts"):
            thoughts.add_format(*marks)
    recipe: Any = loaded.recipe
    if recipe.verb != "run":
        graded = hasattr(recipe, "rewards") and hasattr(recipe, "data")  # `pairs` scores completions and has no rows
        return [(recipe.verb, recipe.data, recipe.rewards, recipe.scoring)] if graded else []
    parts: dict[str, Any] = {}
    for entry in recipe.stages:
        if entry.get("rewards") and entry.get("data"):  # a stage that reads another stage's completions has no rows
            data = Data.model_validate(entry["data"])
            rewards = [Reward.model_validate(r) for r in entry["rewards"]]
            scoring = Scoring.model_validate(entry.get("scoring", {}))
            parts.setdefault(f"{data} {rewards} {scoring}", (entry["name"], data, rewards, scoring))
    return list(parts.values())


def _split_target(target: str) -> tuple[Path, str] | None:
    stem, _, name = target.rpartition(":")
    return (Path(stem), name) if stem.endswith(".py") else None


def _has_examples(script: tuple[Path, str]) -> bool:
    from posttrain.verify.examples import read_examples

    try:
        read_examples(*script)
    except RewardError:
        return False
    return True


def _run_trial(
    what: str,
    rows: Sequence[Mapping[str, Any]],
    rewards: Sequence[Reward],
    scoring: Scoring,
    base_dir: Path | None,
    quiet: bool,
) -> dict[str, Any]:
    """Score rows with the rewards and return the trial as JSON, with the verdict `ok`. what: the stage or function
    printed.
    """
    from posttrain.recipe.reward_checks import reward_name
    from posttrain.verify.trial import as_json, try_rewards

    trial = try_rewards(rewards, scoring, base_dir, rows)
    too_many_bad = trial.knows_gold and len(trial.bad_gold) > scoring.max_bad_gold * trial.rows
    tricked = trial.knows_gold and any(paid > scoring.max_bad_gold * rows for paid, rows in trial.tricks.values())
    # A recipe whose correctness reward has weight 0 trains on something else on purpose, such as a random control.
    counts_right = base_dir is None or any(s.weight for s in rewards if reward_name(s) == trial.correctness)
    outbid = counts_right and any(paid > scoring.max_bad_gold * rows for paid, rows in trial.outbid.values())
    counts = [count for by_name in trial.injected.values() for count in by_name.values()]
    moved = any(n > scoring.max_bad_gold * rows for n, rows in counts)
    if not quiet:
        _print_trial(what, trial)
    return {**as_json(trial), "ok": not (trial.failures or too_many_bad or tricked or outbid or moved)}


def _print_trial(what: str, trial: Trial) -> None:
    """Print the scores of right and wrong completions, the tricks that succeed, and the speed."""
    from posttrain import source_locations
    from posttrain.verify.reward_test_cases import describe_writer

    if trial.first_traceback:
        terminal.say(f"\n{what}: first error:\n{trial.first_traceback}")
    terminal.say(f"\n{what}: {count_noun(trial.rows, 'row')}, gold written {describe_writer(trial.writer)}")
    kinds = list(next(iter(trial.table.values())))
    lines = [["", *kinds, "ms a call", "slowest"]]
    for name, cells in trial.table.items():
        speed = [f"{trial.call_ms[name]:.2f}", f"{trial.slowest_ms[name]:.1f}"]
        lines.append([name, *(_format_score(cells[kind]) for kind in kinds), *speed])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    for first, *rest in lines:
        numbers = "  ".join(text.rjust(width) for text, width in zip(rest, widths[1:], strict=True))
        terminal.say(f"{first:<{widths[0]}}  {numbers}".rstrip())
    if not trial.knows_gold:
        judged = trial.correctness in trial.injected
        why = "is a judge" if judged else "reads no data column"
        terminal.say(f"{trial.correctness} {why}, so it has no gold answers to compare with")
    else:
        best = f"{trial.rows - len(trial.bad_gold)} of {count_noun(trial.rows, 'row')}"
        terminal.say(f"gold scores best on {best} ({trial.correctness})")
        for uid, wrong in list(trial.bad_gold.items())[:SHOWN_ROWS]:
            terminal.say(f"  {source_locations.describe_row(uid)}: {wrong}")
        for doubt in trial.doubts:
            terminal.say(f"warning: {doubt}")
        tricks = [
            f"{name} on {paid} of {count_noun(rows, 'row')}" for name, (paid, rows) in trial.paying_tricks.items()
        ]
        tried = ", ".join(trial.tricks)
        terminal.say(f"tricks that score as high as gold: {'; '.join(tricks) or 'none'} (tried: {tried})")
    if trial.outbid:
        above = [
            f"{name} on {paid} of {count_noun(rows, 'row')}" for name, (paid, rows) in trial.outbid.items() if paid
        ]
        terminal.say(f"wrong answers with a higher total reward than gold: {'; '.join(above) or 'none'}")
    terminal.say(f"{trial.calls_per_second:,.0f} calls per second with {count_noun(trial.workers, 'worker')}")
    for judge, counts in trial.injected.items():
        moved = [f"{name} on {n} of {count_noun(rows, 'row')}" for name, (n, rows) in counts.items() if n]
        terminal.say(
            f"injections that raise judge {judge}'s score: {'; '.join(moved) or 'none'} (tried: {', '.join(counts)})"
        )


def _format_score(cell: Any) -> str:
    """Return the mean score, with abstentions, errors and timeouts in brackets: `0.50 (2 none, 1 error, 1 late)`."""
    counts = [(cell.abstained, "none"), (cell.errors, "error"), (cell.timeouts, "late")]
    other = ", ".join(f"{n} {what}" for n, what in counts if n)
    mean = "-" if cell.mean is None else f"{cell.mean:.2f}"
    return f"{mean} ({other})" if other else mean


def _has_failures(found: Mapping[str, Any]) -> bool:
    """Return whether an example failed or a trial found a fault."""
    return any(report["failed"] for report in found["examples"]) or any(
        not tried["ok"] for tried in [*found.get("recipe", []), *found.get("rows", [])]
    )
