"""What `data inspect` reports and prints."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from posttrain.cli.data import app, show
from posttrain.data.inspect import inspect, summarize_lengths
from posttrain.errors import DataError
from posttrain.recipe.sections import Data

Write = Callable[[Iterable[dict[str, Any]]], str]

ROWS = [
    {"prompt": "q", "completion": "one\ntwo", "answer": "2"},
    {"prompt": "q", "completion": "one\ntwo", "answer": "2"},
    {"prompt": "ß", "completion": "three", "answer": "3"},
    {"prompt": "q", "completion": "", "answer": "4"},
]


def checks(report: dict[str, Any]) -> dict[str, bool]:
    return {c["name"]: c["ok"] for c in report["checks"]}


def test_report_of_examples(tiny: Any, jsonl: Write) -> None:
    report = inspect("sft", Data(source=jsonl(ROWS)), tiny, Path.cwd(), [tiny.eos_token_id], samples=1)
    assert (report["rows"], report["items"]) == (4, 3)
    assert list(report["dropped"]) == ["empty completion"]
    assert report["lengths"]["trained"] == {"min": 6, "median": 8, "p95": 8, "max": 8}
    assert checks(report) == {
        "end of turn": True,
        "chat template": True,
        "text": True,
        "unknown characters": False,  # ß
        "duplicates": False,
        "dropped or cut": False,  # one row of four
    }
    part = report["samples"][0]["parts"]["sequence"]
    assert [t["fate"] for t in part["tokens"]] == ["prompt"] * 4 + ["trained"] * 8
    assert part["runs"][1] == {"text": "one\ntwo<eos>", "fate": "trained"}
    json.dumps(report)


def test_end_of_turn_that_does_not_end_generation_is_reported(tiny: Any, jsonl: Write) -> None:
    """The generation config ends at a token other than the one that the template trains: answers would never stop."""
    report = inspect("sft", Data(source=jsonl(ROWS)), tiny, Path.cwd(), [tiny.unk_token_id])
    assert checks(report)["end of turn"] is False


def test_template_that_opens_think_is_reported(tiny: Any, jsonl: Write, with_template: Callable[[str], Any]) -> None:
    tokenizer = with_template(
        tiny.chat_template.replace("'<|assistant|>' -}}{%- endif -%}\n", "'<|assistant|><think>' -}}{%- endif -%}\n")
    )
    report = inspect("rl", Data(source=jsonl(ROWS)), tokenizer, Path.cwd(), [2])
    assert "thinking" in checks(report)
    assert report["columns"] == ["answer", "completion", "prompt", "uid"]
    assert "thinking" not in checks(inspect("rl", Data(source=jsonl(ROWS)), tiny, Path.cwd(), [2]))


def test_report_of_pairs_shows_both_sides(tiny: Any, jsonl: Write) -> None:
    path = jsonl([{"prompt": "q", "chosen": "a", "rejected": "b"}])
    report = inspect("dpo", Data(source=path), tiny, Path.cwd(), [2])
    assert [p["runs"][0]["text"] for p in report["samples"][0]["parts"].values()] == [
        "<bos><|user|>q<|assistant|>",
        "a<eos>",
        "b<eos>",
    ]


def test_spread_reports_lengths_that_occur() -> None:
    """For 1..20 the median is the 10th, p95 the 19th."""
    assert summarize_lengths(list(range(20, 0, -1))) == {"min": 1, "median": 10, "p95": 19, "max": 20}
    assert summarize_lengths([4]) == {"min": 4, "median": 4, "p95": 4, "max": 4}


def test_trained_text_is_bracketed_in_plain_output_and_colored_on_a_terminal(tiny: Any, jsonl: Write) -> None:
    report = inspect("sft", Data(source=jsonl(ROWS)), tiny, Path.cwd(), [tiny.eos_token_id])
    plain, uncoloured, colored = io.StringIO(), io.StringIO(), io.StringIO()
    show(report, Console(file=plain, width=100, highlight=False))
    assert "<bos><|user|>q<|assistant|>»one⏎\ntwo<eos>«" in plain.getvalue()
    assert "dropped  empty completion  1" in plain.getvalue()
    assert "LOOK duplicates: 1 of 3" in plain.getvalue()
    show(report, Console(file=uncoloured, width=100, highlight=False, force_terminal=True, no_color=True))
    assert "two<eos>«" in uncoloured.getvalue()
    show(report, Console(file=colored, width=100, highlight=False, force_terminal=True, color_system="standard"))
    assert "\x1b[32mtwo<eos>\x1b[0m" in colored.getvalue()


def test_command_prints_json(tmp_path: Path, jsonl: Write) -> None:
    recipe = tmp_path / "sft.yaml"
    recipe.write_text(f"stage: sft\nmodel: {{path: tiny}}\ndata: {{source: {jsonl(ROWS)}}}\nrun: {{steps: 1}}\n")
    result = CliRunner().invoke(app, ["inspect", str(recipe), "data.max_length=11", "--rows", "1", "--json"])
    assert result.exit_code == 1, result.output
    report = json.loads(result.stdout)
    assert (report["stage"], len(report["samples"]), report["items"]) == ("sft", 1, 1)
    assert set(report["dropped"]) == {"longer than max_length", "empty completion"}


def test_exit_codes_of_inspect_and_audit_are_the_same(tmp_path: Path, jsonl: Write) -> None:
    recipe = tmp_path / "sft.yaml"
    good = [{"prompt": f"{i}?", "completion": str(i)} for i in range(5)]
    for rows, code, said in (
        (good, 0, "no findings"),
        ([*good, {"prompt": "6?", "completion": ""}], 1, "LOOK dropped or cut: empty completion: 1"),
        ([*good, good[0]], 1, "1 finding, marked LOOK"),
    ):
        recipe.write_text(f"stage: sft\nmodel: {{path: tiny}}\ndata: {{source: {jsonl(rows)}}}\nrun: {{steps: 1}}\n")
        for command in ("inspect", "audit"):
            result = CliRunner().invoke(app, [command, str(recipe)])
            assert result.exit_code == code, result.output
            assert said in result.output
            json.loads(CliRunner().invoke(app, [command, str(recipe), "--json"]).output)  # nothing else is printed


def test_stage_without_data_is_refused(tiny: Any) -> None:
    with pytest.raises(DataError, match="a recipe for `posttrain merge` has no data of its own"):
        inspect("merge", Data(source="x"), tiny, Path.cwd(), [2])


def test_labelled_answers_are_shown_in_pairs(tiny, tmp_path: Path) -> None:
    """Rows of kto: the other side is another row's answer."""
    rows = [{"prompt": f"{i}?", "completion": str(i), "label": i > 1} for i in range(1, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report = inspect("dpo", Data(source="rows.jsonl"), tiny, tmp_path, (2,), single=True)
    assert (report["rows"], report["items"]) == (3, 3)
    assert [(s["label"], list(s["parts"])) for s in report["samples"]] == [
        (0, ["prompt", "bad answer (label 0)"]),
        (1, ["prompt", "good answer (label 1)"]),
        (1, ["prompt", "good answer (label 1)"]),
    ]
    assert report["samples"][0]["parts"]["bad answer (label 0)"]["runs"] == [{"text": "1<eos>", "fate": "trained"}]
    assert set(report["lengths"]) == {"prompt", "answer"}
    text = next(check["text"] for check in report["checks"] if check["name"] == "labels")
    assert text.startswith("2 good, 1 bad")


THOUGHTFUL = [
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "<think>hm</think>one"},
    {"role": "user", "content": "r"},
    {"role": "assistant", "content": "two"},
]


def test_rendered_text_is_compared_with_the_row_in_both_directions(
    tiny: Any, jsonl: Write, with_template: Callable[[str], Any]
) -> None:
    """Reports what the rendering drops from earlier turns, and what it adds to the trained turn."""
    path = jsonl([{"messages": THOUGHTFUL}, {"prompt": "q", "completion": "<think>so</think>one"}])
    plain = inspect("sft", Data(source=path), tiny, Path.cwd(), [tiny.eos_token_id])
    kept = next(check for check in plain["checks"] if check["name"] == "text")
    assert kept["ok"] and kept["text"].startswith("2 of 2 rows have all of their text in the rendered row")
    assert "'…<eos>' (2 turns)" in kept["text"]
    tokenizer = with_template(
        "{% for m in messages %}<|{{ m.role }}|>"
        "{% if m.role == 'assistant' and loop.last and '<think>' not in m.content %}<think>\n</think>{% endif %}"
        "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    report = inspect("sft", Data(source=path), tokenizer, Path.cwd(), [tiny.eos_token_id])
    assert (checks(report)["text"], checks(report)["added text"]) == (False, False)
    kept = next(check["text"] for check in report["checks"] if check["name"] == "text")
    assert kept.startswith("1 of 2 rows")
    assert "leaves out thoughts of earlier turns" in kept
    assert "'<think>\\n</think>…<eos>' (1 turn)" in kept
    assert sum(cause.startswith("LOOK: the chat template") for cause in report["noted"]) == 2
