"""Prompt variants: additions to a prompt or answer are present, are trained on only where intended, and runs resume
exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from posttrain.batch import Rollout, RolloutBatch, Variant
from posttrain.train import collect, rl, variants
from posttrain.train.collate import Sequences
from posttrain.variants.help import hint_length
from posttrain.variants.solutions import cut_tokens, prefix_tokens
from posttrain.variants.templates import prune_population

Values = dict[str, Any]

REWARDS = '''
def digits(completion, token_count):
    """Share of tokens that are digits: it differs between the completions of an untrained model."""
    return sum(c.isdigit() for c in completion) / max(token_count, 1)

def rarely(completion):
    return float(completion[:1].isdigit())

def never(completion):
    return 0.0

def always(completion):
    return 1.0
'''


class Seen:
    """Records what each step trained on, as passed to the update."""

    def __init__(self) -> None:
        self.rollouts: list[list[Rollout]] = []
        self.batches: list[RolloutBatch] = []
        self.sequences: list[Sequences] = []

    def rows(self) -> list[tuple[Rollout, RolloutBatch, list[int]]]:
        """(rollout, batch of one row, token ids of the trained pass) of every row of every step."""
        found = []
        for rollouts, batch, sequences in zip(self.rollouts, self.batches, self.sequences, strict=True):
            for n, rollout in enumerate(rollouts):
                found.append((rollout, batch.select([n]), sequences.ids[n].tolist()))
        return found


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found, update, batch_of = Seen(), rl.update, rl.batch_of

    def batched(ctx: Any, rollouts: list[Rollout], state: Any) -> RolloutBatch:
        found.rollouts.append(list(rollouts))
        return batch_of(ctx, rollouts, state)

    def updated(ctx: Any, batch: RolloutBatch, sequences: Sequences, *rest: Any) -> Any:
        found.batches.append(batch.to("cpu"))
        found.sequences.append(sequences)
        return update(ctx, batch, sequences, *rest)

    monkeypatch.setattr(rl, "batch_of", batched)
    monkeypatch.setattr(rl, "update", updated)
    return found


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(REWARDS)
    with (tmp_path / "rows.jsonl").open("w") as file:
        for i in range(24):
            solution = f"add {i} and {i}, carry\nso it is\n{2 * i}"
            row = {"prompt": f"{i}+{i}=" + "?" * (i % 3), "answer": str(2 * i), "solution": solution, "hint": "carry"}
            file.write(json.dumps(row) + "\n")
    return tmp_path


def values_of(reward: str = "digits", **changes: Any) -> Values:
    return {
        "stage": "rl",
        "model": {"path": "tiny"},
        "data": {"source": "rows.jsonl"},
        "rollout": {"prompts_per_step": 5, "group_size": 4, "max_new_tokens": 8},
        "rewards": [
            {"use": f"rewards.py:{reward}", "correct": True},
            *([{"use": "rewards.py:digits", "weight": 0.1}] if reward != "digits" else []),  # so that there is a signal
        ],
        "scoring": {"workers": 1, "correct_at": 0.25},
        "optim": {"lr": 1e-3},
        "run": {"steps": 3, "save_every": 2, "samples_per_step": 20},
        **changes,
    }


@pytest.fixture
def ran(cli: Any, home: Path) -> Callable[..., list[Values]]:
    """Return a function that runs three steps of a recipe through the command line and returns their metrics."""

    def run(values: Values, name: str = "run", *options: str) -> list[Values]:
        (home / f"{name}.yaml").write_text(json.dumps(values))  # JSON is YAML
        cli.run("rl", str(home / f"{name}.yaml"), "--output", str(home / name), *options)
        return cli.rows_of(home / name)

    return run


def solution_of(rollout: Rollout) -> str:
    return str(rollout.prompt.row["solution"])


def test_hints_are_added_to_failed_groups_and_not_trained_on(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """GHPO: hinted rows keep the prompt that they were sampled from, groups with a right rollout are never hinted, and
    the loss has no token of the prompt."""
    metrics = ran(values_of(algorithm="ghpo"))
    assert any(row.get("variants/hint 0.25/share", 0) > 0 for row in metrics)
    groups: dict[tuple[int, int], list[Rollout]] = {}
    for step, rollouts in enumerate(seen.rollouts):
        for rollout in rollouts:
            groups.setdefault((step, rollout.group), []).append(rollout)
    assert all(len(rows) == 4 and len({r.variant.name for r in rows if r.variant}) == 1 for rows in groups.values())
    for rollout, batch, ids in seen.rows():
        assert rollout.variant is not None
        hint = "For reference" in rollout.prompt.text
        assert hint == rollout.variant.hinted == bool(batch.hinted)
        assert ids == [*rollout.prompt.ids, *rollout.ids]
        assert int(batch.mask.sum()) == len(rollout.sampled_ids) == len(rollout.ids)
        assert rollout.prompt.row["answer"] not in rollout.prompt.text.partition("reference")[2]
        if hint:  # the earlier stage had no right rollout, otherwise this stage would not have been sampled
            ratio = rollout.variant.note["ratio"]
            assert solution_of(rollout).rpartition("\n")[0][: round(ratio * 10)] in rollout.prompt.text


def test_hint_with_braces_is_not_formatted() -> None:
    """Nor is a question that contains a field name in braces."""
    variant = Variant("hint", user="{prompt}\n\nHint: {hint} {other}", fills={"hint": "print '{prompt}' and {hint}"})
    assert variant.ask("What does {hint} do?") == ("What does {hint} do?\n\nHint: print '{prompt}' and {hint} {other}")
    assert Variant().ask("{prompt}?") == "{prompt}?"


def test_groups_with_a_right_rollout_are_never_hinted(ran: Callable[..., list[Values]], seen: Seen) -> None:
    ran(values_of("always", algorithm="ghpo", run={"steps": 1}))
    assert {r.variant.name for r in seen.rollouts[0] if r.variant} == {"plain"}


def test_rollouts_replaced_by_hinted_ones_are_in_the_ledger(
    ran: Callable[..., list[Values]], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rollout is ever right: each group is sampled plain and with two hints, and every sampled token is counted."""
    sampled: list[int] = []
    sample_prompts = collect.sample_prompts

    def sample_and_count(*args: Any, **how: Any) -> list[Rollout]:
        found = sample_prompts(*args, **how)
        sampled.append(sum(len(r.sampled_ids) for r in found))
        return found

    monkeypatch.setattr(collect, "sample_prompts", sample_and_count)
    hints = {"use": "hint_on_failure", "ratios": [0.3, 0.6]}
    (row,) = ran(values_of("never", prompt_variants=hints, run={"steps": 1}))
    assert len(sampled) == 3 and row["rollout/replaced_tokens"] == sum(sampled[:2]) > 0
    tokens = json.loads((home / "run" / "summary.json").read_text())["ledger"]["tokens"]
    assert sum(tokens.values()) == sum(sampled) and tokens["replaced"] == sum(sampled[:2])


