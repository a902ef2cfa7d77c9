import json

import pytest


def test_memory_arithmetic_and_changes_are_printed(call):
    done = call("plan", "r.yaml", "batch.size=8", "batch.micro_size=4", "model.device=cpu")
    assert done.exit_code == 0, done.stderr
    lines = done.stdout.splitlines()
    counts = {line[:30].strip(): line[30:].strip() for line in lines}
    assert (counts["rows"], counts["steps"], counts["forward passes a step"]) == ("1", "3", "2")
    assert any(line.split()[:1] == ["update"] for line in lines)
    assert any("fits in" in line for line in lines)


def test_changes_are_listed_only_if_they_lower_the_printed_peak(call, folder):
    """A step of `tiny` needs the 0.5 GiB of the CUDA context, whatever its settings."""
    assert "no change of one setting lowers the peak by 0.01 GiB or more" in call("plan", "r.yaml").stdout.splitlines()
    assert json.loads(call("plan", "r.yaml", "--json").stdout)["edits"] == []
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 8}
    (folder / "large").mkdir()
    (folder / "large" / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 32000, **sizes}))
    large = ("plan", "r.yaml", "model.path=./large", "data.max_length=2048", "batch.size=8", "batch.micro_size=4")
    lines = call(*large).stdout.splitlines()
    first = lines[lines.index("each of these changes, alone, lowers the peak to") + 1]
    assert first.strip().startswith("batch.micro_size=2") and first.endswith(" GiB")
    found = json.loads(call(*large, "--json").stdout)
    assert len(found["edits"]) == 3 and all(edit["peak_gib"] < found["peak_gib"] for edit in found["edits"])


def test_json_adds_up(call):
    found = json.loads(call("plan", "r.yaml", "--json").stdout)
    parts = found["memory_gib"]["update"]
    assert sum(v for k, v in parts.items() if k != "sum") == pytest.approx(parts["sum"], abs=0.05)
    assert found["peak_gib"] == parts["sum"] and found["peak_phase"] == "update"


def test_stages_without_training_are_refused(call, folder):
    (folder / "merge.yaml").write_text("stage: merge\nmerge_method: linear\nmodels: [{model: a}]\n")
    done = call("plan", "merge.yaml")
    assert done.exit_code == 2 and "recipes that train" in done.stderr


def test_held_out_rows_of_a_reward_model_are_not_counted(call):
    found = json.loads(call("plan", "debug/reward_model", "--json").stdout)
    whole = json.loads(call("plan", "debug/reward_model", "objective.holdout=0", "--json").stdout)
    assert 0 < found["batch"]["rows"] < whole["batch"]["rows"]
    assert found["batch"]["steps"] < whole["batch"]["steps"]


def test_step_has_at_most_the_rows_of_the_epochs(call):
    found = json.loads(call("plan", "r.yaml", "batch.size=8", "run.steps=null", "run.epochs=2", "--json").stdout)
    batch = found["batch"]
    assert (batch["rows a step"], batch["forward passes a step"]) == (2, 1)
    assert batch["tokens a step on average"] == 2 * batch["longest row"]
