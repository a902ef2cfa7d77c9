"""The model card: its contents, their sources, and what it must never contain."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from posttrain.export import card
from posttrain.export.run import default_output
from posttrain.export.source import find_source

from .conftest import a_run

ACCURACY = {"mean": 0.5, "low": 0.25, "high": 0.75, "level": 0.95, "problems": 40, "informative": True, "note": ""}
SUMMARY = {
    "intervals": {"accuracy": ACCURACY, "pass@9": {**ACCURACY, "mean": None, "note": "too few"}},
    "sampling": {"temperature": 0.0, "max_new_tokens": 64},
    "truncated": 0.125,
    "trained_on": {"rows": 3, "of": 40, "runs": ["runs/train"]},
}


def a_model(folder: Path, text: str = "{}") -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(text)
    return folder


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """runs/: sft on a base of the hub, rl on the result, and an evaluation of that; returns the rl run."""
    runs = tmp_path / "runs"
    sft = a_run(runs / "warm", "sft", "org/base", data={"source": "org/rows", "split": "train"})
    a_model(sft / "final")
    rl = a_run(
        runs / "train",
        "rl",
        str(sft / "final"),
        algorithm="dapo",
        optim={"lr": 1e-5},
        rewards=[{"use": str(tmp_path / "secret" / "mine.py:score"), "params": {"api_key": "sk-123"}, "weight": 0.5}],
        summary={"steps": 3, "reward_last": 0.75, "train_seconds": 9.0},
    )
    a_model(rl / "final")
    a_run(runs / "after", "eval", str(rl / "final"), data={"source": str(tmp_path / "held.jsonl")}, summary=SUMMARY)
    a_run(runs / "other", "eval", str(sft / "final"), summary={"intervals": {"accuracy": {**ACCURACY, "mean": 0.125}}})
    return rl


def head_of(text: str) -> dict[str, object]:
    return dict(yaml.safe_load(text.split("---\n")[1]))


def test_card_has_recipe_data_metrics_base_and_versions(chain: Path) -> None:
    facts = card.collect_facts(find_source(str(chain)), license="apache-2.0")
    text = card.write_card(facts, "merged", "me/mine")
    assert head_of(text) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "license": "apache-2.0",
        "tags": ["posttrain", "sft", "rl"],
        "base_model": "org/base",
        "base_model_relation": "finetune",
        "datasets": ["org/rows"],
    }
    for line in (
        "Trained with posttrain on `org/base`: sft, then rl (dapo).",
        "| `algorithm` | dapo |",
        "| `optim.lr` | 1e-05 |",
        "| data | org/rows, split train |",
        "| rewards | mine.py:score (weight 0.5) |",
        "| reward_last | 0.75 |",
        "| held.jsonl | accuracy | 0.500 | 95%: 0.250 to 0.750 | 40 |",
        "after: measured on rows it was trained on (3 of 40 rows), so not on new problems",
        "12.5% of the completions were cut and count as wrong",
        'AutoModelForCausalLM.from_pretrained("me/mine", dtype="auto")',
        "Trained with posttrain 9.9, torch 8.8.",
    ):
        assert line in text, line
    assert "0.125 |" not in text, "the evaluation of another model"
    assert "pass@9" not in text and "seconds" not in text


@pytest.mark.parametrize("other_base", [False, True])
def test_card_of_a_merge_lists_sources_with_training_and_weights(chain: Path, other_base: bool) -> None:
    runs = chain.parent
    start = "org/second" if other_base else str(runs / "warm")
    a_model(a_run(runs / "pairs", "dpo", start, algorithm="dpo", data={"source": "pairs.jsonl"}) / "final")
    merged = runs / "merged"
    models = [{"model": str(chain)}, {"model": str(runs / "pairs" / "final"), "parameters": {"weight": 0.25}}]
    common = {"weight": 0.75, "normalize": True, "density": None}
    a_run(merged, "merge", "", merge_method="linear", models=models, parameters=common, data={})
    a_model(merged / "final")
    text = card.write_card(card.collect_facts(find_source(str(merged))), "merged", "x")
    bases, of = ("`org/base`, `org/second`", "`org/second`") if other_base else ("`org/base`", "`warm`")
    for line in (
        f"Trained with posttrain on {bases}: `warm` is sft of `org/base`; `train` is rl (dapo) of `warm`; "
        f"`pairs` is dpo (dpo) of {of}; `merged` is merge (linear) of `train`, `pairs`.",
        "### warm: sft",
        "| data | org/rows, split train |",
        "| rewards | mine.py:score (weight 0.5) |",
        "| data | pairs.jsonl |",
        "### merged: merge (linear)",
        "| model | `train`, weight 0.75 |",
        "| model | `pairs`, weight 0.25 |",
        "| `parameters.normalize` | True |",
    ):
        assert line in text, line
    assert text.count("### warm") == 1 and "| data | train" not in text
    head = head_of(text)
    assert head["tags"] == ["posttrain", "sft", "rl", "dpo", "merge"]
    assert head["base_model"] == (["org/base", "org/second"] if other_base else "org/base")
    assert head["base_model_relation"] == ("merge" if other_base else "finetune")


def test_card_of_a_checkpoint_says_so(chain: Path) -> None:
    a_model(chain / "checkpoints" / "step-00000002")
    source = find_source(str(chain / "checkpoints" / "step-00000002"))
    text = card.write_card(card.collect_facts(source), "merged", "x")
    assert "# train-step-00000002" in text
    assert "- The checkpoint step-00000002; numbers of the training are those of the whole run." in text
    assert "No evaluation of this model was found" in text, "that of the final model is another's"
    assert default_output(source, "gguf") == chain / "exports" / "step-00000002-gguf"
    assert default_output(find_source(str(chain)), "gguf") == chain / "exports" / "gguf"


def test_card_contains_no_keys_and_no_local_paths(chain: Path, tmp_path: Path) -> None:
    text = card.write_card(card.collect_facts(find_source(str(chain))), "merged", "me/mine")
    assert "sk-123" not in text and str(tmp_path) not in text and "secret" not in text


def test_unknown_license_is_stated(chain: Path) -> None:
    text = card.write_card(card.collect_facts(find_source(str(chain))), "gguf", "x", ["m.gguf"])
    assert head_of(text)["license"] == "unknown" and head_of(text)["base_model_relation"] == "quantized"
    assert "Unknown: `org/base` names none that could be read here" in text and "llama-cli -m m.gguf" in text


def test_license_of_the_base_is_read_from_its_card(tmp_path: Path) -> None:
    base = a_model(tmp_path / "base")
    (base / "README.md").write_text("---\nlicense: llama3.2\ntags: [x]\n---\n# Base\n")
    run = a_run(tmp_path / "runs" / "sft", "sft", str(base))
    a_model(run / "final")
    facts = card.collect_facts(find_source(str(run)))
    assert facts.license == "llama3.2" and facts.public_base is None
    assert "Trained with posttrain on `base`: sft." in card.write_card(facts, "merged", "x")


@pytest.mark.parametrize("text", ["no head", "---\n[broken\n---\n", "---\n- a list\n---\n", "---\nlicense: [a]\n---\n"])
def test_base_cards_without_a_license(tmp_path: Path, text: str) -> None:
    base = a_model(tmp_path / "base")
    (base / "README.md").write_text(text)
    assert card.collect_facts(find_source(str(base))).license is None


def test_card_of_a_model_without_run_and_evaluations(tmp_path: Path) -> None:
    a_model(tmp_path / "theirs")
    text = card.write_card(card.collect_facts(find_source(str(tmp_path / "theirs"))), "merged", "theirs")
    assert "No run directory was beside the model" in text and "No evaluation of this model was found" in text


def test_license_of_a_gguf_file(smollm2_path: str) -> None:
    assert card.collect_facts(find_source(smollm2_path)).license == "apache-2.0"


def test_evaluation_named_on_the_command_line(chain: Path, tmp_path: Path) -> None:
    elsewhere = a_run(tmp_path / "far" / "away", "eval", "x", data={"source": "gsm8k.jsonl"}, summary=SUMMARY)
    facts = card.collect_facts(find_source(str(chain)), evaluations=[elsewhere])
    assert "| gsm8k.jsonl | accuracy | 0.500 |" in card.write_card(facts, "merged", "x")