def test_no_hint_before_its_first_step(ran: Callable[..., list[Values]], seen: Seen) -> None:
    variants = {"use": "hint_on_failure", "ratios": [0.5], "start_step": 1}
    ran(values_of("never", prompt_variants=variants, run={"steps": 2, "max_idle_steps": 5}))
    named = [{r.variant.name for r in rollouts if r.variant} for rollouts in seen.rollouts]
    assert named == [{"plain"}, {"hint 0.5"}]


def test_shortest_sufficient_prefix_is_stored(ran: Callable[..., list[Values]], seen: Seen, home: Path) -> None:
    """POPE: guided and plain groups side by side; no group mixes both; the result of a probe is in the checkpoint."""
    ran(values_of(algorithm="pope", run={"steps": 4, "save_every": 4}))
    names = {r.variant.name for rollouts in seen.rollouts for r in rollouts if r.variant}
    assert "plain" in names and any(name.startswith("prefix ") for name in names)
    memory = json.loads((home / "run" / "checkpoints" / "step-00000004" / "state.json").read_text())["memory"]
    probed = {r.prompt.uid for rollouts in seen.rollouts for r in rollouts if r.variant and r.variant.hinted}
    assert set(memory["solution_prefix"]) == probed
    for rollout, batch, ids in seen.rows():
        assert ("Here is the first part" in rollout.prompt.text) == bool(batch.hinted)
        assert ids[: len(rollout.prompt.ids)] == list(rollout.prompt.ids)
        assert int(batch.mask.sum()) == len(rollout.ids)


