"""The Python interface: signatures, the page's example, errors, threads, and an import without heavy libraries."""

from __future__ import annotations

import inspect
import json
import re
import runpy
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import posttrain as pt
from posttrain.errors import MissingExtra, RecipeError, UserError

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
SFT = {"stage": "sft", "model": {"path": "tiny"}, "data": {"source": "rows.jsonl"}, "run": {"steps": 2}}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=?", "completion": "2"}\n' * 8, encoding="utf-8")
    return tmp_path


def run_python(code: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def test_import_loads_no_heavy_library_and_public_names_exist() -> None:
    code = "import sys, posttrain as pt; names = set(sys.modules); print(sorted(dir(pt)), 'pydantic' in names)"
    heavy = "print([m for m in ('torch', 'transformers', 'pandas', 'typer', 'yaml') if m in sys.modules])"
    listed, found = run_python(f"{code}; {heavy}").splitlines()
    assert found == "[]" and listed.endswith("False")
    assert all(f"'{name}'" in listed for name in ("rl", "sft", "merge", "evaluate", "Run", "load_recipe"))
    with pytest.raises(AttributeError, match="no attribute 'grpo'"):
        _ = pt.grpo  # type: ignore[attr-defined]


def test_page_has_every_signature() -> None:
    """As written on the page: names and defaults, without annotations."""
    written = dict(re.findall(r"^(\w+)(\(.*\)) -> \w+$", PAGE, re.MULTILINE))
    stages = {"sft", "dpo", "rl", "reward_model", "evaluate", "harness", "generate", "merge"}
    assert set(written) == stages | {"load_recipe", "export"}
    for name, text in written.items():
        function: Any = getattr(pt, name)
        parameters = [p.replace(annotation=p.empty) for p in inspect.signature(function).parameters.values()]
        assert str(inspect.Signature(parameters)) == text, name
        assert inspect.signature(function).return_annotation in ("Run", "Loaded", "dict[str, Any]")


def test_packages_with_the_name_of_a_function_stay_importable() -> None:
    import posttrain.evaluate.estimators
    import posttrain.export.card
    import posttrain.merge.rules

    assert callable(pt.merge) and callable(pt.evaluate) and callable(pt.export)
    assert callable(posttrain.export.card.collect_facts)
    assert pt.merge is posttrain.merge and hasattr(posttrain.merge, "rules")
    assert callable(posttrain.evaluate.estimators.mean)


def test_example_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    example = ROOT / "docs" / "examples" / "python_api.py"
    code = example.read_text(encoding="utf-8")
    assert code.split('"""\n\n', 1)[1] in PAGE
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(example), str(tmp_path)])
    runpy.run_path(str(example), run_name="__main__")
    said = capsys.readouterr().out
    assert re.search(r"reward by step: \[[\d., -]+\]", said) and "signal/share" in said
    assert "accuracy: " in said and re.search(r"merged: \S+final is finished", said)
    assert "3e-05 by the command line" in said and "optim.learning_rate" in said


