"""The trainer's side of vLLM without vLLM: syncs, versions, pauses, adapters, sleep. A stand-in samples."""

from __future__ import annotations

import copy
import dataclasses
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Prompt, Rollout
from posttrain.errors import EngineError
from posttrain.models import adapters
from posttrain.models.load import LoadedModel
from posttrain.recipe.engine_sections import EngineSection
from posttrain.recipe.rollout_sections import Rollout as RolloutSection
from posttrain.recipe.sampling_sections import Sampling
from posttrain.recipe.sections import Lora
from posttrain.rollout import loop, vllm_engine, vllm_start
from posttrain.rollout.engine import Completion, as_rollouts
from posttrain.rollout.hf import TransformersEngine
from posttrain.rollout.make_engine import make_engine
from posttrain.rollout.requests import Request
from posttrain.train.collate import rollout_batch
from posttrain.train.rl_metrics import age_metrics

sys.path.append(str(Path(__file__).parents[1]))
from engine_clients import TransformersClient

SAMPLED = Sampling(temperature=0.7, max_new_tokens=12)
GREEDY = Sampling(temperature=0.0, max_new_tokens=12)
Start = Callable[..., Any]


@pytest.fixture
def start(loaded: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(vllm_engine, "ColocatedClient", TransformersClient)
    monkeypatch.setattr(vllm_start, "require_vllm", lambda: None)

    def start(model: LoadedModel = loaded, **settings: Any) -> Any:
        section = EngineSection.model_validate({"engine": "vllm", "vllm": settings})
        return make_engine(section, model, scratch=tmp_path, max_len=64)

    return start


def disturb(model: Any, scale: float = 0.05) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator) * scale)


def list_weight_files(scratch: Path) -> tuple[list[str], list[Path]]:
    """Return the folders and weight files in a folder (the engine keeps its model's configuration)."""
    return [path.name for path in scratch.iterdir()], [*scratch.rglob("*.safetensors")]


def logps_of(model: Any, r: Rollout, temperature: float) -> list[float]:
    row = torch.tensor([r.prompt.ids + r.ids])
    with torch.no_grad():
        logp = (model(input_ids=row).logits[0, :-1].float() / temperature).log_softmax(-1)
    chosen = logp.gather(-1, row[0, 1:, None]).squeeze(-1)
    return chosen[len(r.prompt.ids) - 1 :].tolist()