def test_trace_prefix_is_masked_but_rewarded(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """PrefixRL: the answer starts inside the trace; rewards read the whole text, the loss has only the new tokens."""
    ran(values_of(algorithm="prefixrl"))
    rows = [(r, b, ids) for r, b, ids in seen.rows() if r.variant and r.variant.hinted]
    assert 0.4 < len(rows) / len(seen.rows()) < 0.95
    for rollout, batch, ids in rows:
        cut = rollout.variant.note["cut"] if rollout.variant else 0
        assert rollout.text.startswith(solution_of(rollout)[:4])
        assert cut >= 1 and list(rollout.prompt.ids[-cut:]) == list(rollout.variant.begin)  # type: ignore[union-attr]
        assert len(ids) == len(rollout.prompt.ids) + len(rollout.sampled_ids) and len(rollout.sampled_ids) <= 8
        assert int(batch.mask.sum()) == len(rollout.sampled_ids) and not bool(batch.hint_mask.any())  # type: ignore[union-attr]


def test_loss_does_not_depend_on_log_probs_of_a_prefix() -> None:
    torch.manual_seed(0)
    rollout_batch = RolloutBatch(
        group_ids=torch.tensor([0]),
        mask=torch.tensor([[False, False, True, True]]),
        advantages=torch.tensor([1.0]),
    )
    from posttrain.loss.reinforce import reinforce

    logp = -torch.rand(1, 4)
    moved = logp.clone()
    moved[:, :2] -= 5.0
    assert torch.equal(reinforce(rollout_batch, logp).values, reinforce(rollout_batch, moved).values)


OWN = '''
from posttrain.batch import Variant

def loudly(asked, *, times: int = 1):
    """Shouts at every other prompt."""
    if asked.rounds:
        return []
    return [Variant("loud", user="{prompt}" + "!" * times)] if int(asked.row["answer"]) % 4 else [Variant()]

class Counting:
    """Counts how often a prompt was drawn."""
    def __init__(self, *, word: str = "visit"):
        self.word = word
    def plan(self, asked):
        seen = (asked.memory or {}).get(asked.uid, 0)
        return [] if asked.rounds else [Variant(f"{self.word} {min(seen, 2)}", system=f"{self.word} {seen}")]
    def learn(self, memory, outcomes):
        counts = dict(memory or {})
        for outcome in outcomes:
            counts[outcome.uid] = counts.get(outcome.uid, 0) + 1
        return counts

def broken(asked):
    return asked.no_such_thing

def endless(asked):
    return [Variant()]
'''


def test_user_defined_function(ran: Callable[..., list[Values]], seen: Seen, home: Path) -> None:
    (home / "own.py").write_text(OWN)
    ran(values_of(prompt_variants={"use": "./own.py:loudly", "times": 3}))
    texts = {r.variant.name: r.prompt.text for rollouts in seen.rollouts for r in rollouts if r.variant}
    assert "!!!" in texts["loud"] and "!" not in texts["plain"]


def test_user_defined_class_learns_and_resumes_exactly(cli: Any, home: Path) -> None:
    (home / "own.py").write_text(OWN)
    values = values_of(prompt_variants={"use": "./own.py:Counting"}, run={"steps": 20, "save_every": 10})
    values["rollout"]["max_new_tokens"] = 3
    (home / "run.yaml").write_text(json.dumps(values))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"))
    assert rows[0]["variants/visit 0/share"] == 1.0 and rows[-1]["variants/visit 2/share"] > 0


@pytest.mark.parametrize(
    ("variants", "said"),
    [
        ({"use": "./own.py:broken"}, "no_such_thing"),
        ({"use": "./own.py:endless"}, "asks for more than 32 rounds"),
        ({"use": "./own.py:loudly", "time": 3}, "loudly has no argument time"),
        ({"use": "hint_on_failure", "solution": "answered"}, "reads the column `answered`, and the data has none"),
        ({"use": "hint_on_failure", "ratio": [0.5]}, "ratio"),
        ({"use": "hint_on_falure"}, "hint_on_failure"),
    ],
)
def test_incompatible_settings_are_refused(cli: Any, home: Path, variants: Values, said: str) -> None:
    (home / "own.py").write_text(OWN)
    values = values_of(prompt_variants=variants)
    values["rollout"]["max_new_tokens"] = 2
    (home / "run.yaml").write_text(json.dumps(values))
    assert said in cli.refused("rl", str(home / "run.yaml"), "--output", str(home / "run"))


def test_variants_that_do_not_fit_are_refused(cli: Any, home: Path) -> None:
    for changes, said in (
        ({"opponent": {"samples": 1}, "group_rewards": ["versus_opponent"]}, "the opponent answers"),
        ({"tools": [{"use": "calculator"}], "algorithm": "prefixrl"}, "start of the answer"),
    ):
        values = {**values_of(prompt_variants={"use": "trace_prefix"}), **changes}
        (home / "run.yaml").write_text(json.dumps(values))
        assert said in cli.refused("recipe", "validate", str(home / "run.yaml"))


def test_stale_rollouts_keep_their_prompts_in_checkpoints(cli: Any, home: Path) -> None:
    values = values_of(
        prompt_variants={"use": "hint_on_failure"}, run={"steps": 4, "save_every": 2}, corrections=[{"use": "tis"}]
    )
    values["rollout"] |= {"staleness": 1, "max_new_tokens": 4}
    (home / "run.yaml").write_text(json.dumps(values))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=4)
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    assert any(key.startswith("variants/hint") for row in rows[2:] for key in row)  # of rollouts kept by the checkpoint


