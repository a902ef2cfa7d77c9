"""Tasks of lm-eval: numbers and intervals, mistakes, and whole runs on the tiny model if lm-eval is installed."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import app
from posttrain.errors import DataError, UserError
from posttrain.evaluate import harness
from posttrain.recipe.load import load_dict
from posttrain.recipe.stages import HarnessRecipe

NEEDS = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'posttrain[eval]'"
)
SUMS = """\
task: my_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is {{{{a}}}} + {{{{b}}}}?"
doc_to_target: "{{{{a + b}}}}"
generation_kwargs: {{until: ["\\n\\n"], max_gen_toks: 6, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""
PARITY = """\
task: my_parity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Is {{{{a}}}} even?"
doc_to_choice: ["yes", "no"]
doc_to_target: "{{{{a % 2}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
metadata: {{version: 1.0}}
"""


def recipe_of(base: Path = Path(), **values: Any) -> HarnessRecipe:
    given = {"stage": "harness", "model": {"path": "tiny", "device": "cpu"}, "tasks": ["my_sums"], **values}
    return load_dict(given, base_dir=base, where="test").require(HarnessRecipe)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with two task files and their rows."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"a": a, "b": 3}) + "\n" for a in range(1, 9)))
    (tmp_path / "sums.yaml").write_text(SUMS.format(rows=rows))
    (tmp_path / "parity.yaml").write_text(PARITY.format(rows=rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture
def call() -> Callable[..., Any]:
    return lambda *arguments: CliRunner().invoke(app, list(arguments), prog_name="posttrain")


# --- numbers


def sample(number: int, chain: str, **values: Any) -> dict[str, Any]:
    return {"doc_id": number, "filter": chain, "metrics": list(values), **values}


RESULTS: dict[str, Any] = {
    "results": {
        "a": {
            "alias": "a",
            "sample_len": 4,
            "acc,none": 0.75,
            "acc_stderr,none": 0.2,
            "f1,none": 0.6,
            "f1_stderr,none": 0.1,
        },
        "b": {"acc,strict": 0.0, "acc_stderr,strict": "N/A"},
        "both": {"acc,none": 0.5, "acc_stderr,none": 0.1},
        "c": {"ppl,none": 7.0, "ppl_stderr,none": "N/A"},
    },
    "groups": {"both": {}},
    "group_subtasks": {"both": ["inner"], "inner": ["g", "h"]},
    "samples": {
        "a": [sample(n, "none", acc=float(n > 0), f1=(1, 0)) for n in range(4)],
        "b": [sample(n, "strict", acc=False) for n in range(3)],
        "c": [sample(0, "none", ppl=(1.0, 2.0))],
        "g": [sample(n, "none", acc=1.0) for n in range(2)],
        "h": [sample(n, "none", acc=0.0) for n in range(2)],
    },
}


def test_means_get_our_intervals_and_other_metrics_those_of_lm_eval() -> None:
    from posttrain.evaluate.estimators import bootstrap_ci

    recipe = recipe_of(run={"seed": 3}, level=0.9, bootstrap=500)
    found = dict(harness.iterate_metrics(RESULTS, recipe))
    assert list(found) == ["both acc", "a acc", "a f1", "b acc (strict)", "c ppl"], "tasks of a group are in it"
    assert found["a acc"] == bootstrap_ci([0.0, 1.0, 1.0, 1.0], level=0.9, resamples=500, seed=3)
    assert found["both acc"] == bootstrap_ci([1.0, 1.0, 0.0, 0.0], level=0.9, resamples=500, seed=3)
    f1 = found["a f1"]
    assert (f1.mean, f1.note) == (0.6, "not a mean over problems: lm-eval's standard error")
    assert (f1.high or 0) - 0.6 == pytest.approx(0.1 * 1.6449, abs=1e-4)
    assert found["c ppl"].note.endswith("lm-eval gives no standard error") and not found["c ppl"].informative
    assert found["b acc (strict)"].mean == 0.0


def test_problems_are_counted_once_per_filter() -> None:
    values = harness.values_by_problem([sample(0, "a", m=1), sample(0, "b", m=0), sample(1, "a", m=True, other="text")])
    assert values == {("m", "a"): {0: 1.0, 1: 1.0}, ("m", "b"): {0: 0.0}}


def test_notes_below_the_table() -> None:
    task = {"problems": 5, "of": 1319}
    summary = {"chat": True, "problems": 5, "lm_eval": "0.4.13", "tasks": {"gsm8k": task}, "truncated": 0.25}
    assert list(harness.remarks(summary)) == [
        "5 problems of lm-eval 0.4.13, asked by the chat template",
        "only a part: gsm8k 5 of 1319",
        "25.0% of the answers hit the limit (max_new_tokens)",
    ]


# --- mistakes


def test_missing_extra_is_reported(call: Callable[..., Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "lm_eval" else spec(name, *a))
    done = call("eval", "tiny", "--harness", "gsm8k")
    assert done.exit_code == 2 and "needs lm-eval, which is not installed" in done.stderr
    assert "pip install 'posttrain[eval]'" in done.stderr and not (folder / "runs").exists()


def test_eval_of_a_recipe_with_harness_suggests_the_harness_command(call: Callable[..., Any]) -> None:
    done = call("eval", "mine.yaml", "--harness", "gsm8k")
    assert done.exit_code == 2 and "posttrain harness RECIPE" in done.stderr


@pytest.mark.usefixtures("folder")
def test_dry_run_shows_the_recipe(call: Callable[..., Any]) -> None:
    done = call("eval", "tiny", "--harness", "gsm8k,ifeval", "limit=5", "--dry-run", "--json")
    assert done.exit_code == 0, done.stderr
    assert '"ifeval"' in done.stdout and "posttrain harness would write to runs/harness" in done.stderr


@pytest.mark.usefixtures("folder")
def test_vllm_in_a_recipe(call: Callable[..., Any]) -> None:
    given = ("eval", "tiny", "--harness", "gsm8k", "engine.engine=vllm", "engine.batch_size=4", "--dry-run")
    done = call(*given, "engine.vllm.max_model_len=4096")
    assert done.exit_code == 0 and "note:" not in done.stderr, done.stderr
    short = call(*given, "engine.vllm.max_model_len=64", "max_new_tokens=64")
    assert short.exit_code == 2 and "64 has no room for a prompt and 64 new tokens" in short.stderr


class Manager:
    all_tasks = ("gsm8k", "gsm8k_cot", "ifeval")

    def match_tasks(self, names: list[str]) -> list[str]:
        return [task for task in self.all_tasks if task.startswith(names[0].rstrip("*"))]


def test_task_names(folder: Path) -> None:
    recipe = recipe_of(folder, tasks=["gsm8k*", "sums.yaml", "gsm8k"])
    assert harness.select_tasks(recipe, Manager()) == ["gsm8k", "gsm8k_cot", str(folder / "sums.yaml")]
    with pytest.raises(UserError, match=r"lm-eval has no task ifevl(.|\n)*did you mean `ifeval`\?"):
        harness.select_tasks(recipe_of(tasks=["ifevl"]), Manager())
    with pytest.raises(UserError, match=r"task file not found: nope\.yaml"):
        harness.select_tasks(recipe_of(folder, tasks=["nope.yaml"]), Manager())


class Task:
    def __init__(self, fewshot: int | None = None, **marks: bool) -> None:
        self.config: dict[str, Any] = {"num_fewshot": fewshot}
        self.__dict__.update(marks)

    def get_config(self, key: str) -> Any:
        return self.config[key]

    def set_config(self, *, key: str, value: Any) -> None:
        self.config[key] = value

    def set_fewshot_seed(self, *, seed: int) -> None:
        self.seed = seed


@pytest.mark.parametrize(("own", "asked", "used"), [(None, None, 0), (5, None, 5), (5, 2, 2), (0, 2, 0), (None, 3, 3)])
def test_few_shot_examples(own: int | None, asked: int | None, used: int) -> None:
    task = Task(own)
    harness._configure_task("t", task, recipe_of(fewshot=asked))
    assert task.config["num_fewshot"] == used and task.seed == harness.FEWSHOT_SEED


def test_unsupported_tasks_are_refused() -> None:
    with pytest.raises(UserError, match="runs programs that the model writes"):
        harness._configure_task("humaneval", Task(UNSAFE_CODE=True), recipe_of())
    with pytest.raises(UserError, match="has images"):
        harness._configure_task("mmmu", Task(MULTIMODAL=True), recipe_of())


# --- whole runs


@NEEDS
@pytest.mark.usefixtures("folder")
def test_results_match_lm_eval(call: Callable[..., Any], folder: Path) -> None:
    """Both kinds of tasks compared with lm-eval's own run of the same model: answers and likelihoods are equal."""
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    from posttrain.models.load import load
    from posttrain.recipe.sections import Model

    arguments = (
        "--harness",
        "./sums.yaml,./parity.yaml",
        "chat=false",
        "model.device=cpu",
        "--output",
        "run",
        "--json",
    )
    done = call("eval", "tiny", *arguments)
    assert done.exit_code == 0, done.stderr
    summary = json.loads(done.stdout)
    loaded = load(Model.model_validate({"path": "tiny", "device": "cpu"}), folder)
    theirs = lm_eval.simple_evaluate(
        HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=4),
        tasks=[str(folder / "sums.yaml"), str(folder / "parity.yaml")],
        bootstrap_iters=0,
    )
    assert summary["intervals"]["my_parity acc"]["mean"] == theirs["results"]["my_parity"]["acc,none"]
    rows = [json.loads(line) for line in (folder / "run" / "completions.jsonl").read_text().splitlines()]
    ours = {row["uid"]: row["graded"] for row in rows if row["uid"].startswith("my_sums")}
    assert ours == {f"my_sums/{s['doc_id']}": list(s["filtered_resps"]) for s in theirs["samples"]["my_sums"]}
    parity = [json.loads(line) for line in (folder / "run" / "problems.jsonl").read_text().splitlines()][8:]
    assert [row["accuracy"] for row in parity] == [s["acc"] for s in theirs["samples"]["my_parity"]]
    assert summary["problems"] == 16 and summary["chat"] is False and 0 <= summary["truncated"] <= 1
    assert (folder / "run" / "report.html").is_file()
    assert '"completion"' in (folder / "run" / "samples.jsonl").read_text()


@NEEDS
def test_an_adapter_in_a_recipe(call: Callable[..., Any], folder: Path) -> None:
    from posttrain.models.load import load
    from posttrain.models.save import save
    from posttrain.recipe.sections import Model

    base = load(Model.model_validate({"path": "tiny", "device": "cpu"}), folder, training=True)
    save(base, folder / "base", verify=False)
    section = {"path": str(folder / "base"), "device": "cpu", "lora": {"rank": 2}}
    save(load(Model.model_validate(section), folder, training=True), folder / "adapter", verify=False)
    (folder / "r.yaml").write_text(
        "stage: harness\nmodel: {path: adapter, device: cpu}\ntasks: [sums.yaml]\nlimit: 3\n"
        "max_new_tokens: 4\nthought_end: </think>\n"
    )
    done = call("harness", "r.yaml", "--output", "run")
    assert done.exit_code == 0, done.stderr
    assert "my_sums exact_match" in done.stderr and "only a part: my_sums 3 of 8" in done.stderr
    assert "asked by the chat template" in done.stderr
    prompts = [json.loads(line)["prompt"] for line in (folder / "run" / "completions.jsonl").read_text().splitlines()]
    assert prompts == [f"<bos><|user|>What is {a} + 3?<|assistant|>" for a in (1, 2, 3)]


@NEEDS
@pytest.mark.usefixtures("folder")
def test_mistakes_are_reported_before_the_model_is_loaded(call: Callable[..., Any], folder: Path) -> None:
    unknown = call("eval", "tiny", "--harness", "gsm9k")
    assert unknown.exit_code == 2 and "lm-eval has no task gsm9k" in unknown.stderr and "gsm8k" in unknown.stderr
    (folder / "far.yaml").write_text(
        (folder / "sums.yaml").read_text().replace("dataset_path: json", "dataset_path: org/far")
    )
    with pytest.raises(DataError, match=r"task .*far\.yaml cannot be read(.|\n)*HF_HUB_OFFLINE=1 is set"):
        harness.load_tasks(recipe_of(folder, tasks=["far.yaml"]))


@NEEDS
def test_stop_strings_apply_after_the_thought_when_grading(tmp_path: Path) -> None:
    from posttrain.evaluate.harness_model import HarnessModel
    from posttrain.models.load import load
    from posttrain.recipe.sections import Model

    loaded = load(Model.model_validate({"path": "tiny", "device": "cpu"}), tmp_path)
    request = type("Request", (), {"args": ("What?", {"until": ["\n\n", "</s>"], "max_gen_toks": 5})})()
    plain = HarnessModel(loaded, recipe_of(), chat=True, scratch=tmp_path)
    prompts, sampling, stops = plain._build_prompts([request], [0])
    assert (sampling.stop, sampling.max_new_tokens, sampling.temperature) == (["\n\n", "</s>"], 5, 0.0)
    assert plain._text_to_grade("a\n\nb", stops) == "a" and len(prompts[0].ids) == 5
    thinking = HarnessModel(loaded, recipe_of(thought_end="</think>", max_new_tokens=9), chat=True, scratch=tmp_path)
    _, sampling, stops = thinking._build_prompts([request], [0])
    assert (sampling.stop, sampling.max_new_tokens) == ([], 9), "a thought may hold a blank line"
    assert thinking._text_to_grade("<think>so\n\nso</think>\n\n4\n\nNext", stops) == "4"
    full = HarnessModel(loaded, recipe_of(max_new_tokens=4000), chat=True, scratch=tmp_path)
    with pytest.raises(DataError, match="leave no room for a prompt in the model's window of 2048"):
        full._build_prompts([request], [0])
