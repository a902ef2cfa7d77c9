"""Run states: the status, the page after every kind of end, and the commands that list, compare and remove runs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from typer.testing import CliRunner

from posttrain.cli import grid
from posttrain.cli.app import app
from posttrain.errors import UserError
from posttrain.report.page import chart_groups
from posttrain.report.run_view import RunView
from posttrain.report.sections import format_progress
from posttrain.report.serve import make_server
from posttrain.run import status
from posttrain.run.directory import RunDirectory

STATES = ("running", "finished", "stopped", "failed", "killed")


def invoke(*words: object, stdin: str = "") -> Any:
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


@pytest.mark.parametrize("how", STATES)
def test_state_and_page_of_each_kind_of_end(how: str, make_run: Any) -> None:
    run, _ = make_run("r", how)
    found = status.read(run)
    assert found.state == how
    page = (run / "report.html").read_text()
    written = "running" if how == "killed" else how  # a killed process writes nothing more
    assert f'<span class="state {written}">' in page
    assert ("not finished" in page) == (how != "finished")
    if how == "failed":
        assert found.message == "mine.py:3  the reward raised" and "the reward raised" in page
    if how == "stopped":
        assert found.message == "stopped after step 5 of 9"
    if how == "killed":
        assert "posttrain report" in page and "ended without a message" in found.message
        assert invoke("report", run).exit_code == 0
        assert '<span class="state killed">' in (run / "report.html").read_text()


def test_hung_run_reports_its_phase(make_run: Any) -> None:
    run, _ = make_run("r", "killed")
    (run / "logs" / "attempt_1" / "hang-rank0.txt").write_text("rank 0, step 3: the phase `sync` takes longer\nstack\n")
    found = status.read(run)
    assert found.state == "failed" and found.message.startswith("rank 0, step 3: the phase `sync` takes longer (stacks")


def test_run_changes_from_killed_to_finished(make_run: Any) -> None:
    run, _ = make_run("r", "killed")
    resolved = json.loads((run / "resolved.json").read_text())
    with RunDirectory.open(run, name="r", text="x", resolved=resolved, resume=True) as directory:
        status.begin(run, directory.attempt)
        assert status.read(run).state == "running" and status.read(run).attempt == 2
        status.end(run)
    assert status.read(run).state == "finished"


def test_runs_of_older_versions_have_a_state(tmp_path: Path) -> None:
    (tmp_path / "resolved.json").write_text("{}")
    assert status.read(tmp_path).state == "stopped"
    (tmp_path / "summary.json").write_text("{}")
    assert status.read(tmp_path).state == "finished"
    (tmp_path / "status.json").write_text("torn {")
    assert status.read(tmp_path).state == "finished"


def test_runs_are_listed_filtered_and_noted(make_run: Any, tmp_path: Path) -> None:
    a, _ = make_run("a", "finished")
    b, _ = make_run("inner/b", "killed", 1e-2)
    assert invoke("runs", b, "--note", "too fast\nI think").exit_code == 0
    table = invoke("runs", tmp_path).stdout
    assert "killed" in table and "5/9" in table and "reward 0.5" in table and "too fast I think" in table
    rows = {row["path"]: row for row in json.loads(invoke("runs", tmp_path, "--json").stdout)}
    assert set(rows) == {str(a), str(b)}
    assert rows[str(a)]["state"] == "finished" and rows[str(b)]["step"] == 5

    def filtered(*words: str) -> list[str]:
        return [row["path"] for row in json.loads(invoke("runs", tmp_path, "--json", *words).stdout)]

    assert filtered("--state", "killed") == [str(b)]
    assert filtered("--filter", "FAST") == [str(b)]
    assert filtered("--filter", "optim.lr=0.001") == [str(a)]
    assert filtered("--filter", "optim.lr=0.001", "--filter", "fast") == []
    assert invoke("runs", tmp_path, "--filter", "nothing").stderr.startswith("no matching run in")
    assert invoke("runs", "--state", "done").exit_code == 2
    invoke("runs", b, "--note", "")
    assert not (b / "note.txt").exists()


def test_pipeline_stages_are_listed_on_request(make_run: Any, tmp_path: Path) -> None:
    whole, _ = make_run("p", "finished")
    make_run("p/seed-0/rl", "finished")
    assert len(json.loads(invoke("runs", tmp_path, "--json").stdout)) == 1
    found = json.loads(invoke("runs", whole, "--json", "--stages").stdout)
    assert {row["path"] for row in found} == {str(whole), str(whole / "seed-0" / "rl")}


def test_sweep_is_listed_as_a_sweep_and_shows_its_runs(make_run: Any, tmp_path: Path) -> None:
    """Overlaid curves and links to the runs' pages. A training that contains an evaluation is not a sweep."""
    make_run("sw/optim.lr=0.1/seed-0", "finished")
    make_run("sw/optim.lr=0.2/seed-0", "failed")
    (tmp_path / "sw" / "resolved.json").write_text('{"stage": "rl"}')
    make_run("own", "finished")
    make_run("own/eval", "finished")
    found = {Path(row["path"]).name: row["stage"] for row in json.loads(invoke("runs", tmp_path, "--json").stdout)}
    assert found == {"sw": "sweep of rl", "own": "rl"}
    assert len(json.loads(invoke("runs", tmp_path / "sw", "--json").stdout)) == 3
    invoke("report", tmp_path / "sw")
    page = (tmp_path / "sw" / "report.html").read_text()
    assert '<a href="optim.lr=0.1/seed-0/report.html">report</a>' in page
    assert '<a href="optim.lr=0.2/seed-0/report.html">failed</a>' in page
    (group,) = chart_groups([RunView(tmp_path / "sw")])
    assert [run["name"] for run in group["runs"]] == ["optim.lr=0.1/seed-0", "optim.lr=0.2/seed-0"]
    assert group["runs"][0]["curves"]["reward"]["x"] == [1, 2, 3, 4, 5]


