"""`posttrain data audit`: findings in rows with every fault, and none in good rows."""

from __future__ import annotations

import json
from pathlib import Path

RL = """
stage: rl
algorithm: grpo
model: {path: tiny}
data: {source: rows.jsonl}
rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 16}
rewards: [{use: math.accuracy, params: {extract: [last_number]}}]
scoring: {workers: 1}
run: {steps: 2}
"""
SOUND = [{"prompt": f"{a}+{2 * a + 1}=?", "answer": str(3 * a + 1)} for a in range(10, 30)]


def write(folder: Path, rows: list, name: str = "rows.jsonl") -> None:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def audit(call, *arguments):
    result = call("data", "audit", *arguments, "--json")
    report = json.loads(result.stdout)
    assert "checks" in report, result.stdout
    return result, report, {check["name"]: check for check in report["checks"]}


def test_good_rows_have_no_findings(folder, call):
    (folder / "rl.yaml").write_text(RL, encoding="utf-8")
    write(folder, SOUND)
    result, report, _ = audit(call, "rl.yaml")
    assert result.exit_code == 0 and all(check["ok"] for check in report["checks"])
    assert report["golds"]["called"] == 20 and report["labels"][0]["distinct"] == 20
    assert report["window"]["needed"] == report["lengths"]["prompt"]["max"] + 16


def test_every_fault_of_rl_rows_is_found(folder, call):
    (folder / "rl.yaml").write_text(RL, encoding="utf-8")
    long = "7" * 40
    faults = [
        {"prompt": "10+21=?", "answer": "31"},  # again, with the same answer
        {"prompt": "11+23=?", "answer": "99"},  # again, with another gold
        {"prompt": "1+1=?", "answer": "see figure"},
        {"prompt": "1+2=?", "answer": "It follows that the answer is not known because the proof is omitted"},
    ]
    write(folder, [*SOUND, *faults, *({"prompt": f"{n}-{n}=?", "answer": "0"} for n in range(40))])
    write(folder, [{"prompt": "12 + 25 = ?"}, {"prompt": long}], "test.jsonl")
    result, report, checks = audit(call, "rl.yaml", "--against", "test.jsonl", "rollout.max_new_tokens=2040")
    assert result.exit_code == 1
    assert report["duplicates"]["rows"] == 2 and len(report["duplicates"]["whole"]) == 1
    assert len(report["duplicates"]["conflicting"]) == 1 and not checks["conflicting golds"]["ok"]
    assert len(report["evaluation"][0]["same"]) == 1 and not checks["evaluation data"]["ok"]
    assert "rows.jsonl:3" in checks["evaluation data"]["text"]
    assert list(report["golds"]["unusable"]) == ["`see figure`"] and len(report["golds"]["prose"]) == 1
    assert not checks["window"]["ok"] and not checks["balance of `answer`"]["ok"]
    assert "always saying `0` is right in 62%" in checks["balance of `answer`"]["text"]


def test_evaluation_rows_of_the_recipe_are_compared(folder, call):
    (folder / "rl.yaml").write_text(f"{RL}eval: {{every: 2, data: {{source: held.jsonl}}}}\n", encoding="utf-8")
    write(folder, SOUND)
    write(folder, [{"prompt": SOUND[4]["prompt"], "answer": "1"}], "held.jsonl")
    report = audit(call, "rl.yaml")[1]
    assert [len(one["same"]) for one in report["evaluation"]] == [1]


def test_pairs_separable_by_length_are_reported(folder, call):
    text = "stage: dpo\nalgorithm: dpo\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 2}\n"
    (folder / "dpo.yaml").write_text(text, encoding="utf-8")
    write(folder, [{"prompt": f"{n}+1=?", "chosen": f"{n}" * 9, "rejected": "0"} for n in range(10, 30)])
    _, report, checks = audit(call, "dpo.yaml")
    assert report["pairs"]["chosen_longer"] == 1.0 and not checks["length of the sides"]["ok"]
    assert report["window"]["needed"] > report["lengths"]["prompt"]["max"]


def test_labels_of_answers_are_counted_and_the_page_is_text(folder, call):
    text = "stage: dpo\nalgorithm: kto\nmodel: {path: tiny}\ndata: {source: rows.jsonl}\nrun: {steps: 2}\n"
    (folder / "kto.yaml").write_text(text, encoding="utf-8")
    write(folder, [{"prompt": f"{n}+1=?", "completion": str(n), "label": n > 11} for n in range(10, 30)])
    result = call("data", "audit", "kto.yaml")
    assert result.exit_code == 1
    assert "LOOK balance of `label`: 2 values in 20 rows, most often `True` 90%" in result.stdout
    assert "ok   duplicates: 0 of 20 rows" in result.stdout