@pytest.mark.usefixtures("folder")
def test_errors_name_python_arguments() -> None:
    with pytest.raises(RecipeError) as wrong:
        pt.load_recipe(SFT, optim={"lrr": 1.0})
    (problem,) = wrong.value.problems
    assert (problem.where, problem.hint) == ("overrides", "did you mean `lr`?")
    assert str(wrong.value).startswith("overrides  optim.lrr: unknown key")
    Path("out").mkdir()
    Path("out/mine.txt").write_text("mine", encoding="utf-8")
    with pytest.raises(UserError) as used:
        pt.sft(SFT, "out")
    assert used.value.problems[0].hint == "name another output"
    Path("out/resolved.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError) as used:
        pt.sft(SFT, "out")
    assert used.value.problems[0].allowed == (
        "go on with it: resume=True; start elsewhere: output='NEW_NAME'; "
        "start anew: remove it first (shutil.rmtree('out'))"
    )


def test_unknown_attribute_error_lists_the_functions() -> None:
    with pytest.raises(UserError, match="is a package") as told:
        pt.train("mine.yaml")  # type: ignore[operator]
    assert told.value.problems[0].hint.endswith("pt.reward_model(recipe) or pt.rl(recipe)")
    for name, meant in (("eval", "evaluate"), ("load_recip", "load_recipe"), ("sftt", "sft")):
        with pytest.raises(AttributeError, match=f"did you mean `posttrain.{meant}`"):
            getattr(pt, name)
    assert not hasattr(pt, "__path_of_nothing__")


def test_export_writes_a_folder(folder: Path) -> None:
    from posttrain.models import tiny

    model, tokenizer = tiny.build()
    model.save_pretrained(folder / "mine")
    tokenizer.save_pretrained(folder / "mine")
    done = pt.export(folder / "mine", "merged", "out", license="mit")  # type: ignore[operator]
    assert done["path"] == "out" and "license: mit" in (folder / "out" / "README.md").read_text()
    with pytest.raises(UserError, match="did you mean `gguf`"):
        pt.export(folder / "mine", "ggfu")  # type: ignore[operator]
    with pytest.raises(UserError, match=r"overrides of an export are model\.KEY=VALUE"):
        pt.export(folder / "mine", "merged", "other", run={"seed": 1})  # type: ignore[operator]


@pytest.mark.usefixtures("folder")
def test_values_as_a_dict_and_both_forms_of_overrides() -> None:
    loaded = pt.load_recipe(SFT, optim={"lr": 1e-6, "betas": [0.9, 0.95]}, run__seed=3, run={"output": Path("out")})
    optim, run = loaded.resolved["optim"], loaded.resolved["run"]
    assert (optim["lr"], optim["betas"], run["seed"], run["output"], run["steps"]) == (1e-6, [0.9, 0.95], 3, "out", 2)
    with pytest.raises(UserError, match="loaded already"):
        pt.sft(loaded, run__seed=1)
    with pytest.raises(UserError, match=r"rewards: .*FILE\.py:FUNCTION"):
        pt.load_recipe(SFT, rewards=[{"use": print}])


def test_errors_are_raised_without_creating_a_directory(folder: Path) -> None:
    with pytest.raises(RecipeError, match=r"optim\.learning_rate") as caught:
        pt.sft(SFT, "out", optim={"learning_rate": 1})
    assert "lr" in caught.value.problems[0].hint
    with pytest.raises(RecipeError, match="not for `posttrain rl`"):
        pt.rl(SFT, "out")
    with pytest.raises(UserError, match="cannot be int"):
        pt.sft(3)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="not a run directory"):
        pt.Run(folder)
    assert not (folder / "out").exists()


@pytest.mark.usefixtures("folder")
def test_run_in_another_thread_returns_its_metrics() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(pt.sft(SFT, "out")))
    thread.start()
    thread.join()
    (run,) = found
    assert (run.path, run.stage, run.status, run.model) == (Path("out"), "sft", "finished", Path("out/final"))
    assert run.summary["steps"] == 2 and run.recipe["run"]["steps"] == 2
    assert run.metrics["step"] == [1, 2]
    with pytest.raises(KeyError, match="no row has `lsos`: did you mean `loss`"):
        run.metrics["lsos"]
    assert pt.api.Rows([{"step": 1}, {"step": 2, "held_out": 0.5}])["held_out"] == [None, 0.5]
    assert pt.api.Rows()["reward"] == []  # a run that has not started
    assert run.metrics[0]["step"] == 1 and len(run.metrics.frame) == 2
    assert list(run.metrics.frame.columns) == run.metrics.columns
    assert "srcdoc=" in run._repr_html_() and 'sandbox="allow-scripts"' in run._repr_html_()
    with pytest.raises(UserError, match="holds a run already"):
        pt.sft(SFT, "out")
    assert pt.sft(SFT, "out", resume=True, run__steps=3).metrics["step"] == [1, 2, 3]


def test_without_pandas_metrics_are_a_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "resolved.json").write_text('{"stage": "rl"}', encoding="utf-8")
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "reward": 0.5}) + "\n", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = pt.Run(folder)
    assert run.metrics["reward"] == [0.5] and "reward" in run.metrics._repr_html_()
    assert run.summary is None and run.model is None
    with pytest.raises(MissingExtra, match="pandas"):
        _ = run.metrics.frame