def test_total_steps_of_a_run_in_epochs_are_known_after_loading_rows(tmp_path: Path) -> None:
    resolved = {"stage": "sft", "run": {"epochs": 2}}
    with RunDirectory.open(tmp_path / "r", name="r", text="x", resolved=resolved) as directory:
        status.note_steps(directory, 7)  # without a status nothing is noted
        assert not (tmp_path / "r" / "status.json").exists()
        status.begin(directory.path, 1)
        directory.metrics(None).write(3, {"loss": 0.5})
        assert " 3 " in invoke("runs", tmp_path).stdout  # and not of how many
        status.note_steps(directory, 7)
        assert " 3/7 " in invoke("runs", tmp_path).stdout and format_progress(RunView(tmp_path / "r")) == "step 3 of 7"
        status.end(directory.path)
    assert " 3/7 " in invoke("runs", tmp_path).stdout


def test_remove_asks_first_and_only_removes_runs(
    make_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, _ = make_run("done", "finished")
    going, _ = make_run("going", "running")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(done)
    for place, message in (
        ("folder", "is not a run directory"),
        ("going", "another process is working"),
        ("link", "is a link"),
    ):
        refused = invoke("runs", tmp_path / place, done, "--delete", "--yes")
        assert refused.exit_code == 2 and message in refused.stderr
    assert done.exists() and going.exists()
    unasked = invoke("runs", done, "--delete")
    assert unasked.exit_code == 2 and "stdin is not a terminal" in unasked.stderr and done.exists()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: False)
    monkeypatch.setattr("posttrain.cli.report._is_interactive", lambda: True)
    assert "nothing was removed" in invoke("runs", done, "--delete").stderr and done.exists()
    monkeypatch.setattr("typer.confirm", lambda *_, **__: True)
    assert invoke("runs", done, "--delete").exit_code == 0
    assert not done.exists() and going.exists()
    assert "needs the run directories" in invoke("runs", "--delete").stderr


def test_two_runs_are_compared(make_run: Any) -> None:
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "finished", 1e-2)
    said = invoke("diff", a, b, "--samples", "1")
    assert said.exit_code == 0
    lines = [line.split() for line in said.stdout.splitlines()]
    assert ["optim.lr", "0.001", "0.01"] in lines
    assert ["reward", "0.3", "0.3", "+0"] in lines
    assert "prompt: What is 5?" in said.stdout and "\x1b[31m" not in said.stdout and "\\u001b[31mred" in said.stdout
    found = json.loads(invoke("diff", a, b, "--json").stdout)
    assert found["values"] == {"optim.lr": ["0.001", "0.01"]} and len(found["samples"]) == 3
    assert "kl" in found["metrics"]
    assert "the recipes and their files are the same" in invoke("diff", a, a).stdout
    assert invoke("diff", a, a.parent / "none").exit_code == 2
    assert f"did you mean {a.parent / 'b'}?" in invoke("diff", a, a.parent / "bb").stderr
    assert f"hint: {a.parent} has a, b" in invoke("report", a.parent / "nothere").stderr
    assert f"did you mean `{a.parent}`?" in invoke("runs", f"{a.parent}x").stderr


