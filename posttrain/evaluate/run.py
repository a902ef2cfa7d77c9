"""The eval stage: samples completions, grades them with the rewards of training, and reports confidence intervals."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from rich.table import Table

from posttrain import terminal
from posttrain.batch import Rollout
from posttrain.batch.records import sample_fields
from posttrain.errors import RecipeError, count_noun
from posttrain.evaluate.best_of import WEIGHTED_SUM, best_of, check_reward_name, make_best_of_table
from posttrain.evaluate.compare import PROBLEMS, compare_with_baseline, compute_efficiency, find_baseline
from posttrain.evaluate.contamination import count_trained_rows, probe_contamination
from posttrain.evaluate.formats import consensus_of_formats
from posttrain.evaluate.measures import compute_habit_rates, label_report, reward_stability
from posttrain.evaluate.sampling import COMPLETIONS, Record, open_print_log, prepare, prompt_rows, sample
from posttrain.evaluate.summary import problem_rows, summarize
from posttrain.evaluate.votes import extract_voted_answer, find_vote_extractors, match_votes
from posttrain.recipe.reward_checks import reward_name
from posttrain.recipe.stages import EvalRecipe
from posttrain.run.atomic_io import write_text
from posttrain.run.directory import RunDirectory
from posttrain.run.jsonl import to_lines
from posttrain.run.table import trained_rows_note
from posttrain.verify.extract import Extractor
from posttrain.verify.failures import Failures
from posttrain.verify.load import check_columns, load_reward
from posttrain.verify.score import Sample, Scorer


def run(recipe: EvalRecipe, directory: RunDirectory) -> dict[str, Any]:
    """Evaluate the model and return the summary.

    completions.jsonl holds every completion with its scores, problems.jsonl one row per problem, samples.jsonl the
    completions of the first problems for the report. With the same recipe, data and weights the numbers are the same,
    also after a stop and `--resume`. Raises RecipeError for a k above `eval.samples`.
    """
    started = time.perf_counter()
    n, settings = recipe.eval.samples, recipe.eval
    if max(settings.k, default=1) > n:
        raise RecipeError(
            f"k = {max(settings.k)} needs {max(settings.k)} samples, but eval.samples is {n}", where="eval.k"
        )
    prepared = prepare(recipe)
    rewards = [load_reward(reward, recipe.base_dir) for reward in recipe.rewards]
    check_columns(rewards, {column for row in prepared.rows for column in row})
    if settings.best_of:
        check_reward_name(settings.best_of, [reward.name for reward in rewards])
    order = find_vote_extractors(recipe.rewards, rewards)
    baseline = find_baseline(settings.baseline, recipe.base_dir) if settings.baseline else None
    with Scorer(recipe.rewards, recipe.scoring, recipe.base_dir, open_print_log(directory, "rewards")) as scorer:
        failures = scorer.failures(enough=len(prepared.items), unit="chunk")

        def grade_all(rollouts: Sequence[Rollout]) -> list[dict[str, Any]]:
            return grade(scorer, rollouts, failures, order)

        records = sample(recipe, directory, prepared.items, n, grade_all, ("correct",))
        probe = settings.contamination
        agreed = settings.consensus and consensus_of_formats(
            recipe, settings.consensus, directory, prepared.items, grade_all
        )
        seen = probe_contamination(recipe, probe, directory, prepared.items, grade_all) if probe else None
    prompts = prompt_rows(prepared, recipe.data)
    rows = [{**row, **prompt} for row, prompt in zip(problem_rows(records), prompts, strict=True)]
    trained = count_trained_rows(recipe.model.path, [p.row for p in prepared.items], recipe.base_dir)
    write_text(directory.path / PROBLEMS, to_lines(rows))
    with closing(directory.samples(resume_after=None)) as log:  # the first sample of the first problems
        firsts = [{k: v for k, v in r.items() if k != "step"} for r in records if r["sample"] == 0]
        log.write(0, firsts[: recipe.run.samples_per_step])
    golds = {str(row["uid"]): row.get("answer") for row in prepared.rows}
    comparison = baseline and compare_with_baseline(baseline, directory.path, records, settings, recipe.run.seed)
    summary = {
        "model": recipe.model.path,
        **summarize(records, settings, recipe.run.seed),
        "efficiency": asdict(compute_efficiency(records, None, settings.aes)),
        **({} if comparison is None else {"against": comparison}),
        **({"trained_on": trained} if trained else {}),
        **({} if agreed is None else {"consensus": agreed}),
        **({} if seen is None else {"contamination": seen}),
        **(summarize_best_of(records, recipe) if settings.best_of else {}),
        **({"stability": compute_stability(records, recipe)} if settings.stability else {}),
        **({"labels": label_report(records, golds, settings.labels)} if settings.labels else {}),
        **({"habits": compute_habit_rates([r["completion"] for r in records])} if settings.habits else {}),
        "samples": n,
        "dropped": {cause: len(uids) for cause, uids in prepared.dropped.items()},
        "sampling": recipe.sampling.model_dump(),
        "engine": recipe.engine.engine,
        "seed": recipe.run.seed,
        "seconds": round(time.perf_counter() - started, 2),  # of this attempt
        "completions": str(directory.path / COMPLETIONS),
    }
    show(summary)
    return summary


def summarize_best_of(records: Sequence[Record], recipe: EvalRecipe) -> dict[str, Any]:
    """Return the summary's keys `best_of` and, for the report, `tables`."""
    by, settings = recipe.eval.best_of or WEIGHTED_SUM, recipe.eval
    rows = best_of(records, by, level=settings.level, resamples=settings.bootstrap, seed=recipe.run.seed)
    return {"best_of": {"by": by, "rows": rows}, "tables": [make_best_of_table(rows, by)]}


