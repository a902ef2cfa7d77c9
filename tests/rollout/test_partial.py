"""Rollouts that go on across a sync: what was sampled stays, each token has its version and that version's log-prob."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from posttrain.batch import Prompt, Rollout
from posttrain.models.load import LoadedModel
from posttrain.recipe.rollout_sections import EngineSection, Sampling
from posttrain.rollout.engine import Completion, as_rollouts, make_engine
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.partial import Gate, complete
from posttrain.rollout.pushed import Request
from posttrain.train.collate import rollout_batch
from posttrain.train.rl_metrics import age_metrics

SAMPLED = Sampling(temperature=0.7, max_new_tokens=12)


def scripted(pauses: Sequence[int], asked: list[list[Request]]) -> Any:
    """Writes 10, 11, 12, ... behind every prompt, log-prob -(the token), until position 6; in round k it is paused
    after pauses[k] tokens, in a round behind those never."""

    def ask(requests: Sequence[Request], seed: int, done: Any) -> list[list[Completion]]:
        del seed
        limit = pauses[len(asked)] if len(asked) < len(pauses) else 99
        asked.append(list(requests))
        found = []
        for at, r in enumerate(requests):
            start = sum(i >= 10 for i in r.ids)
            whole = range(10 + start, 10 + start + min(r.max_new_tokens, 6 - start))
            ids = tuple(whole)[:limit]
            finish = "paused" if len(ids) < len(whole) else "length"
            found.append([Completion(ids, tuple(-float(i) for i in ids), finish)] * r.n)
            if done is not None:
                done(at, found[-1])
        return found

    return ask


def test_tokens_of_three_versions() -> None:
    """Paused after 2, 0 and 1 tokens: versions 0 0 | 2 | 3 3 3, in order, no token twice; the other prompt has 0 0."""
    requests = [Request(5, (1, 2), 2, 0, 6, True), Request(6, (3,), 1, 0, 2, True)]
    versions, asked, told = iter(range(9)), list[list[Request]](), []
    found = complete(
        scripted([2, 0, 1], asked),
        Gate(),
        lambda: next(versions),
        requests,
        seed=1,
        done=lambda place, samples: told.append((place, len(samples))),
    )
    want = Completion(tuple(range(10, 16)), tuple(-float(i) for i in range(10, 16)), "length", (0, 0, 2, 3, 3, 3))
    assert found[0] == [want, want]
    assert found[1] == [Completion((10, 11), (-10.0, -11.0), "length", (0, 0))]
    assert told == [(1, 1), (0, 2)], "once each, when it is whole"
    assert [(r.number, r.n, r.max_new_tokens, r.ids) for r in asked[2]] == [
        (10, 1, 4, (1, 2, 10, 11)),
        (11, 1, 4, (1, 2, 10, 11)),
    ]
    seeds = [r.seed for turn in asked[1:] for r in turn]
    assert len(set(seeds)) == len(seeds), "two samples, or two rounds, draw alike"
    prompts = [Prompt("a", {}, "", (1, 2)), Prompt("b", {}, "", (3,))]

    class Decoder:
        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return ["" for _ in rows]

    rollouts = as_rollouts(prompts, 2, found[0], Decoder(), first_group=0, version=7)
    rollouts += as_rollouts(prompts[1:], 1, found[1], Decoder(), first_group=1, version=7)
    assert [r.version for r in rollouts] == [0, 0, 0] and rollouts[2].segments[0].versions is None
    batch = rollout_batch(rollouts)
    assert batch.versions is not None and batch.versions.tolist()[1] == [0, 0, 2, 3, 3, 3]
    ages = age_metrics(batch, 4)  # 14 tokens: 6 of age 4, 2 of 2, 6 of 1
    assert ages == {"rollout/staleness": 4.0, "rollout/token_age": 34 / 14, "rollout/mixed_versions": 2 / 3}


def test_a_pause_that_comes_too_early_is_asked_for_again() -> None:
    gate, heard, began = Gate(), [], threading.Event()
    third = threading.Event()

    def round_of_generation() -> None:
        with gate.generating():
            began.set()
            assert third.wait(10)

    thread = threading.Thread(target=round_of_generation)
    thread.start()
    assert began.wait(10)

    def pause() -> None:
        heard.append(1)
        if len(heard) == 3:
            third.set()

    with gate.syncing(pause):
        thread.join(10)
        assert len(heard) >= 3 and not thread.is_alive()
        later = threading.Thread(target=round_of_generation)
        began.clear()
        later.start()
        assert not began.wait(0.1), "a round began beside the sync"
    later.join(10)
    assert not later.is_alive()


def logps_of(model: Any, r: Rollout, temperature: float) -> list[float]:
    row = torch.tensor([r.prompt.ids + r.ids])
    with torch.no_grad():
        logp = (model(input_ids=row).logits[0, :-1].float() / temperature).log_softmax(-1)
    chosen = logp.gather(-1, row[0, 1:, None]).squeeze(-1)
    return chosen[len(r.prompt.ids) - 1 :].tolist()


def test_in_the_middle_of_a_call(
    serving: ModuleType, loaded: LoadedModel, prompts: list[Prompt], tmp_path: Path
) -> None:
    """The real server, two of them: the first 4 tokens are those of version 0, with its log-probs; the others are drawn
    by version 1, which has read all of them."""
    ones = [serving.Served(), serving.Served()]
    urls = [one.url for one in ones]
    section = EngineSection.model_validate({"engine": "vllm", "vllm": {"server": {"urls": urls}}})
    engine: Any = make_engine(section, loaded, scratch=tmp_path, max_len=64)
    before = TransformersEngine(loaded, batch_size=64).generate(prompts, 3, SAMPLED, seed=5)
    old = copy.deepcopy(loaded.model)
    for one in ones:
        one.core.cut = 4
    found: list[Rollout] = []
    told: list[str] = []
    drawing = threading.Thread(
        target=lambda: found.extend(
            engine.generate(prompts, 3, SAMPLED, seed=5, done=lambda rows: told.append(rows[0].prompt.uid))
        )
    )
    drawing.start()
    with torch.no_grad():
        for p in loaded.model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.05)
    engine.sync(loaded.model, 1)
    drawing.join(20)
    engine.close()
    assert [r.prompt.uid for r in found] == [r.prompt.uid for r in before] and engine.version == 1
    assert sorted(told) == sorted(p.uid for p in prompts)
    assert any(r.ids[4:] != b.ids[4:] for r, b in zip(found, before, strict=True))
    for r, b in zip(found, before, strict=True):
        assert r.ids[:4] == b.ids[:4] and r.version == 0
        assert r.versions == ((0,) * 4 + (1,) * 12)[: len(r.ids)]
        theirs = logps_of(old, r, 0.7)[:4] + logps_of(loaded.model, r, 0.7)[4:]
        assert max(abs(x - y) for x, y in zip(r.logps, theirs, strict=True)) < 1e-4
        assert (r.finish == "stop") == (r.ids[-1] in loaded.eos_ids) and len(r.ids) <= 12