def test_weights_are_sent_by_the_transfer(start: Start, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Greedy completions equal the trainer's before and after an update; no weights are written to disk."""
    engine = start()
    client, other = engine.clients[0], TransformersEngine(loaded, batch_size=8)
    for version in range(2):
        found = engine.generate(prompts, 2, GREEDY, seed=0)
        assert [r.ids for r in found] == [r.ids for r in other.generate(prompts, 2, GREEDY, seed=0)]
        assert {r.version for r in found} == {version} and engine.gap < 1e-6
        disturb(loaded.model)
        assert engine.probe(loaded.model) > 0.05, "a skipped sync goes unseen"
        engine.sync(loaded.model, version + 1)
    assert client.told == ["pause", "update", "resume"] * 3
    assert list_weight_files(engine.scratch) == (["engine-model"], [])
    engine.close()


@pytest.mark.parametrize("merged", [False, True])
def test_adapters_are_synced_alone_or_merged(start: Start, loaded: LoadedModel, merged: bool) -> None:
    model = adapters.add(loaded.model, Lora(rank=3, alpha=6))
    lora = LoadedModel(model, loaded.tokenizer, loaded.eos_ids, loaded.pad_id, "test")
    engine = start(lora, merge_adapter=merged)
    for version in (1, 2):
        disturb(model, 0.1)
        engine.sync(model, version)
        assert engine.probe(model) < 1e-4
    told = ["update"] * 3 if merged else [f"adapter {version}" for version in range(3)]
    assert [word for word in engine.clients[0].told if word not in ("pause", "resume")] == told
    assert list_weight_files(engine.scratch) == (["engine-model"], []), "an adapter is left"
    engine.close()


def test_each_of_two_adapters_answers_its_prompts(start: Start, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """Given prompts for both adapters in one call, both engines return what each adapter generates alone, after every
    sync."""
    model = adapters.add(loaded.model, Lora(rank=3, adapters=["one", "two"]))
    lora = dataclasses.replace(loaded, model=model)
    engine, local = start(lora), TransformersEngine(lora, batch_size=3)
    disturb(model, 0.2)
    engine.sync(model, 1)
    assert engine.probe(model) < 1e-4
    given = [dataclasses.replace(prompt, adapter=("one", "two")[n % 2]) for n, prompt in enumerate(prompts)]
    expected = []
    for prompt in given:
        adapters.activate(model, prompt.adapter)
        ids = torch.tensor([prompt.ids])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12,
                             pad_token_id=loaded.pad_id)  # fmt: skip
        expected.append(tuple(out[0, len(prompt.ids) :].tolist()))
    assert all(p.requires_grad for own in adapters.parameters_by_adapter(model).values() for p in own)
    for one in (engine, local):
        assert [r.ids for r in one.generate(given, 1, GREEDY, seed=0)] == expected
    plain = local.generate(prompts, 1, GREEDY, seed=0)
    first = local.generate([dataclasses.replace(p, adapter="one") for p in prompts], 1, GREEDY, seed=0)
    assert (
        [r.ids for r in plain]
        == [r.ids for r in first]
        != [r.ids for r in local.generate([dataclasses.replace(p, adapter="two") for p in prompts], 1, GREEDY, seed=0)]
    )
    engine.close()


def test_lost_sync_stops_the_run(start: Start, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    disturb(loaded.model)

    transfer = TransformersClient.transfer

    async def lost(self: Any, call: str, info: Any = None) -> None:
        if call == "finish_weight_update":
            self.state = None
        else:
            await transfer(self, call, info)

    with monkeypatch.context() as patched:
        patched.setattr(TransformersClient, "transfer", lost)
        with pytest.raises(EngineError, match="stale engine: after syncing version 1 its log-probs"):
            engine.sync(loaded.model, 1)
    assert engine.version == 0
    engine.sync(loaded.model, 1)
    engine.close()


def test_sync_in_the_middle_of_a_call(start: Start, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """The first 4 tokens have version 0 and its log-probs; the others are sampled by version 1, which has read all of
    them. A group is reported once, when complete. No request is sent while weights are replaced."""
    engine = start()
    client = engine.clients[0]
    before = engine.generate(prompts, 3, SAMPLED, seed=5)
    old = copy.deepcopy(loaded.model)
    client.cut, client.asked = 4, []
    found: list[Rollout] = []
    told: list[str] = []
    drawing = threading.Thread(
        target=lambda: found.extend(
            engine.generate(prompts, 3, SAMPLED, seed=5, done=lambda rows: told.append(rows[0].prompt.uid))
        )
    )
    drawing.start()
    while len(client.asked) < len(prompts):
        pass
    client.cut = 0
    disturb(loaded.model)
    engine.sync(loaded.model, 1)
    drawing.join(20)
    engine.close()
    assert [r.prompt.uid for r in found] == [r.prompt.uid for r in before] and engine.version == 1
    assert sorted(told) == sorted(p.uid for p in prompts)
    assert any(r.ids[4:] != b.ids[4:] for r, b in zip(found, before, strict=True))
    for r, b in zip(found, before, strict=True):
        assert r.ids[:4] == b.ids[:4] and r.version == 0
        assert r.versions == ((0,) * 4 + (1,) * 12)[: len(r.ids)] if len(r.ids) > 4 else r.versions is None
        theirs = logps_of(old, r, 0.7)[:4] + logps_of(loaded.model, r, 0.7)[4:]
        assert max(abs(x - y) for x, y in zip(r.logps, theirs, strict=True)) < 1e-4
        assert (r.finish == "stop") == (r.ids[-1] in loaded.eos_ids) and len(r.ids) <= 12
    rest = client.asked[len(prompts) :]
    assert {r.n for r in rest} == {1} and {r.max_new_tokens for r in rest} == {8}
    assert len({r.seed for r in rest}) == len(rest), "two samples draw alike"


@pytest.mark.parametrize(
    ("sampling", "in_chunks"),
    [
        (SAMPLED, True),
        (SAMPLED.model_copy(update={"stop": ["!"]}), False),
        (RolloutSection(max_new_tokens=12), True),
        (RolloutSection(max_new_tokens=12, engine="vllm", staleness=1, partial=True), False),
    ],
    ids=["plain", "stop string", "step", "step with partial"],
)
def test_tokens_come_in_chunks_unless_they_are_needed_before_the_end(
    start: Start, prompts: list[Prompt], sampling: Sampling, in_chunks: bool
) -> None:
    """If a sync interrupted a sample within a chunk, the unsent tokens would be resampled and get a second chance to
    end: completions would be too short."""
    engine = start()
    engine.clients[0].asked = []
    engine.generate(prompts[:2], 1, sampling, seed=5)
    (asked, _) = engine.clients[0].asked
    values = vllm_start.sampling_values(sampling, asked, (1,))
    engine.close()
    assert asked.in_chunks == in_chunks == bool(values.get("extra_args"))


class Writing(TransformersClient):
    """Writes 10, 11, 12, ... after every prompt, with log-prob -(the token), until position 6; in round k it is paused
    after pauses[k] tokens, in later rounds never."""

    pauses: Sequence[int] = ()

    async def complete(self, request: Request, sampling: Sampling) -> list[Completion]:
        del sampling
        limit = self.pauses[len(self.asked)] if len(self.asked) < len(self.pauses) else 99
        self.asked.append(request)
        begin = sum(i >= 10 for i in request.ids)
        whole = range(10 + begin, 10 + begin + min(request.max_new_tokens, 6 - begin))
        ids = tuple(whole)[:limit]
        if paused := len(ids) < len(whole):
            self.under_way += 1
            await self.paused.wait()
            self.under_way -= 1
        return [Completion(ids, tuple(-float(i) for i in ids), "paused" if paused else "length")] * request.n


def test_tokens_have_the_version_of_their_round(
    start: Start, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Paused after 2, 0 and 1 tokens: versions 0 0 | 2 | 3 3 3, in order, no token twice."""
    monkeypatch.setattr(vllm_engine, "ColocatedClient", Writing)
    engine = start()
    client = engine.clients[0]
    client.pauses = (2, 0, 1)
    waiting = loop.submit(engine.complete(Request(5, (1, 2), 1, 7, 6, True), SAMPLED))
    for version in (1, 2, 3):
        while len(client.asked) < version:
            pass
        engine.sync(loaded.model, version)
    [found] = waiting.result(10)
    assert found == Completion(
        tuple(range(10, 16)), tuple(-float(i) for i in range(10, 16)), "length", (0, 0, 2, 3, 3, 3)
    )
    assert [(r.n, r.max_new_tokens, r.ids) for r in client.asked[2:]] == [
        (1, 4, (1, 2, 10, 11)),
        (1, 3, (1, 2, 10, 11, 12)),
    ]
    assert len({r.seed for r in client.asked}) == 4, "two rounds draw alike"
    engine.close()

    class Decoder:
        def __len__(self) -> int:
            return 0

        def batch_decode(self, rows: Any, **_: Any) -> list[str]:
            return ["" for _ in rows]

    prompts = [Prompt("a", {}, "", (1, 2)), Prompt("b", {}, "", (3,))]
    short = Completion((10, 11), (-10.0, -11.0), "length", (0, 0))
    rollouts = as_rollouts(prompts[:1], 2, [found, found], Decoder(), first_group=0, version=7)
    rollouts += as_rollouts(prompts[1:], 1, [short], Decoder(), first_group=1, version=7)
    assert [r.version for r in rollouts] == [0, 0, 0] and rollouts[2].segments[0].versions is None
    batch = rollout_batch(rollouts)
    assert batch.versions is not None and batch.versions.tolist()[1] == [0, 0, 2, 3, 3, 3]
    ages = age_metrics(batch, 4)  # 14 tokens: 6 of age 4, 2 of 2, 6 of 1
    assert ages == {"rollout/staleness": 4.0, "rollout/token_age": 34 / 14, "rollout/mixed_versions": 2 / 3}


def test_generation_after_sleep_needs_a_sync(start: Start, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    engine = start(sleep=True)
    client = engine.clients[0]
    client.told.clear()
    engine.sleep()
    engine.sleep()
    with pytest.raises(EngineError, match="has dropped its weights: call sync before generate"):
        engine.generate(prompts, 1, GREEDY, seed=0)
    engine.sleep()
    with pytest.raises(EngineError, match="has dropped its weights"):
        loop.run(engine.complete(Request(0, prompts[0].ids, 1, 0, 4, True), GREEDY))
    engine.sync(loaded.model, 1)
    assert engine.generate(prompts, 1, GREEDY, seed=0)
    assert [word for word in client.told if word not in ("pause", "update", "resume")] == [
        *("sleep without weights", "wake", "sleep without weights", "wake")
    ]
    engine.close()
    assert client.told[-1] == "close"


def test_requests_are_divided_among_engines(start: Start, loaded: LoadedModel, prompts: list[Prompt]) -> None:
    """The samples do not depend on the engine. Every engine is probed: the second gets no new weights."""
    alone = [r.ids for r in start().generate(prompts, 2, SAMPLED, seed=1)]
    both = start(engines=2)
    first, second = both.clients
    assert [r.ids for r in both.generate(prompts, 2, SAMPLED, seed=1)] == alone
    assert [len(client.asked) for client in (first, second)] == [3, 3]
    both.sender.clients = [first]
    disturb(loaded.model)
    with pytest.raises(EngineError, match="stale engine"):
        both.sync(loaded.model, 1)
    both.close()
    assert first.ended and second.ended


def test_engine_failure_ends_rollouts_waiting_for_a_sync(start: Start, loaded: LoadedModel) -> None:
    """A rollout that waits for new weights gets the engine's error instead of waiting forever."""
    engine = start()

    async def close_the_gate() -> None:
        engine.open.clear()

    loop.run(close_the_gate())
    waiting = loop.submit(engine.complete(Request(0, (5, 6), 1, 0, 4, True), GREEDY))
    engine.clients[0].ended = True
    with pytest.raises(EngineError, match="has ended"):
        engine.sync(loaded.model, 1)
    with pytest.raises(EngineError, match="has ended"):
        waiting.result(10)