def compute_stability(records: Sequence[Record], recipe: EvalRecipe) -> dict[str, Any]:
    """Compute the summary's key `stability`."""
    weights = {reward_name(reward): reward.weight for reward in recipe.rewards if reward.weight}
    return reward_stability(records, weights, share=recipe.eval.stability or 0.0)


def grade(
    scorer: Scorer, rollouts: Sequence[Rollout], failures: Failures, order: Sequence[Extractor] | None = None
) -> list[dict[str, Any]]:
    """Return scores, reward, correctness, answer (extracted by `order`) and vote of each rollout.

    Raises RunError if too many calls of a reward have failed, including earlier ones.
    """
    samples = [
        Sample(
            completion=r.text,
            row=r.prompt.row,
            prompt=r.prompt.text,
            finish=r.finish,
            token_count=len(r.sampled_ids),
            group=r.group,
            token_ids=r.sampled_ids,
            **sample_fields(r),
        )
        for r in rollouts
    ]
    results = scorer.results(samples)
    scores = scorer.score(samples, results=results)
    columns = list(zip((reward.name for reward in scorer.rewards), results, strict=True))
    late = [[name for name, column in columns if column[i].kind == "timeout"] for i in range(len(samples))]
    answers = [extract_voted_answer(r.text, finished=r.finish == "stop", order=order) for r in rollouts]
    votes = match_votes(scorer, samples, answers, scores.correct) if order else answers
    failures.add(scores.calls._replace(step=failures.history[-1].step + 1 if failures.history else 0))
    for what, found in (("failed", scores.errors), ("ran out of time", scores.timeouts)):
        for name, count in found.items():
            if count:
                terminal.note(f"reward {name}: {count} of {count_noun(len(rollouts), 'call')} {what}, unscored")
    if scores.first_traceback:
        terminal.note(f"the first error, {scores.first_traceback}")
    return [
        {
            "scores": {name: column[i] for name, column in scores.components.items()},
            "reward": scores.rewards[i],
            "correct": scores.correct[i],
            "answer": answers[i],
            "vote": votes[i],
            **({"timeouts": late[i]} if late[i] else {}),
        }
        for i in range(len(rollouts))
    ]


def show(summary: Mapping[str, Any]) -> None:
    """Print the closing table and remarks on stderr."""
    console = terminal.console(stderr=True, markup=False, highlight=False)
    console.print(result_table(summary))
    for table in summary.get("tables", []):
        console.print(make_table(table))
    for line in remarks(summary):
        console.print(line, soft_wrap=True)


def result_table(summary: Mapping[str, Any]) -> Table:
    """Return a table with metric, mean, interval and note."""
    level = next(iter(summary["intervals"].values()))["level"]
    shown = Table("", "mean", f"{100 * level:g}% interval", "", box=None, pad_edge=False)
    for name, interval in summary["intervals"].items():
        digits = 1 if name == "tokens" else 3
        if interval["mean"] is None:
            shown.add_row(name, "-", "-", interval["note"])
        else:
            bounds = f"{interval['low']:.{digits}f} to {interval['high']:.{digits}f}"
            shown.add_row(name, f"{interval['mean']:.{digits}f}", bounds, interval["note"])
    return shown


