"""The page of a run: self-contained, and with the content that a reader looks for."""

import json
import re
import time
from html import unescape
from html.parser import HTMLParser

import pytest

from posttrain.report.curves import (
    Curves,
    compute_ticks,
    curves_to_draw,
    proportion_interval,
    running_mean,
    split_by_priority,
    thin,
)
from posttrain.report.live import LivePage
from posttrain.report.page import json_island, render
from posttrain.report.run_view import MAX_CHARACTERS, RunView, read_ends, select_samples

INTERVAL = {"mean": 0.9, "low": 0.88, "high": 0.92}


class Balance(HTMLParser):
    """Raises if a tag closes an element other than the innermost open one."""

    VOID = ("meta", "br", "line", "rect", "input")

    def __init__(self):
        super().__init__()
        self.open, self.seen = [], set()

    def handle_starttag(self, tag, attrs):
        self.seen.add(tag)
        self.seen.update(f"{tag}.{k}" for k, _ in attrs)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def data_of(page):
    return json.loads(re.search(r'<script id="data" type="application/json">(.*?)</script>', page, re.DOTALL)[1])


@pytest.fixture
def finished(tmp_path):
    def put(name, text):
        (tmp_path / name).write_text(text)

    put("resolved.json", json.dumps({"stage": "rl", "model": {"path": "a<b"}}))
    put("recipe.yaml", "stage: rl # <script>alert(1)</script>\n")
    put("env.json", json.dumps({"packages": {"torch": "2.13.0"}, "git": {"commit": "0123456789abcdef", "diff": "x"}}))
    rows = [{"step": s, "reward": s / 10, "time/step": 1.0, "flag": None} for s in range(1, 11)]
    put("metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sample = {
        "prompt": "2+2",
        "completion": "<think>&</think>4\x1b[31m\u202e",
        "reward": 1.1,
        "correct": True,
        "finish": "length",
        "scores": {"format": 1},
    }
    put("samples.jsonl", "".join(json.dumps({"step": s, **sample}) + "\n" for s in (1, 5, 10)))
    table = [
        {"model": "sft", "seeds": {"0": INTERVAL}, "pooled": INTERVAL, "mean_tokens": 35.0, "difference": None},
        {
            "model": "rl",
            "seeds": {"0": INTERVAL},
            "pooled": INTERVAL,
            "mean_tokens": 35.0,
            "difference": {"to": "sft", **INTERVAL},
        },
    ]
    summary = {
        "reward_last": 1.0,
        "train_seconds": 61,
        "table": table,
        "findings": ["rl < sft"],
        "intervals": {"accuracy": {**INTERVAL, "level": 0.95}},
        "accuracy": 0.9,
        "truncated": 0.25,
        "seeds": {"0": {"sft": {}}},
    }
    put("summary.json", json.dumps(summary))
    stage = tmp_path / "seed-0" / "sft"
    stage.mkdir(parents=True)
    (stage / "report.html").write_text("")
    (stage / "resolved.json").write_text("{}")
    (stage / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_page_is_complete_and_self_contained(finished):
    page = render([RunView(finished)])
    checker = Balance()
    checker.feed(page)
    assert checker.open == []
    assert not checker.seen & {"link", "img", "iframe", "script.src", "form", "object"}
    assert not re.search(r"""(src|href|url)\s*[=(]\s*["']?https?:|@import""", page)
    assert "default-src 'none'" in unescape(page) and "connect-src" not in page


def test_page_shows_curves_samples_table_and_origin(finished):
    page = render([RunView(finished)])
    groups = data_of(page)["groups"]
    assert [group["title"] for group in groups] == ["Curves", "Curves of sft"]
    assert groups[0]["first"] == ["reward"] and groups[0]["rest"] == ["time/step"]
    assert groups[0]["runs"][0]["curves"]["reward"]["y"][-1] == 1.0
    assert "&lt;think&gt;&amp;&lt;/think&gt;4" in page and page.count("<article") == 3
    assert "0.900 [0.880, 0.920]" in page and "+0.900 [+0.880, +0.920]" in page and "rl &lt; sft" in page
    assert 'href="seed-0/sft/report.html"' in page
    assert "torch 2.13.0" in page and "commit 0123456789ab with changes" in page and "model a&lt;b" in page
    assert "<b>1:01</b>train time" in page


def test_intervals_and_truncated_completions_are_shown(finished):
    page = render([RunView(finished)])
    assert "<b>0.9</b>accuracy <i>[0.880, 0.920]</i>" in page and 'width="4' in page
    assert '<div class="warn"><b>25.0%</b>cut completions</div>' in page
    assert page.count("cut at the length limit") == 3


def test_control_characters_are_shown_escaped(finished):
    page = render([RunView(finished)])
    assert "\x1b" not in page and "\u202e" not in page
    assert "\\u001b[31m\\u202e" in page


def test_latest_metrics_of_a_running_run(tmp_path):
    rows = [
        {"step": 1, "reward": 0.5, "eval/accuracy": 0.5, "eval/accuracy/low": 0.4, "eval/accuracy/high": 0.6},
        {"step": 2, "reward": 0.75, "completions/clipped_ratio": 0.02},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = render([RunView(tmp_path)])
    assert "<b>50.0%</b>evaluation accuracy <i>[0.40, 0.60]</i>" in page, "of the newest evaluation"
    assert "<b>0.75</b>reward" in page and "<b>2.0%</b>cut completions" in page and 'class="warn"' not in page


def test_run_that_just_started_has_a_page(tmp_path):
    page = render([RunView(tmp_path)])
    assert "not finished" in page and data_of(page)["groups"] == [] and "<article" not in page


def test_data_cannot_close_its_element():
    text = json_island({"a": "</script><!--<script>\u2028&"})
    assert not re.search("[<>&\u2028]", text)
    assert json.loads(text) == {"a": "</script><!--<script>\u2028&"}


def test_page_size_and_time_are_bounded_for_long_runs(tmp_path):
    (tmp_path / "resolved.json").write_text('{"stage": "rl"}')
    row = {f"metric/{n}": 0.123456789 for n in range(60)}
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps({"step": step, **row}) + "\n")
    with (tmp_path / "samples.jsonl").open("w") as file:
        for step in range(1, 5001):
            file.write(json.dumps({"step": step, "prompt": "p", "completion": "c" * 1000}) + "\n")
    view = RunView(tmp_path)
    page = render([view])
    assert len(page) < 2_000_000
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5001, **row}) + "\n")
    started = time.process_time()
    view.refresh()
    assert view.last_step == 5001 and len(view.curves.points["metric/0"]) == 5001
    assert time.process_time() - started < 0.1, "only the new row is read"
    assert {record["step"] for record in view.samples} >= {1, 5000}


