"""Pipelines: order, references, resuming and the table, with runners that only record their recipes."""

import gc
import json
import os
import signal
import sys
import types
import weakref

import pytest

from posttrain import pipeline
from posttrain.errors import Interrupted, RecipeError, RunError, UserError
from posttrain.evaluate.table import PROBLEM_INTERVALS_NOTE, closing_table, describe_findings
from posttrain.recipe.load import load_dict
from posttrain.run.directory import RunDirectory
from posttrain.run.environment import usable_cpus
from posttrain.run.interrupt import GracefulStop
from posttrain.run.table import headers, row_cells

TRAIN = {"data": {"source": "rows.jsonl"}, "run": {"steps": 2}}
GRADED = {"data": {"source": "rows.jsonl"}, "rewards": [{"use": "math.accuracy"}]}
STAGES = [
    {"name": "sft", "stage": "sft", "model": {"path": "tiny"}, **TRAIN},
    {"name": "rl", "stage": "rl", "model": {"path": "stage:sft"}, **TRAIN, "rewards": [{"use": "math.accuracy"}]},
    {
        "name": "longer",
        "stage": "sft",
        "model": {"path": "stage:sft"},
        "data": {"source": "f.py:rows", "params": {"file": "stage:rl/samples.jsonl"}, "size": 3},
        "run": {"steps": 99, "max_minutes": "stage:rl"},
    },
    {"name": "acc-sft", "stage": "eval", "model": {"path": "stage:sft"}, **GRADED},
    {"name": "acc-rl", "stage": "eval", "model": {"path": "stage:rl"}, **GRADED},
]


