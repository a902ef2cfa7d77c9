"""Two adapters over one base, one for each role of a workflow: which adapter answers, what each is trained on, and what
is saved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from posttrain.errors import RecipeError
from posttrain.recipe.load import load_dict
from posttrain.train import machine_checks

from .conftest import Seen

Values = dict[str, Any]
Ran = Callable[..., list[Values]]

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)
'''
FLOWS = """
async def speak(row, call):
    said = await call("actor", row["prompt"], max_tokens=6)
    await call("critic", "Judge: " + said.text, parent=said, max_tokens=6)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "flows.py").write_text(FLOWS)
    rows = [{"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def values_of(adapters: list[str] | None, workflow: Values | None = None, **changes: Any) -> Values:
    return {
        "stage": "rl",
        "model": {"path": "tiny", "lora": {"rank": 2, **({"adapters": adapters} if adapters else {})}},
        "data": {"source": "rows.jsonl"},
        "rollout": {
            "prompts_per_step": 4,
            "group_size": 2,
            "max_new_tokens": 8,
            "workflow": {"use": "./flows.py:speak", **(workflow or {})},
        },
        "rewards": [{"use": "rewards.py:digits", "correct": True}],
        "scoring": {"workers": 1, "correct_at": 0.2},
        "optim": {"lr": 1e-2},
        "run": {"steps": 3, "save_every": 1, "keep_checkpoints": 9, "samples_per_step": 40},
        **changes,
    }


def adapter_of(run: Path, step: int, name: str = "") -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / name / "adapter_model.safetensors")


def test_each_adapter_learns_from_the_calls_of_its_role(ran: Ran, home: Path, seen: Seen) -> None:
    """The first step samples from the base whichever adapter is requested. So the first of two adapters, which starts
    with the weights of a single adapter, ends it with the weights of a run that trains only the calls of its role;
    denominators, clipping and moments are its own. From the second step on each role is answered by its adapter. Also
    resumes exactly."""
    alone = values_of(None, {"train": ["critic"]}, run={"steps": 1, "save_every": 1})
    ran(alone, "alone")
    values = values_of(["critic", "actor"])
    metrics = ran(values)
    one, first = adapter_of(home / "alone", 1), adapter_of(home / "run", 1, "critic")
    assert one.keys() == first.keys() and all(torch.equal(one[name], first[name]) for name in one)
    assert any(bool(value.ne(0).any()) for name, value in first.items() if "lora_B" in name)
    actor = adapter_of(home / "run", 1, "actor")
    assert any(not torch.equal(actor[name], first[name]) for name in first)
    for row in metrics:
        both = (row["grad_norm/actor"] ** 2 + row["grad_norm/critic"] ** 2) ** 0.5
        assert row["grad_norm"] == pytest.approx(both) and min(row["grad_norm/actor"], row["grad_norm/critic"]) > 0
        assert row["mismatch/max"] < 1e-4, "sampled with one adapter and trained with another"
    assert {(r.call.role, r.prompt.adapter) for r in seen.rollouts[-1] if r.call} == {
        ("actor", "actor"),
        ("critic", "critic"),
    }
    assert {part.parent.name for part in (home / "run" / "final").glob("*/adapter")} == {"actor", "critic"}
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000003")
    (home / "run" / "summary.json").unlink()
    again = ran(values, "run", "--resume")
    whole = [[{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows] for rows in (again, metrics)]
    assert whole[0] == whole[1]


def test_adapter_without_a_signal_is_unchanged(ran: Ran, home: Path) -> None:
    """All its calls earn the same reward."""
    rewards = [
        {"use": "rewards.py:digits", "roles": ["critic"], "correct": True},
        {"use": "rewards.py:digits", "name": "none", "roles": ["actor"], "reads": "nobody"},
    ]
    metrics = ran(values_of(["critic", "actor"], rewards=rewards, run={"steps": 2, "save_every": 1}))
    assert any(row.get("grad_norm/critic") for row in metrics) and not any("grad_norm/actor" in row for row in metrics)
    assert not any(bool(v.any()) for n, v in adapter_of(home / "run", 2, "actor").items() if "lora_B" in n)


def test_role_can_use_the_base(ran: Ran, seen: Seen) -> None:
    """The actor answers as the base does, however far the critic's adapter has moved: its texts in the third step equal
    those of a run that does not train."""
    said = []
    for name, adapters, lr in (("one", {"actor": "base"}, 0.1), ("still", {"actor": "base"}, 1e-12), ("two", {}, 0.1)):
        ran(values_of(None, {"adapters": adapters, "train": ["critic"]}, optim={"lr": lr}), name)
        said.append([r.call.calls[0].text for r in seen.rollouts[-1] if r.call])
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (values_of(["actor", "actor"]), "listed twice"),
        (values_of(["actor", "reference"]), "is a reserved name"),
        ({**values_of(["a", "b"]), "rollout": {"group_size": 2}}, "there are no roles"),
        (values_of(None, {"adapters": {"actor": "a"}}), "(?s)the model has no adapter `a`.*one of: base"),
        ({**values_of(None, {"adapters": {"actor": "a"}}), "model": {"path": "tiny"}}, "is trained without adapters"),
        (values_of(None, {"adapters": {"actor": "base"}, "train": ["actor"]}), "the base is frozen"),
        (values_of(None, {"adapters": {"actor": "base"}}), "the base is frozen, and calls of this role are trained on"),
        (values_of(["a", "b"], {"adapters": {"actor": "c"}}), "no adapter `c`"),
        (
            values_of(["a", "b"], {"use": "critique_refine", "adapters": {"critc": "a"}}),
            "(?s)calls no `critc`.*did you mean `critic`",
        ),
        (values_of(["a", "b"], {"use": "critique_refine"}), "`b` would not be trained: no trained role has it"),
    ],
)
def test_incompatible_settings_are_refused_with_the_reason(home: Path, values: Values, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        load_dict(values, base_dir=home, where="test")


def test_base_roles_are_refused_if_vllm_has_no_base(home: Path) -> None:
    values = values_of(
        ["actor", "critic"], {"use": "critique_refine", "adapters": {"refiner": "base"}, "train": ["actor", "critic"]}
    )
    values["rollout"] |= {"engine": "vllm"}
    recipe = load_dict(values, base_dir=home, where="test").recipe
    with pytest.raises(RecipeError, match="cannot serve requests without an adapter"):
        machine_checks.check(recipe)


@pytest.mark.parametrize(
    ("vllm", "message"),
    [({"merge_adapter": True}, "one set of weights"), ({"server": {"devices": [1]}}, "one adapter")],
)
def test_engine_with_one_set_of_weights_is_refused(home: Path, vllm: Values, message: str) -> None:
    values = values_of(["actor", "critic"])
    values["rollout"] |= {"engine": "vllm", "vllm": vllm}
    with pytest.raises(RecipeError, match=message):
        load_dict(values, base_dir=home, where="test")