def test_comparison_of_trainings_states_the_steps_of_its_means(make_run: Any) -> None:
    a, _ = make_run("a", "finished")
    steps = [json.loads(line)["step"] for line in (a / "metrics.jsonl").read_text().splitlines()][-10:]
    said = invoke("diff", a, a)
    assert f"Means are over {a}: steps {steps[0]} to {steps[-1]}; {a}: steps" in said.stdout
    assert "the differences have no confidence interval" in said.stdout


@pytest.mark.parametrize(
    ("better", "diff", "low", "high", "told"),
    [(2, 0.05, 0.0, 0.125, "includes 0"), (20, 0.5, 0.35, 0.65, "excludes 0")],
)
def test_two_evaluations_are_compared_in_pairs(
    make_run: Any, better: int, diff: float, low: float, high: float, told: str
) -> None:
    """Of 40 shared problems, b is right on 2 (20) more: the resampled mean is Binomial(40, 1/20 or 1/2) / 40.

    Its 97.5% points are 5 (P(X <= 4) = 0.952, P(X <= 5) = 0.986) and 26; its 2.5% points 0 (P(X = 0) = 0.129) and
    14. The accuracies themselves, half right, would only be known to +-0.15.
    """
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "finished")
    for run, right, alone in ((a, 20, "x"), (b, 20 + better, "y")):
        rows = [{"uid": str(i), "accuracy": float(i < right)} for i in range(40)] + [{"uid": alone, "accuracy": 1.0}]
        (run / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = json.loads(invoke("diff", a, b, "--json").stdout)["paired"]
    assert (found["problems"], found["only_in_a"], found["only_in_b"]) == (40, 1, 1)
    assert [found["diff"], found["low"], found["high"]] == pytest.approx([diff, low, high])
    said = invoke("diff", a, b).stdout
    assert f"accuracy on 40 shared problems: {diff:+.4f}, 95% interval [{low:+.4f}, {high:+.4f}] {told}" in said
    assert "2 problems that only one run has are left out" in said and "Means are over" not in said


def test_two_evaluations_are_compared_by_all_shared_metrics(make_run: Any) -> None:
    """Of 4 completions c are right: pass@2 = 1 - C(4-c, 2) / C(4, 2), so 0, 1/2 and 1 for c = 0, 1, 4. cons@4 is the
    column `consensus`; votes of 2 completions are not in problems.jsonl and have no interval, nor has pass@8, which
    only one of the evaluations could say."""
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "finished")
    for run, right, won, means in (
        (a, (0, 1, 0, 4), (0, 0, 0, 1), (0.375, 0.25, None)),
        (b, (1, 1, 4, 4), (0, 0, 1, 1), (0.75, 0.5, 0.9)),
    ):
        rows = [
            {"uid": str(i), "samples": 4, "scored": 4, "right": c, "accuracy": c / 4, "consensus": float(w)}
            for i, (c, w) in enumerate(zip(right, won, strict=True))
        ]
        (run / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        shown = {"accuracy": sum(right) / 16, "pass@1": sum(right) / 16, "pass@2": means[0], "pass@8": means[2]}
        shown |= {"cons@2": 0.1, "cons@4": means[1], "tokens": 9.0}
        intervals = {name: {"mean": mean} for name, mean in shown.items()}
        summary = {"accuracy": sum(right) / 16, "mean_tokens": 9.0, "intervals": intervals}
        (run / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    found = json.loads(invoke("diff", a, b, "--json").stdout)
    assert found["metrics"]["pass@2"] == [0.375, 0.75] and found["metrics"]["cons@2"] == [0.1, 0.1]
    assert found["metrics"]["pass@8"] == [None, 0.9] and not {"pass@1", "tokens"} & found["metrics"].keys()
    assert {name: one["diff"] for name, one in found["paired"]["metrics"].items()} == {"pass@2": 0.375, "cons@4": 0.25}
    lines = invoke("diff", a, b).stdout.splitlines()
    assert "pass@2: +0.3750, 95% interval [+0.0000, +0.7500] includes 0: no difference is shown" in lines


def test_training_rows_are_reported_wherever_metrics_are_shown(make_run: Any) -> None:
    """On the page of the evaluation, in a comparison and in the closing table of a sweep."""
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "finished")
    for run in (a, b):
        rows = [{"uid": str(i), "accuracy": float(i % 2), "tokens": 1} for i in range(4)]
        (run / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    measured = {
        "intervals": {"pass@1": {"mean": 0.5, "low": 0.2, "high": 0.8, "level": 0.95}},
        "trained_on": {"rows": 3, "of": 4, "runs": ["runs/sft"]},
    }
    (b / "summary.json").write_text(json.dumps(measured), encoding="utf-8")
    note = "measured on rows it was trained on: 3 of 4 (runs/sft)"
    said = invoke("diff", a, b).stdout
    assert f"{b}: {note}" in said and f"{a}: measured" not in said
    invoke("report", b)
    assert note in (b / "report.html").read_text(encoding="utf-8")
    assert note in grid._compare_accuracies({"one": {"0": a}, "other": {"0": b}})["findings"]


def test_evaluations_without_a_problem_in_common_have_no_interval(make_run: Any) -> None:
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "finished")
    for run in (a, b):
        (run / "problems.jsonl").write_text(json.dumps({"uid": run.name, "accuracy": 1.0}) + "\n", encoding="utf-8")
    assert "The evaluations share no problem" in invoke("diff", a, b).stdout
    assert "+0.0000, without an interval (not informative: one problem)" in invoke("diff", a, a).stdout
    (a / "problems.jsonl").write_text('{"uid": "a", "prompt": "1 + 1?"}\n', encoding="utf-8")  # as generate writes them
    assert json.loads(invoke("diff", a, a, "--json").stdout)["paired"] is None


def test_page_of_several_runs(make_run: Any) -> None:
    a, _ = make_run("a", "finished")
    b, _ = make_run("b", "failed", 1e-2)
    said = invoke("report", a, b)
    assert said.stdout.strip() == str(b / "compare.html")
    page = (b / "compare.html").read_text()
    assert "<td>optim.lr</td><td>0.001</td><td>0.01</td>" in page and page.count('class="state') == 2
    assert invoke("report", a, "--output", a.parent).exit_code == 2
    assert invoke("report", a.parent).exit_code == 2


def ask(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def test_server_answers_only_this_machine_and_sends_updates(make_run: Any) -> None:
    run, child = make_run("r", "running")
    with make_server([run], 0) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        assert server.server_address[0] == "127.0.0.1"
        url = f"http://127.0.0.1:{server.server_address[1]}/"
        code, page = ask(url)
        assert code == 200 and 'data-live="yes"' in page
        _, text = ask(url + "news")
        news = json.loads(text)
        assert news["data"]["groups"][0]["runs"][0]["curves"]["reward"]["x"][-1] == 5
        assert ask(url + f"news?have={news['version']}")[0] == 204, "nothing is new"
        child.stdin.write("go on\n")
        child.stdin.flush()
        child.stdout.readline()
        again = json.loads(ask(url + f"news?have={news['version']}")[1])
        assert again["data"]["groups"][0]["runs"][0]["curves"]["reward"]["x"][-1] == 6
        assert ask(url, Host="evil.example:80")[0] == 403
        assert ask(url + "../../etc/passwd")[0] == 404
        with pytest.raises(UserError, match="cannot be used"):
            make_server([run], server.server_address[1])
        server.shutdown()


def test_list_shows_the_latest_metric_and_comparison_the_last_evaluation(tmp_path: Path) -> None:
    """A mean over widely spaced evaluations would lag behind."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "resolved.json").write_text(json.dumps({"stage": "sft", "run": {"steps": 3}}))
        rows = [{"step": step, "loss": 4.0 - step, "eval/loss": 5.0 - step} for step in (1, 2, 3)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "loss 1 " in invoke("runs", tmp_path / "a").stdout
    metrics = json.loads(invoke("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["metrics"]
    assert metrics["loss"] == [2.0, 2.0] and metrics["eval/loss"] == [2.0, 2.0]