class Runners:
    """Stand-ins for all stages: record (stage's directory, recipe) and write the results of an evaluation."""

    def __init__(self):
        self.calls = []
        self.fail = {}  # stage name -> error

    def run(self, recipe, directory):
        name = directory.path.name
        self.calls.append((name, recipe, directory.attempt))
        if name in self.fail:
            raise self.fail.pop(name)
        if recipe.verb == "eval":
            right = 1.0 if name == "acc-rl" else 0.25
            rows = [{"uid": str(i), "accuracy": right if i else 0.5, "tokens": 10.0 + i} for i in range(20)]
            (directory.path / "problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            return {"accuracy": right}
        return {"train_seconds": 90.0, "loss_last": float("nan")}

    @property
    def names(self):
        return [name for name, _, _ in self.calls]


@pytest.fixture
def runners(monkeypatch):
    fake = Runners()
    module = types.ModuleType("fake_runners")
    module.run = fake.run
    monkeypatch.setitem(sys.modules, "fake_runners", module)
    for verb in ("sft", "rl", "eval"):
        monkeypatch.setitem(pipeline.RUNNERS, verb, "fake_runners:run")
    return fake


def run(tmp_path, stages=STAGES, resume=False, **more):
    values = {"stage": "pipeline", "stages": stages, **more}
    loaded = load_dict(values, base_dir=tmp_path, where="pipeline.yaml")
    out = tmp_path / "out"
    with RunDirectory.open(out, name="p", text="", resolved=loaded.resolved, resume=resume) as directory:
        return pipeline.run_stage(loaded.recipe, directory)


def test_runner_import_is_frozen_for_garbage_collection(tmp_path, monkeypatch):
    """Existing garbage is not frozen, since it may be the model of the previous stage on a GPU."""

    class Model:
        def __init__(self):
            self.itself = self

    (tmp_path / "late_runner.py").write_text("import gc\nduring = gc.isenabled()\nkept = []\ndef run(): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    dropped = weakref.ref(Model())
    run = pipeline.import_runner("late_runner:run")
    module = sys.modules.pop("late_runner")
    assert run is module.run and module.during is False and gc.isenabled()
    assert dropped() is None
    assert not any(o is module.kept for o in gc.get_objects()), "it is frozen"


def test_stages_run_in_order_each_in_its_directory(tmp_path, runners):
    summary = run(tmp_path, seeds=[7])
    assert runners.names == ["sft", "rl", "longer", "acc-sft", "acc-rl"]
    assert summary["seeds"]["7"]["sft"] == {"train_seconds": 90.0, "loss_last": None}
    sft = tmp_path / "out" / "seed-7" / "sft"
    assert json.loads((sft / "summary.json").read_text())["train_seconds"] == 90.0
    assert (sft / "report.html").exists() and (tmp_path / "out" / "report.html").exists()
    assert all(recipe.run.seed == 7 and recipe.base_dir == tmp_path for _, recipe, _ in runners.calls)


def test_references_become_models_files_and_minutes(tmp_path, runners):
    run(tmp_path)
    recipes = {name: recipe for name, recipe, _ in runners.calls}
    seed = tmp_path / "out" / "seed-0"
    assert recipes["rl"].model.path == str(seed / "sft" / "final")
    assert recipes["longer"].data.params == {"file": str(seed / "rl" / "samples.jsonl")}
    assert recipes["longer"].run.max_minutes == 1.5


@pytest.mark.usefixtures("runners")
def test_recipe_of_a_stage_runs_alone(tmp_path):
    from posttrain.recipe.load import load

    run(tmp_path)
    alone = load(str(tmp_path / "out" / "seed-0" / "longer" / "recipe.yaml"))
    assert alone.resolved == json.loads((tmp_path / "out" / "seed-0" / "longer" / "resolved.json").read_text())


@pytest.mark.parametrize("error", [RunError("boom"), Interrupted("stopped after step 1 of 2")])
def test_resume_continues_at_the_unfinished_stage(tmp_path, runners, error, capsys):
    runners.fail["rl"] = error
    with pytest.raises(type(error)):
        run(tmp_path)
    assert f"stage rl did not finish; its directory is {tmp_path / 'out' / 'seed-0' / 'rl'}" in capsys.readouterr().err
    assert not (tmp_path / "out" / "summary.json").exists()
    run(tmp_path, resume=True)
    assert runners.names == ["sft", "rl", "rl", "longer", "acc-sft", "acc-rl"]
    assert [attempt for name, _, attempt in runners.calls if name == "rl"] == [1, 2]
    assert [p.name for p in (tmp_path / "out" / "seed-0" / "sft" / "logs").iterdir()] == ["attempt_1"]


def test_ctrl_c_in_the_last_step_of_a_stage_starts_no_other(tmp_path, runners):
    """The stage has nothing left to stop and ends normally; the pipeline must still stop."""
    whole = runners.run

    def asked(recipe, directory):
        with GracefulStop():
            if directory.path.name == "rl":
                os.kill(os.getpid(), signal.SIGINT)
            return whole(recipe, directory)

    sys.modules["fake_runners"].run = asked
    with pytest.raises(Interrupted, match="stopped after stage rl"):
        run(tmp_path)
    assert runners.names == ["sft", "rl"]
    sys.modules["fake_runners"].run = whole
    run(tmp_path, resume=True)
    assert runners.names == ["sft", "rl", "longer", "acc-sft", "acc-rl"]


def test_results_of_another_recipe_are_not_reused(tmp_path, runners):
    runners.fail["acc-rl"] = RunError("boom")
    with pytest.raises(RunError):
        run(tmp_path)
    with pytest.raises(UserError, match=r"(?s)optim.lr was .*, is 0.5.*rm -r \S+/out/seed-0/rl\), or start a new run"):
        run(tmp_path, [STAGES[0], {**STAGES[1], "optim": {"lr": 0.5}}, *STAGES[2:]], resume=True)
    with pytest.raises(
        UserError, match=r"(?s)run.steps was 2, is 3.*rm -r \S+/out/seed-0/sft\)"
    ):  # it is finished: rl started from its 2 steps
        run(tmp_path, [{**STAGES[0], "run": {"steps": 3}}, *STAGES[1:]], resume=True)
    run(tmp_path, [*STAGES, {**STAGES[4], "name": "acc-rl-again"}], resume=True)  # an additional stage is allowed
    assert runners.names == ["sft", "rl", "longer", "acc-sft", "acc-rl", "acc-rl", "acc-rl-again"]


@pytest.mark.usefixtures("runners")
def test_results_of_a_repeated_stage_replace_older_ones(tmp_path):
    import shutil

    run(tmp_path)
    shutil.rmtree(tmp_path / "out" / "seed-0" / "rl")
    with pytest.raises(UserError, match=r"longer was made from an older run of rl"):
        run(tmp_path, resume=True)


def test_minutes_can_only_reference_a_training_stage(tmp_path):
    done = {"m": pipeline.FinishedStage(tmp_path, {"model": "x"}, skipped=False)}
    with pytest.raises(RecipeError, match="stage:m has no training time"):
        pipeline.resolve_references({"run": {"max_minutes": "stage:m"}}, done)


@pytest.mark.usefixtures("runners")
def test_table_compares_with_the_first_model(tmp_path):
    """19 of 20 problems go from 0.25 to 1, one stays at 0.5: the mean difference is 19 * 0.75 / 20 = 0.7125."""
    summary = run(tmp_path, table=["acc-sft", "acc-rl"])
    before, after = summary["table"]
    assert (before["model"], after["model"]) == ("sft", "rl")
    assert headers(summary["table"])[:2] == ["model", "eval stage"]
    assert [cells[:2] for cells in row_cells(summary["table"])] == [["sft", "acc-sft"], ["rl", "acc-rl"]]
    assert before["difference"] is None and before["pooled"]["mean"] == pytest.approx((0.5 + 19 * 0.25) / 20)
    assert after["difference"]["to"] == "sft"
    assert after["difference"]["mean"] == pytest.approx(0.7125)
    assert after["difference"]["low"] > 0.5 and after["mean_tokens"] == pytest.approx(19.5)
    assert summary["findings"][0].startswith("rl is 0.713 above sft: the 95% interval [+0.6")
    page = (tmp_path / "out" / "report.html").read_text()
    assert summary["findings"][0].split(":")[0] in page and 'href="seed-0/rl/report.html"' in page


def evaluation(folder, values):
    folder.mkdir(parents=True)
    rows = [{"uid": str(i), "accuracy": v, "tokens": 1} for i, v in enumerate(values)]
    (folder / "problems.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return folder


def test_seeds_are_pooled_by_problem(tmp_path):
    """Seeds [0, 1, 1, 1] and [1, 1, 0, None] average to [.5, 1, .5, 1]: mean .75. A seed's own mean excludes None."""
    runs = {s: evaluation(tmp_path / s, v) for s, v in {"0": [0, 1, 1, 1], "1": [1, 1, 0, None]}.items()}
    other = {s: evaluation(tmp_path / f"other{s}", [0.5] * 4) for s in "01"}
    rows = closing_table({"a": runs, "b": other})
    assert rows[0]["pooled"]["mean"] == pytest.approx(0.75)
    assert rows[0]["seeds"]["1"]["mean"] == pytest.approx(2 / 3)
    assert rows[1]["difference"]["mean"] == pytest.approx(-0.25)
    assert rows[1]["difference"]["seeds"]["1"]["mean"] == pytest.approx(-1 / 6)


def test_findings_say_whether_the_interval_excludes_0_and_for_how_many_seeds():
    def row(name, low, high, seeds):
        bounds = {"mean": (low + high) / 2, "low": low, "high": high}
        by_seed = {str(i): {"mean": s, "low": s - 0.05, "high": s + 0.05} for i, s in enumerate(seeds)}
        return {"model": name, "level": 0.95, "difference": {"to": "sft", **bounds, "seeds": by_seed}}

    said = describe_findings(
        [row("up", 0.1, 0.3, [0.2, 0.3, 0.01]), row("same", -0.1, 0.2, [0.1]), row("down", -0.3, -0.1, [-0.2])]
    )
    assert said == [
        "up is 0.200 above sft: the 95% interval [+0.100, +0.300] excludes 0, for 2 of 3 seeds on its own"
        " (+0.200, +0.300, +0.010).",
        "same is 0.050 above sft: the 95% interval [-0.100, +0.200] includes 0, no difference is shown.",
        "down is 0.200 below sft: the 95% interval [-0.300, -0.100] excludes 0.",
        PROBLEM_INTERVALS_NOTE,
    ]
    assert describe_findings([row("down", -0.3, -0.1, [-0.2])])[1:] == [], "one seed: nothing to say of others"
    assert describe_findings([row("tie", -0.1, 0.1, [0.0])]) == [
        "tie equals sft: the 95% interval [-0.100, +0.100] includes 0."
    ]
    assert describe_findings([row("twin", 0.0, 0.0, [0.0, 0.0]), row("one", 0.5, 0.5, [0.5, 0.5])]) == [
        "twin and sft are equally often right on every problem.",
        "one is 0.500 above sft; without an interval, because the difference is the same on every problem.",
    ], "no interval was computed, so no sentence speaks of them"


def test_error_of_a_seed_process_is_raised(tmp_path, forked_python, monkeypatch):
    """The child's error (exit 2) is raised here with the seed, its message and the path of its full output."""
    monkeypatch.setattr(sys, "executable", forked_python)
    merge = {"name": "m", "stage": "merge", "merge_method": "linear", "models": [{"model": "./no-such-model"}]}
    with pytest.raises(UserError) as error:
        run(tmp_path, [merge], seeds=[0, 1], parallel=2)
    assert "ended with 2" in str(error.value) and "no-such-model" in str(error.value)
    assert str(tmp_path / "out" / "logs" / "attempt_1" / "seed-") in str(error.value)


def test_stage_with_vllm_runs_in_a_separate_process(tmp_path, forked_python, monkeypatch):
    """Its results equal those of the same stage in this process; its output is logged beside its directory."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "completion": "2"}\n' * 4)
    stages = [{"name": "sft", "stage": "sft", "model": {"path": "tiny"}, **TRAIN}]
    recipe = load_dict({"stage": "pipeline", "stages": stages}, base_dir=tmp_path, where="test").recipe
    monkeypatch.setattr(sys, "executable", forked_python)
    summaries = []
    for name, apart in (("here", False), ("apart", True)):
        monkeypatch.setattr(pipeline, "uses_vllm", lambda _, apart=apart: apart)
        summaries.append(pipeline.run_seed(recipe, tmp_path / name, 0)["sft"].summary)
    assert summaries[0]["loss_last"] == summaries[1]["loss_last"]
    assert (tmp_path / "apart" / "seed-0" / "sft.log").is_file()
    assert not (tmp_path / "here" / "seed-0" / "sft.log").exists()


def test_which_stages_use_vllm(tmp_path):
    values = {**STAGES[1], "model": {"path": "tiny"}, "rollout": {"engine": "vllm"}}
    assert pipeline.uses_vllm(load_dict(values, base_dir=tmp_path, where="test").recipe)
    values = {**STAGES[4], "model": {"path": "tiny"}, "engine": {"engine": "vllm"}}
    assert pipeline.uses_vllm(load_dict(values, base_dir=tmp_path, where="test").recipe)
    for stage in (STAGES[0], {**STAGES[4], "model": {"path": "tiny"}}):
        assert not pipeline.uses_vllm(load_dict(stage, base_dir=tmp_path, where="test").recipe)


def test_error_of_a_separate_stage_is_raised(tmp_path, forked_python, monkeypatch):
    (tmp_path / "rows.jsonl").write_text("")
    stages = [{"name": "sft", "stage": "sft", "model": {"path": "tiny"}, **TRAIN}]
    recipe = load_dict({"stage": "pipeline", "stages": stages}, base_dir=tmp_path, where="test").recipe
    monkeypatch.setattr(pipeline, "uses_vllm", lambda _: True)
    monkeypatch.setattr(sys, "executable", forked_python)
    with pytest.raises(UserError, match="the file is empty"):
        pipeline.run_seed(recipe, tmp_path / "run", 0)


def test_pipeline_respects_omp_num_threads(tmp_path, monkeypatch) -> None:
    recipe = types.SimpleNamespace(stages=[], base_dir=tmp_path, seeds=[0, 1], parallel=2)
    directory = types.SimpleNamespace(logs=tmp_path, path=tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert [child.env["OMP_NUM_THREADS"] for child in pipeline._seed_processes(recipe, directory)] == ["3", "3"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    shared = {child.env["OMP_NUM_THREADS"] for child in pipeline._seed_processes(recipe, directory)}
    assert shared == {str(max(1, usable_cpus() // 2))}