def test_hint_length_follows_the_fit_and_hints_are_masked(
    ran: Callable[..., list[Values]], seen: Seen, home: Path
) -> None:
    """SEELE: rounds of one group start with a part of the solution; the policy loss has only the sampled tokens."""
    values = values_of(algorithm="seele", run={"steps": 2, "save_every": 2})
    values["prompt_variants"] = {"use": "item_response", "rounds": 3}
    metrics = ran(values)
    assert all(row["hint_nll"] > 0 for row in metrics)
    for rollout, batch, ids in seen.rows():
        assert rollout.variant is not None and batch.hint_mask is not None
        begin = len(rollout.variant.begin)
        assert rollout.segments[0].kind == "injected" if begin else rollout.segments[0].kind == "model"
        assert solution_of(rollout).startswith(rollout.text[: min(begin, 5)])
        assert batch.hint_mask[0].nonzero()[:, 0].tolist() == list(range(begin))
        assert int(batch.mask.sum()) == len(rollout.sampled_ids) and not bool((batch.mask & batch.hint_mask).any())
        assert ids == [*rollout.prompt.ids, *rollout.variant.begin, *rollout.sampled_ids]
    for rollouts in seen.rollouts:
        assert all(len([r for r in rollouts if r.group == g]) == 12 for g in {r.group for r in rollouts})
        first = [r for r in rollouts if r.variant and r.variant.name == "round 1"]
        assert all(len(r.variant.begin) == len(r.prompt.row["solution"]) - 1 or len(r.variant.begin) > 3 for r in first)  # type: ignore[union-attr]
    memory = json.loads((home / "run" / "checkpoints" / "step-00000002" / "state.json").read_text())["memory"]
    uids = {r.prompt.uid for rollouts in seen.rollouts for r in rollouts}
    assert memory["item_response"].keys() == uids and all(0 <= p <= 1 for p in memory["item_response"].values())