def make_table(table: Mapping[str, Any]) -> Table:
    """Return a table of a summary (`title`, `head`, `rows`).

    The first column is left-aligned, numbers are right-aligned.
    """
    shown = Table(title=table["title"], title_justify="left", box=None, pad_edge=False)
    for n, name in enumerate(table["head"]):
        shown.add_column(name, justify="right" if n else "left")
    for row in table["rows"]:
        shown.add_row(*row)
    return shown


def remarks(summary: Mapping[str, Any]) -> list[str]:
    """Return sentences about problems, sampling, truncation and unscored completions."""
    sampling, problems = summary["sampling"], count_noun(summary["problems"], "problem")
    lines = [
        f"{problems} x {count_noun(summary['samples'], 'sample')}, temperature {sampling['temperature']:g}, "
        f"top_p {sampling['top_p']:g}, top_k {sampling['top_k']}, at most {sampling['max_new_tokens']} new tokens, "
        f"seed {summary['seed']}",
    ]
    if note := trained_rows_note(summary):
        lines.append(note)
    if summary["truncated"]:
        lines.append(
            f"{100 * summary['truncated']:.1f}% of the completions hit the limit and count as wrong; "
            f"{summary['truncated_right']} of them have the right answer"
        )
    if summary["ended_in_thought"]:
        stops = ", ".join(map(repr, sampling["stop"]))
        why = f"see sampling.stop ({stops})" if stops else "the model itself ended them"
        share = summary["ended_in_thought"] / summary["num_completions"]
        lines.append(
            f"{share:.1%} of the completions end inside their thought, below the limit and without an answer: {why}"
        )
    if summary["unscored"]:
        lines.append(
            f"{count_noun(summary['unscored'], 'completion')} could not be judged: left out "
            f"({count_noun(summary['unscored_problems'], 'problem')} entirely)"
        )
    for name, count in summary["timeouts"].items():
        lines.append(f"reward {name}: {count_noun(count, 'call')} timed out; more may on a slower machine")
    cost = summary["efficiency"]["tokens_per_correct"]
    if cost is not None:
        lines.append(f"{cost:.1f} tokens a right answer")
    if "against" in summary:
        lines += _baseline_remarks(summary["against"])
    for row in summary.get("contamination", ()):
        answers = "" if row["answer_rate"] is None else f", {row['answer_rate']:.1%} come to the right answer"
        lines.append(
            f"shown {row['ratio']:.0%} of a problem, {row['completion_rate']:.1%} are continued word by word "
            f"(ROUGE-L {row['rouge_l']:.2f}){answers}"
        )
    if (found := summary.get("consensus")) and found["problems"]:
        right = "-" if found["accuracy"] is None else f"{found['accuracy']:.3f}"
        lines.append(
            f"by consensus of formats: accuracy {right} with {found['tokens']:.1f} tokens a problem; the cheap formats "
            f"agree on {found['agreed']:.1%}"
        )
    if found := summary.get("labels"):
        f1, ece = (f"{found[key]:.3f}" if found[key] is not None else "-" for key in ("macro_f1", "ece"))
        lines.append(f"labels of {count_noun(found['questions'], 'question')}: macro F1 {f1}, calibration error {ece}")
    if (found := summary.get("stability")) and found["problems"]:
        lines.append(
            f"rewards: {found['tied']:.1%} of {count_noun(found['problems'], 'problem')} have several best answers"
        )
        lines += [
            f"  {one['reward']} weighs {found['share']:.0%} more: {one['flips']:.1%} get another best answer, the "
            f"policy moves by {one['soft_tv']:.3f} (at most {one['soft_bound']:.3f}) with a KL of "
            f"{found['temperature']:g}"
            for one in found["components"]
        ]
    for name, rate in summary.get("habits", {}).items():
        lines.append(f"{name}: in {rate['share']:.1%} of the completions, {rate['count']:.2f} times on average")
    return lines


def _baseline_remarks(found: Mapping[str, Any]) -> list[str]:
    """Return sentences about the comparison with the baseline."""
    difference, score, split = found["difference"], found["efficiency"]["aes"], found["capability"]
    lines = [
        f"against {found['baseline']}: accuracy {difference['diff']:+.3f} "
        f"[{difference['low']:+.3f}, {difference['high']:+.3f}] over {count_noun(difference['problems'], 'problem')}"
    ]
    if score is not None:
        lines.append(f"accuracy-efficiency score {score:+.3f} (above 0: shorter, or better, than the baseline)")
    if split is not None:
        lines.append(
            f"of the gain, {split['self_distillation_gain']:+.3f} is on problems solved before and "
            f"{split['capability_gain']:+.3f} on problems never solved before"
        )
    return lines
