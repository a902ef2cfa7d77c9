"""Pages of runs in every state in a real browser: charts are drawn, hover shows values, model text stays text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from PIL import Image

from posttrain.images import png_url
from posttrain.report import browse
from posttrain.report.page import write_report
from posttrain.report.run_view import open_runs
from posttrain.report.serve import make_server
from tests.report.browser import Browser, browser, needs_chromium
from tests.report.conftest import EVIL

pytestmark = needs_chromium
FIRST = "[...document.querySelectorAll('#charts figure')[0]"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def check_drawn(tab: Browser, charts: int) -> None:
    """Check that each chart's canvas is not empty, no script failed, and nothing was blocked or loaded from
    elsewhere.
    """
    assert tab.js("document.querySelectorAll('#charts > .charts canvas').length") == charts
    inked = """[...document.querySelectorAll('#charts > .charts canvas')].every((c) =>
        c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v) => v))"""
    assert tab.js(inked)
    assert tab.problems() == []


def check_shown_as_text(tab: Browser) -> None:
    """Check that the completion is shown literally, except for control characters, and was not executed."""
    shown = EVIL.replace("\x1b", "\\u001b").replace("\x07", "\\u0007").replace("\u202e", "\\u202e")
    texts = tab.js("[...document.querySelectorAll('article pre')].map((e) => e.textContent)")
    assert shown in texts
    assert tab.js("document.title") != "run" and tab.js("document.querySelectorAll('article img').length") == 0


@pytest.mark.parametrize("how", ["running", "finished", "stopped", "failed", "killed"])
def test_run_page_in_a_browser(how: str, make_run: Any, tab: Browser, tmp_path: Path) -> None:
    run, _ = make_run("r", how)
    if how == "killed":
        write_report(open_runs([run]), run / "report.html")
    tab.open((run / "report.html").as_uri())
    state = tab.js("document.querySelector('.state').textContent")
    assert state == how
    assert ("not finished" in tab.js("document.body.innerText")) == (how != "finished")
    if how != "running":  # whose page is of its first step
        check_drawn(tab, 4)
        assert tab.js("data.groups[0].runs[0].curves.reward.x.length") == 5
    check_shown_as_text(tab)
    assert len(tab.screenshot(tmp_path / f"{how}.png")) > 20_000
    assert [url for url in tab.requested() if not url.startswith("file:")] == []


def test_hover_smoothing_intervals_and_filter(make_run: Any, tab: Browser) -> None:
    run, _ = make_run("r", "finished")
    tab.open((run / "report.html").as_uri())
    tab.hover("#charts .u-over")
    assert tab.wait("document.querySelector('#charts .u-legend .u-value').textContent") == "3"
    values = tab.js(f"{FIRST}.querySelectorAll('.u-value')].map((e) => e.textContent)")
    assert values[:2] == ["3", "0.3"]
    smooth = tab.js("plots[0].plot.data[2][4]")
    tab.js("get('smoothing').value = 0, get('smoothing').oninput()")
    assert tab.js("plots[0].plot.data[2][4]") == 0.5 and 0.3 < smooth < 0.5
    assert tab.js("plots[1].plot.data.length") == 5, "correct: step, raw, smooth, low, high"
    tab.js("get('bands').click()")
    assert tab.js("plots[1].plot.data.length") == 3
    visible = "[...document.querySelectorAll('article')].filter((e) => e.getBoundingClientRect().height).length"
    assert tab.js(visible) == 5
    tab.js("document.querySelector('input[value=cut]').click()")
    assert tab.js(visible) == 1
    tab.js("document.querySelector('#charts details')?.setAttribute('open', '')")
    assert tab.problems() == []


def test_injected_markup_does_not_run(make_run: Any, tab: Browser) -> None:
    run, _ = make_run("r", "finished")
    tab.open((run / "report.html").as_uri())
    markup = json.dumps(EVIL)
    tab.js(f"document.body.insertAdjacentHTML('beforeend', {markup})")
    tab.js("document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))")
    assert tab.js("document.title") == "rl · r"
    tab.wait("true")
    assert sum("Content Security Policy" in problem for problem in tab.problems()) >= 2


def test_curves_of_several_runs_are_overlaid(make_run: Any, tab: Browser, tmp_path: Path) -> None:
    runs = [make_run("a", "finished")[0], make_run("b", "stopped", 1e-2)[0]]
    write_report(open_runs(runs), tmp_path / "both.html")
    tab.open((tmp_path / "both.html").as_uri())
    check_drawn(tab, 4)
    labels = tab.js(f"{FIRST}.querySelectorAll('.u-label')].map((e) => e.textContent)")
    assert labels == ["step", "a (raw)", "a", "b (raw)", "b"]
    check_shown_as_text(tab)


def test_live_page_updates_itself(make_run: Any, tab: Browser, tmp_path: Path) -> None:
    run, child = make_run("r", "running")
    with make_server([run], 0) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        tab.open(f"http://127.0.0.1:{server.server_address[1]}/")
        check_drawn(tab, 4)
        check_shown_as_text(tab)
        child.stdin.write("go on\n")
        child.stdin.flush()
        child.stdout.readline()
        tab.wait("data.groups[0].runs[0].curves.reward.x.length === 6")
        assert "step 6 of 9" in tab.js("document.body.innerText")
        check_drawn(tab, 4)
        check_shown_as_text(tab)
        child.kill()
        child.wait()
        tab.wait("document.querySelector('.state').textContent === 'killed'")
        assert len(tab.screenshot(tmp_path / "live.png")) > 20_000
        server.shutdown()
        server.server_close()
    tab.wait("document.body.classList.contains('gone')")


def test_completions_in_the_browser(tab: Browser, tmp_path: Path) -> None:
    row = {"step": 0, "problem": 0, "uid": "x", "sample": 0, "prompt": EVIL, "completion": EVIL, "correct": False,
           "finish": "stop", "tokens": 3}  # fmt: skip
    row["pictures"] = [png_url(Image.new("RGB", (8, 6), "red")), "javascript:1"]
    (tmp_path / "completions.jsonl").write_text(json.dumps(row) + "\n")
    browse.write_page([tmp_path], tmp_path / "browse.html")
    tab.open((tmp_path / "browse.html").as_uri())
    check_shown_as_text(tab)
    assert tab.js("document.getElementById('place').textContent") == "1 of 1 (1 in all)"
    tab.wait("document.images.length === 1 && document.images[0].naturalWidth === 8")
    assert tab.problems() == [] and [url for url in tab.requested() if not url.startswith(("file:", "data:"))] == []