def test_adhint_trains_hint_tokens_with_non_negative_weights(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """Half of a group is plain; hint tokens are in the mask, with a weight of at most 1, and 0 in rows with a negative
    advantage."""
    ran(values_of(algorithm="adhint"))
    hinted = [(r, b) for r, b, _ in seen.rows() if r.variant and r.variant.hinted]
    assert 0 < len(hinted) <= len(seen.rows()) / 2
    for rollout, batch in hinted:
        assert batch.advantages is not None and batch.hint_mask is not None and batch.external is not None
        begin = len(rollout.variant.begin)  # type: ignore[union-attr]
        assert rollout.segments[0].kind == "given" and torch.equal(batch.external, batch.hint_mask)
        assert int(batch.mask.sum()) == begin + len(rollout.sampled_ids)
        own = float(batch.advantages[0, begin])
        shown = batch.advantages[0, :begin]
        assert bool((shown == 0).all()) if own <= 0 else bool(((shown >= 0) & (shown <= own + 1e-6)).all())


def test_guide_trains_without_the_hint_with_the_ratio_to_the_hinted_prompt(
    ran: Callable[..., list[Values]], seen: Seen
) -> None:
    """Failed groups are sampled again with a hint; log-probs are under the plain prompt, old log-probs under the hinted
    prompt; the loss shapes the ratio."""
    values = values_of("rarely", algorithm="guide_grpo")
    values["rewards"], values["rollout"] = values["rewards"][:1], {**values["rollout"], "group_size": 8}
    metrics = ran(values)
    hinted = [(r, b, ids) for r, b, ids in seen.rows() if r.variant and r.variant.hinted]
    assert hinted and any(row.get("guide/shaped", 0) > 0 for row in metrics)
    for rollout, batch, ids in hinted:
        assert "Hint: carry" in rollout.prompt.text and rollout.loss_ids is not None and rollout.group >= 10_000_000
        assert ids == [*rollout.loss_ids, *rollout.ids] and len(rollout.loss_ids) < len(rollout.prompt.ids)
        assert batch.old_logp is not None and batch.rollout_logp is not None
        own = batch.mask
        assert torch.allclose(batch.old_logp[own], batch.rollout_logp[own], atol=1e-4)  # of the prompt with the hint
    for rollout, _, ids in seen.rows():
        if rollout.variant and not rollout.variant.hinted:
            assert ids == [*rollout.prompt.ids, *rollout.ids]


def test_guided_retries_are_trained_on_without_their_guidance(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """Agent-RLVR: failed tasks are retried with guidance in the prompt; the training pass reads the plain prompt."""
    values = values_of("rarely", algorithm="agent_rlvr")
    values["prompt_variants"] = {"use": "guided_retry", "guidance": "hint"}
    ran(values)
    guided = [(r, ids) for r, _, ids in seen.rows() if r.variant and r.variant.name == "guided"]
    assert guided
    for rollout, ids in guided:
        assert "Guidance for another one" in rollout.prompt.text
        assert rollout.loss_ids is not None and ids[: len(rollout.loss_ids)] == list(rollout.loss_ids)
        mates = [r for rows in seen.rollouts for r in rows if r.group == rollout.group]
        assert {r.variant.name for r in mates if r.variant} == {"plain", "guided"} or len(mates) > 8


def test_template_is_sampled_per_group_with_its_rule(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """Prompt augmentation: one template per group, rendered into the prompt; its rule reaches the reward."""
    values = values_of(algorithm="prompt_augmentation")
    values["rewards"].append({"use": "templates.augmented"})
    ran(values)
    groups = {(n, r.group): r for n, rollouts in enumerate(seen.rollouts) for r in rollouts}
    for n, rollouts in enumerate(seen.rollouts):
        assert all(r.variant == groups[n, r.group].variant for r in rollouts)
    names = {r.variant.name for r in groups.values() if r.variant}
    assert len(names) > 3
    for rollout in (r for rollouts in seen.rollouts for r in rollouts):
        assert rollout.variant is not None
        rule, form = rollout.prompt.row["template"], rollout.scores["augmented"]
        assert (
            form == 1.0 if rule == "free" else form is not None and form < 1.0
        )  # the tiny model writes hardly any tags
        assert rollout.prompt.text.endswith(rollout.variant.prefill)


def test_prior_prompt_uses_one_instruction_for_the_whole_run(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """The style's instruction is in every prompt, and none of its tokens is trained on."""
    values = values_of(prompt_variants={"use": "prior_instruction", "style": "planning"})
    values["rewards"].append({"use": "templates.prior", "weight": 0.5, "params": {"style": "planning"}})
    ran(values)
    rows = seen.rows()
    assert len(rows) > 1
    for rollout, batch, _ in rows:
        assert "<plan>" in rollout.prompt.text and int(batch.mask.sum()) == len(rollout.sampled_ids)


def test_instruction_population_evolves(ran: Callable[..., list[Values]], seen: Seen, home: Path) -> None:
    """INSPO: members are sampled by weight, which follows rewards; pruned members are replaced by candidates."""
    own = {"use": "instructions", "pool": ["one", "two", "three", "four"], "candidates": ["five", "six", "seven"]}
    own |= {"evolve_every": 2, "temperature": 1.0}
    ran(values_of(prompt_variants=own, run={"steps": 4, "save_every": 2}))
    before, after = (
        json.loads((home / "run" / "checkpoints" / f"step-0000000{n}" / "state.json").read_text())["memory"]
        for n in (2, 4)
    ) if (home / "run" / "checkpoints" / "step-00000002").exists() else (None, None)  # fmt: skip
    assert before is not None and after is not None
    members = [text for _, text, _ in before["instructions"]["members"]]
    assert members[0] == "one" and len(members) == 4 and {"five", "six"} < set(members)
    assert "seven" in [text for _, text, _ in after["instructions"]["members"]]
    assert any(weight > 0 for *_, weight in after["instructions"]["members"])
    shown = {r.variant.system for rollouts in seen.rollouts for r in rollouts if r.variant}
    assert len(shown) > 2 and all(
        r.variant.system in r.prompt.text
        for rollouts in seen.rollouts
        for r in rollouts
        if r.variant and r.variant.system
    )


def test_examples_are_solved_rollouts_of_the_run(ran: Callable[..., list[Values]], seen: Seen) -> None:
    """XRPO: solved rollouts are stored; a prompt on which every rollout failed gets one before its question."""
    values = values_of("rarely", algorithm="xrpo_icl_seeding", run={"steps": 6})
    ran(values)
    solved: set[str] = set()
    helped = 0
    for rollouts in seen.rollouts:
        for rollout in rollouts:
            if rollout.variant and rollout.variant.name == "examples":
                helped += 1
                assert "Here are solved problems" in rollout.prompt.text
                shown = set(rollout.variant.note["examples"])
                assert shown <= solved and rollout.prompt.uid not in shown
                plain = [r for r in rollouts if r.group == rollout.group and r.variant and r.variant.name == "plain"]
                assert plain and not any(r.correct for r in plain)
        solved |= {r.prompt.uid for r in rollouts if r.correct}
    assert helped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("seele", {"round 1", "round 2", "round 3"}),
        ("guide_grpo", {"plain"}),
        ("inspo", {"instruction 0", "instruction 1"}),
        ("xrpo_icl_seeding", {"plain"}),
        ("adhint", {"plain"}),
    ],
)
def test_learned_state_resumes_exactly(cli: Any, home: Path, name: str, shown: set[str]) -> None:
    """After the resumption, prompts are of more kinds than `shown`."""
    values = values_of("rarely", algorithm=name, run={"steps": 4, "save_every": 2})
    if name == "guide_grpo":  # hints need groups without any reward
        values["rewards"], values["rollout"] = values["rewards"][:1], {**values["rollout"], "group_size": 8}
    (home / "run.yaml").write_text(json.dumps(values))
    rows = cli.resumed(home / "run", "rl", str(home / "run.yaml"), steps=4)
    assert {key.split("/")[1] for row in rows[2:] for key in row if key.startswith("variants/")} > shown


def test_inspect_and_plan_show_the_additions_of_each_kind(cli: Any, home: Path) -> None:
    (home / "run.yaml").write_text(json.dumps(values_of(algorithm="ghpo")))
    report = json.loads(cli.run("data", "inspect", str(home / "run.yaml"), "--json", "--rows", "1"))
    parts = report["samples"][0]["parts"]
    assert list(parts) == ["prompt", "plain", "hint 0.25", "hint 0.5", "hint 0.75"]
    assert "For reference" in parts["hint 0.5"]["runs"][0]["text"]
    assert {"name": "solutions", "ok": True, "text": "24 of 24 prompts have one"} in report["checks"]
    batch = json.JSONDecoder().raw_decode(cli.run("plan", str(home / "run.yaml"), "--json"))[0]["batch"]
    assert batch["longest prompt"] > batch["of these tokens a variant may add"] > 20


def test_pairs_prefer_guided_successes(cli: Any, home: Path) -> None:
    """Agent-RLVR's update: stage pairs prefers a guided success over failures, under the prompt without the
    guidance."""
    for name, template in (("first", "{prompt}"), ("guided", "{prompt}\n\nGuidance: {hint}")):
        values = {key: value for key, value in values_of("rarely").items() if key in ("model", "scoring")}
        values |= {"stage": "eval", "data": {"source": "rows.jsonl", "prompt_template": template}}
        values |= {"rewards": [{"use": "rewards.py:rarely"}], "sampling": {"max_new_tokens": 6}, "eval": {"samples": 4}}
        (home / f"{name}.yaml").write_text(json.dumps(values))
        cli.run("eval", str(home / f"{name}.yaml"), "--output", str(home / name))
    asked = {"stage": "pairs", "completions": "first", "teacher": "guided", "builder": "guided", "separability": None}
    (home / "pairs.yaml").write_text(json.dumps(asked))
    cli.run("pairs", str(home / "pairs.yaml"), "--output", str(home / "made"))
    pairs = [json.loads(line) for line in (home / "made" / "pairs.jsonl").read_text().splitlines()]
    assert pairs and all(row["chosen"][:1].isdigit() and not row["rejected"][:1].isdigit() for row in pairs)
    assert not any("Guidance" in str(row["prompt"]) for row in pairs)


@pytest.mark.parametrize("name", ["ghpo", "pope", "prefixrl", "seele", "prior_prompt", "prompt_augmentation", "inspo"])
def test_no_variant_exceeds_its_reserved_length(
    name: str, ran: Callable[..., list[Values]], seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine starts for the longest prompt plus this length, so a longer variant would end the run."""
    rooms: list[int] = []
    made = variants.PromptVariants.from_recipe

    def recording(*args: Any) -> Any:
        found = made(*args)
        rooms.append(found.room)
        return found

    monkeypatch.setattr(variants.PromptVariants, "from_recipe", recording)
    ran(values_of(algorithm=name, rewards=[{"use": "rewards.py:digits", "correct": True}]))
    longest = max(len(r.prompt.ids) + len(r.ids) for rollouts in seen.rollouts for r in rollouts)
    assert longest <= rooms[0] + 10 + 8  # the longest prompt of these rows, and max_new_tokens


def test_shares_of_a_length_are_exact() -> None:
    """0.29 * 100 is less than 29, and 0.07 * 100 more than 7, in floating point."""
    assert prefix_tokens(0.29, 100) == cut_tokens(0.29, 100) == hint_length(0.29, 100) == 29
    assert len(prune_population([1.0] * 100, 0.07)[0]) == 7