def test_truncated_file_is_read_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {s}, "loss": {s}}}\n' for s in (1, 2, 3)) + '{"step": 4, "lo')
    curves = Curves(path)
    assert curves.read_more() and not curves.read_more()
    assert curves.points["loss"] == [(1, 1.0), (2, 2.0), (3, 3.0)], "the torn row is not there yet"
    path.write_text('{"step": 1, "loss": 9}\n')
    assert curves.read_more() and curves.points["loss"] == [(1, 9.0)]
    path.write_text('{"step": 1, "loss": 9}\n{"step": 2, "loss": 1}\nbroken\n[1]\n{"step": 2, "loss": 7}\n')
    assert curves.read_more() and curves.points["loss"] == [(1, 9.0), (2, 7.0)]


def test_intervals_are_shown_for_metrics_with_bounds(tmp_path):
    rows = [
        {"step": 1, "eval/accuracy": 0.5, "eval/accuracy/low": 0.4, "eval/accuracy/high": 0.6, "correct": 0.5,
         "rollout/rows": 80},
        {"step": 2, "correct": 1.0, "rollout/rows": 80},
    ]  # fmt: skip
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curves = Curves(tmp_path / "metrics.jsonl")
    curves.read_more()
    found = curves_to_draw(curves, group_size=8)
    assert found["eval/accuracy"] == {"x": [1.0], "y": [0.5], "low": [0.4], "high": [0.6]}
    assert "eval/accuracy/low" not in found
    first, rest = split_by_priority(list(curves.points))
    assert "eval/accuracy" in first and "eval/accuracy/low" not in [*first, *rest]
    assert found["correct"]["low"][0] == pytest.approx(proportion_interval(0.5, 10)[0], abs=1e-4)
    assert found["correct"]["high"][1] == 1.0
    assert "low" not in curves_to_draw(curves)["correct"], "without the size of a group there is no interval"


def test_wilson_interval():
    """By hand: n = 10, p = 0.5, z = 1.96 gives (0.2366, 0.7634)."""
    assert proportion_interval(0.5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)
    low, high = proportion_interval(0.0, 8)
    assert low == 0.0 and high == pytest.approx(1.96**2 / (8 + 1.96**2), abs=1e-6)


def test_samples_of_first_last_and_intermediate_steps():
    records = [{"step": s, "prompt": "p", "completion": f"{s}" * 10_000} for s in range(100) for _ in range(9)]
    found = select_samples(records)
    assert {0, 99} <= {record["step"] for record in found} and len(found) == 32
    assert len(found[0]["completion"]) < MAX_CHARACTERS + 100 and "4000 characters more" in found[0]["completion"]


def test_first_and_last_lines_of_a_long_file(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps({"step": s, "completion": "x" * 2000}) + "\n" for s in range(2000)) + '{"torn')
    steps = [row["step"] for row in read_ends(path)]
    assert steps[0] == 0 and steps[-1] == 1999 and len(steps) < 700 and steps == sorted(set(steps))


def test_unwritable_page_is_reported_once_and_stops_nothing(tmp_path, capsys):
    (tmp_path / "resolved.json").write_text("not json")
    page = LivePage(tmp_path)
    page.write()
    page.write()
    assert capsys.readouterr().err.count("report.html is not written: ") == 1


def test_page_is_written_at_most_every_few_seconds(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr("posttrain.report.live.time.monotonic", lambda: now[0])
    (tmp_path / "resolved.json").write_text("{}")
    page = LivePage(tmp_path)
    page.write()

    def step(number):
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.write(f'{{"step": {number}, "loss": 1.0}}\n')
        page.on_rows([{"step": number}])
        return data_of((tmp_path / "report.html").read_text())["groups"]

    assert step(1)[0]["runs"][0]["curves"]["loss"]["x"] == [1], "the first step is shown at once"
    now[0] += 9
    assert len(step(2)[0]["runs"][0]["curves"]["loss"]["x"]) == 1
    now[0] += 2
    assert len(step(3)[0]["runs"][0]["curves"]["loss"]["x"]) == 3


def test_ticks_are_round_and_cover_the_values():
    assert compute_ticks(0.12, 0.93) == [0.0, 0.5, 1.0]
    assert compute_ticks(30, 61) == [20.0, 40.0, 60.0, 80.0]
    assert compute_ticks(5, 5) == [4.5, 5.0, 5.5]


def test_long_curves_are_downsampled_by_means_and_keep_their_end():
    points = [(i, float(i % 2)) for i in range(1000)]
    short = thin(points, 100)
    assert len(short) == 100 and short[-1] == (999, 1.0)
    assert short[0] == (4.5, 0.5)
    assert running_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]
