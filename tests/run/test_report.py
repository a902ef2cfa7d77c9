import json
import re
from html.parser import HTMLParser

import pytest

from posttrain.run.curves import nice_ticks, running_mean, thin
from posttrain.run.report import write_report

INTERVAL = {"mean": 0.9, "low": 0.88, "high": 0.92}


class Balance(HTMLParser):
    """Raises where a tag closes another one than the last that is open."""

    VOID = ("meta", "br", "polyline", "circle", "line")

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
        "completion": "<think>&</think>4",
        "reward": 1.1,
        "correct": True,
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
        "seeds": {"0": {"sft": {}}},
    }
    put("summary.json", json.dumps(summary))
    (tmp_path / "seed-0" / "sft").mkdir(parents=True)
    (tmp_path / "seed-0" / "sft" / "report.html").write_text("")
    (tmp_path / "seed-0" / "sft" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_the_page_is_whole_and_needs_nothing_else(finished):
    page = write_report(finished).read_text()
    checker = Balance()
    checker.feed(page)
    assert checker.open == []
    assert not checker.seen & {"script", "link", "img", "iframe", "svg.href"}
    assert not re.search(r"https?://|url\(|@import", page)


def test_the_page_shows_curves_samples_table_and_origin(finished):
    page = write_report(finished).read_text()
    assert page.count("<figure>") == 3 and "1 more curve<" in page  # reward, time/step behind a click, a stage's reward
    assert "sft, seed 0: reward" in page
    assert "&lt;think&gt;&amp;&lt;/think&gt;4" in page and page.count("<article") == 2  # first and last step
    assert "0.900 [0.880, 0.920]" in page and "+0.900 [+0.880, +0.920]" in page and "rl &lt; sft" in page
    assert 'href="seed-0/sft/report.html"' in page
    assert "torch 2.13.0" in page and "commit 0123456789ab with changes" in page and "model a&lt;b" in page
    assert "<b>1:01</b>train time" in page


def test_a_run_that_just_started_has_a_page_too(tmp_path):
    page = write_report(tmp_path).read_text()
    assert "not finished" in page and "<figure>" not in page


def test_ticks_are_round_and_cover_the_values():
    assert nice_ticks(0.12, 0.93) == [0.0, 0.5, 1.0]
    assert nice_ticks(30, 61) == [20.0, 40.0, 60.0, 80.0]
    assert nice_ticks(5, 5) == [4.5, 5.0, 5.5]


def test_long_curves_are_thinned_by_means_and_keep_their_end():
    points = [(i, float(i % 2)) for i in range(1000)]
    short = thin(points, 100)
    assert len(short) == 100 and short[-1] == (999, 1.0)
    assert short[0] == (4.5, 0.5)
    assert running_mean([(1, 1.0), (2, 3.0), (3, 5.0)], 2) == [(1, 1.0), (2, 2.0), (3, 4.0)]
