"""Rollouts of older weights on a real vLLM: the weights that sampled each token, the schedule, resuming. One engine."""

from __future__ import annotations

import copy
import importlib.util
import itertools
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from posttrain.batch import Rollout
from posttrain.models import tiny
from posttrain.recipe.load import load_dict
from posttrain.rollout import make_engine as engines
from posttrain.rollout.hf import eval_mode
from posttrain.run import checkpoints
from posttrain.run.metrics import read_metrics
from posttrain.train import assemble, collect, rl, rollout_source

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
REWARDS = (
    "def digits(completion, token_count):\n    return sum(c.isdigit() for c in completion) / max(token_count, 1)\n"
)
STEPS = 7


class Runs:
    """Runs recipes on one engine. taken: the rollouts that each step of the newest run trained on; weights: the model
    at each version."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, opened: Any) -> None:
        self.folder, self.opened = folder, opened
        self.engine: Any = None
        self.close: Any = None
        self.taken: list[list[Rollout]] = []
        self.weights: dict[int, Any] = {}
        self.apart = True
        make, take = engines.make_engine, rollout_source.advance_state

        def make_once(section: Any, loaded: Any, **more: Any) -> Any:
            if self.engine is None:
                self.engine = make(section, loaded, **more)
                self.close, self.engine.close = self.engine.close, lambda: None
            self.engine.loaded, self.engine.generates_during_updates = loaded, self.apart
            self.engine.sync(loaded.model, 0)
            return self.engine

        def taking(ctx: Any, state: Any, batch: Any, staleness: int) -> None:
            take(ctx, state, batch, staleness)
            self.taken.append(batch.rollouts)
            self.weights[state.step] = copy.deepcopy(ctx.loaded.model)

        monkeypatch.setattr(assemble, "make_engine", make_once)
        for module in (collect, rollout_source):  # sampled when the step starts, and ahead
            monkeypatch.setattr(module, "advance_state", taking)

    def run(self, name: str, *, apart: bool = True, resume: bool = False, **rollout: Any) -> list[dict[str, Any]]:
        """Return the metrics of a run, without times."""
        self.taken, self.weights, self.apart = [], {}, apart
        values = {
            "stage": "rl",
            "model": {"path": str(self.folder / "small")},
            "data": {"source": str(self.folder / "rows.jsonl")},
            "rollout": {
                "engine": "vllm",
                "prompts_per_step": 2,
                "group_size": 4,
                "max_new_tokens": 24,
                "vllm": {"enforce_eager": True, "max_model_len": 420},
                **rollout,
            },
            "rewards": [{"use": str(self.folder / "rewards.py:digits")}],
            "corrections": [{"use": "tis"}],
            "scoring": {"workers": 1},
            "optim": {"lr": 2e-3},
            "run": {"steps": STEPS, "save_every": 2, "keep_checkpoints": 9},
        }
        with self.opened(name, resume=resume) as directory:
            rl.run(load_dict(values, base_dir=self.folder, where="test").recipe, directory)  # type: ignore[arg-type]
        return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_metrics(directory.path)]

    def largest_gap(self) -> float:
        """Return the largest |engine - trainer| log-prob difference of the newest run's tokens, each under the weights
        of its version."""
        gaps = []
        for r in (r for rollouts in self.taken for r in rollouts):
            ids, start = torch.tensor([r.prompt.ids + r.ids]), len(r.prompt.ids) - 1
            for version in set(r.versions):
                with torch.no_grad(), eval_mode(self.weights[version]):
                    logp = self.weights[version](input_ids=ids).logits[0, start:-1].float().log_softmax(-1)
                expected = logp.gather(-1, ids[0, start + 1 :, None]).squeeze(-1)
                mine = torch.tensor(r.versions) == version
                gaps.append(float((torch.tensor(r.logps) - expected)[mine].abs().max()))
        return max(gaps)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, opened: Any) -> Iterator[Runs]:
    tokenizer = tiny.build_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        )
    )  # fmt: skip
    model.save_pretrained(tmp_path / "small")
    tokenizer.save_pretrained(tmp_path / "small")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{i}+{i}="}) + "\n" for i in range(24)))
    (tmp_path / "rewards.py").write_text(REWARDS)
    made = Runs(monkeypatch, tmp_path, opened)
    try:
        yield made
    finally:
        if made.close is not None:
            made.close()


def test_tokens_have_the_log_prob_of_their_weights(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for staleness in (0, 1, 4):
        straight = runs.run(f"stale {staleness}", staleness=staleness)
        expected = [{max(0, t - staleness)} for t in range(STEPS)]
        assert [{v for r in rollouts for v in r.versions} for rollouts in runs.taken] == expected
        assert runs.largest_gap() < 1e-4
        assert all((row["mismatch/max"] > 1e-3) == (row.get("rollout/staleness", 0) > 0) for row in straight)
        assert all(row["updates"] == 1 for row in straight)

    ids = [r.ids for rollouts in runs.taken for r in rollouts]
    assert runs.run("in turns", staleness=4, apart=False) == straight, "drawn before the updates, not beside them"
    assert [r.ids for rollouts in runs.taken for r in rollouts] == ids

    for step in (4, 6, STEPS):
        shutil.rmtree(checkpoints.folder_for(tmp_path / "stale 4" / "checkpoints", step))
    assert runs.run("stale 4", staleness=4, resume=True) == straight

    start_after_updates(runs.engine, monkeypatch, staleness=4)
    mixed = runs.run("partial", staleness=4, partial=True, max_new_tokens=400)
    assert sum(row["rollout/mixed_versions"] for row in mixed) > 0
    assert max(len(set(r.versions)) for rollouts in runs.taken for r in rollouts) > 1
    assert runs.largest_gap() < 1e-4


def start_after_updates(engine: Any, monkeypatch: pytest.MonkeyPatch, *, staleness: int) -> None:
    """Delay the start of rollouts, except the first step's, to the end of the update: the next sync, which waits for
    that, then comes in their middle."""
    update, generate_batch, sync = rl.update, engine.generate_batch, engine.sync
    ended, begun = ([threading.Event() for _ in range(STEPS)] for _ in range(2))
    calls = itertools.count()

    def updating(ctx: Any, batch: Any, sequences: Any, step: int, rows_of: Any) -> Any:
        found = update(ctx, batch, sequences, step, rows_of)
        ended[step].set()
        return found

    def generating(batch: Any) -> Any:
        begun_in = next(calls) - staleness
        assert begun_in <= 0 or ended[begun_in].wait(60)
        begun[max(begun_in, 0)].set()
        return generate_batch(batch)

    def syncing(model: Any, version: int) -> None:
        step = version - 1  # generates rollouts of step + staleness, if there is such a step
        if step > 0 and step + staleness < STEPS:
            assert begun[step].wait(60)
            time.sleep(0.1)  # some tokens
        sync(model, version)

    monkeypatch.setattr(engine, "sync", syncing)
    monkeypatch.setattr(rl, "update", updating)
    monkeypatch.setattr(engine, "generate_batch", generating)
