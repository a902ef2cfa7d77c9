"""The same numbers as TRL 1.16 where TRL has the method: its own code and ours on the same rollouts.

TRL's advantages are computed inside `GRPOTrainer._generate_and_score_completions` and its loss in `_compute_loss`. Both
run here unchanged; completions come from its `rollout_func`, rewards from columns of the data, and a subclass hands out
log-probs. TRL keeps rewards in float32, hence the tolerances.

Where the two differ on purpose, a test below measures the difference:

- `dapo`: TRL has its loss; groups without a signal stay in its batch. Here they leave (`keep`).
- Equal rewards: rounding may leave TRL a tiny deviation, divided by eps; here the advantage is exactly 0.
- `dapo` and `cispo` with several updates a generation batch: TRL divides each by the mean number of tokens of all
  updates, here each divides by its own.
- KL: TRL weighs k3 by the ratio unless `use_bias_correction_kl` is off; here that is `kl.use: k3_is`, `k3` is without
  it. With the ratio of a sequence (`gspo`) TRL weighs by that, `k3_is` by the token's own.
- RLOO with `mask_truncated`: the reward of a truncated row contains its KL here, not in TRL.
- Log-ratios beyond +-20 are cut off here; TRL lets them overflow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from posttrain.batch import RolloutBatch
from posttrain.models import tiny
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.objective import Objective
from posttrain.verify.score import combine
from tests.preset_objectives import preset_objective

GROUPS, SIZE, LIMIT = 4, 4, 10
ROWS = GROUPS * SIZE
LENGTHS = (3, 1, 6, 2, 5, 5, 1, 4, 2, 6, 3, 3, 4, 2, 6, 3)
CUT = (2, 9)  # rows without an end of text
WEIGHTS = {"right": 1.0, "short": 0.5}
# Two rewards by row: mixed groups, one that is equal throughout (the second), rows without the second reward, and one
# without any.
REWARDS: dict[str, list[float | None]] = {
    "right": [1, 0, 0, 1, 1, 1, 1, 1, 0, None, 1, 0, 0, 0, 1, 0],
    "short": [0.5, 0, 0.25, 1, 0.5, 0.5, 0.5, 0.5, 1, None, 0.25, None, 0, 0.5, None, 0.75],
}

# method -> TRL's settings; ours are the preset of the same name
METHODS: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none"},
    "bnpo": {"loss_type": "bnpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "vespo": {"loss_type": "vespo"},
    "gmpo": {"epsilon": 0.4},  # `trl.experimental.gmpo`
    "gdpo": {"loss_type": "grpo", "multi_objective_aggregation": "normalize_then_sum"},
    "lite_ppo": {"loss_type": "dapo", "scale_rewards": "batch"},
}
OURS: dict[str, dict[str, Any]] = {"dapo": {"keep": []}}  # TRL does not filter
SPREAD = {"gspo": 1e-3, "luspo": 1e-2, "cispo": 1.0, "gmpo": 1.0}  # of the log-ratios
METHOD = pytest.mark.parametrize("method", METHODS)

Trainer = Any
Made = Callable[..., Trainer]


def completions(tokenizer: Any) -> list[list[int]]:
    """Return token ids of all rows; all rows except CUT end with EOS."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(20, len(tokenizer), (n,), generator=draw).tolist() for n in LENGTHS]
    return [row if i in CUT else [*row[:-1], tokenizer.eos_token_id] for i, row in enumerate(rows)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Factory of TRL trainers on `tiny` with fixed rollouts, and log-probs that a test sets as `trainer.logps`."""
    pytest.importorskip("trl")
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    model, tokenizer = tiny.build(0)
    done = completions(tokenizer)

    class FixedLogps:
        logps: Tensor | None = None  # None: the model's log-probs
        entropy: Tensor | None = None  # None: zeros

        def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
            if self.logps is None:
                return super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
            return self.logps, torch.zeros_like(self.logps) if self.entropy is None else self.entropy, None

    class Grpo(FixedLogps, GRPOTrainer): ...  # type: ignore[misc]

    class Gmpo(FixedLogps, GMPOTrainer): ...  # type: ignore[misc]

    def fixed_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
        sampled = getattr(trainer, "sampled", None)  # log-probs of the engine
        rows = None if sampled is None else [row[:n].tolist() for row, n in zip(sampled, LENGTHS, strict=True)]
        return {"prompt_ids": ids, "completion_ids": done, "logprobs": rows}

    def reward(name: str) -> Callable[..., list[float | None]]:
        def column(**columns: Any) -> list[float | None]:
            return columns[name]

        column.__name__ = name
        return column

    folder = tmp_path_factory.mktemp("trl")

    def make(method: str, **changes: Any) -> Trainer:
        settings = {
            "per_device_train_batch_size": ROWS,
            "steps_per_generation": 1,
            "gradient_accumulation_steps": 1,
            "num_generations": SIZE,
            "max_completion_length": LIMIT,
            "reward_weights": list(WEIGHTS.values()),
            **METHODS[method],
            **changes,
        }
        trainer = (Gmpo if method == "gmpo" else Grpo)(
            model=model,
            args=GRPOConfig(output_dir=str(folder), report_to=[], use_cpu=True, bf16=False, **settings),
            reward_funcs=[reward(name) for name in WEIGHTS],
            train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
            processing_class=tokenizer,
            rollout_func=fixed_rollouts,
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = settings["gradient_accumulation_steps"]
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")  # `rollout_func` may change; a new TRL fails here first
        yield make


def rows_of_data(rewards: dict[str, list[float | None]]) -> list[dict[str, Any]]:
    return [{"prompt": f"{i // SIZE}+1=", **{name: values[i] for name, values in rewards.items()}} for i in range(ROWS)]


def score_with_trl(trainer: Trainer, rewards: dict[str, list[float | None]] = REWARDS) -> dict[str, Tensor]:
    """Return TRL's batch with its advantages; log-probs from elsewhere are added by `with_logps`."""
    return trainer._generate_and_score_completions(rows_of_data(rewards))


def our_batch(rewards: dict[str, list[float | None]] = REWARDS) -> RolloutBatch:
    """Return the same rollouts as our batch."""
    groups = [i // SIZE for i in range(ROWS)]
    total = combine(rewards, WEIGHTS, dict.fromkeys(WEIGHTS, "ignore_component"), groups)

    def column(values: list[float | None]) -> Tensor:
        return torch.tensor([float("nan") if v is None else v for v in values], dtype=torch.float64)

    return RolloutBatch(
        group_ids=torch.tensor(groups),
        mask=torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None],
        rewards=column(total),
        components={name: column(values) for name, values in rewards.items()},
        reward_weights=WEIGHTS,
        correct=column(rewards["right"]),
        truncated=torch.tensor([i in CUT for i in range(ROWS)]),
    )


def logps(method: str) -> dict[str, Tensor]:
    """new, old and ref log-probs [N,T]; new and old are so far apart that some tokens are clipped and some are not."""
    draw = torch.Generator().manual_seed(2)
    new, old, ref = (torch.randn((3, ROWS, max(LENGTHS)), generator=draw, dtype=torch.float64)).unbind()
    return {"new": new - 3, "old": new - 3 + SPREAD.get(method, 0.3) * old, "ref": new - 3 + 0.5 * ref}


def noise() -> Tensor:
    """Return normal random numbers [N,T]."""
    return torch.randn((ROWS, max(LENGTHS)), generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def trl_step(
    trainer: Trainer, batch: dict[str, Tensor], given: dict[str, Tensor], beta: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Compute TRL's loss and its gradient by log-prob. beta is set only now: otherwise the trainer would load a
    reference model.
    """
    trainer.beta = beta
    trainer.logps = given["new"].clone().requires_grad_()
    inputs = {**batch, "old_per_token_logps": given["old"], "ref_per_token_logps": given["ref"]}
    loss = trainer._compute_loss(trainer.model, inputs)
    (gradient,) = torch.autograd.grad(loss, trainer.logps)
    return loss.detach(), gradient


def our_step(objective: Objective, batch: RolloutBatch, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Compute our loss and its gradient by log-prob."""
    new = given["new"].clone().requires_grad_()
    assigned = objective.compute_advantages(batch.replace(old_logp=given["old"], ref_logp=given["ref"]))
    loss, _ = objective.loss(assigned, new, objective.totals(assigned))
    (gradient,) = torch.autograd.grad(loss, new)
    return loss.detach(), gradient


def ours(method: str, **changes: Any) -> Objective:
    return preset_objective(method, rollout={"max_new_tokens": LIMIT}, **{**OURS.get(method, {}), **changes})


def part(values: dict[str, Tensor], rows: slice) -> dict[str, Tensor]:
    return {name: v[rows] if v.dim() else v for name, v in values.items()}


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.double(), rtol=2e-5, atol=1e-6)


@METHOD
def test_advantages_match_trl(made: Made, method: str) -> None:
    expected = score_with_trl(made(method))["advantages"]
    found = ours(method).compute_advantages(our_batch()).advantages
    assert found is not None and (expected != 0).sum() >= 8
    assert_close(found, expected)


@METHOD
@pytest.mark.parametrize("kl", ["none", "k3", "k3_is"])
def test_loss_and_gradient_match_trl(made: Made, method: str, kl: str) -> None:
    """Off-policy, with and without KL; `k3_is` is TRL's default (`use_bias_correction_kl`), `k3` is without it.

    A KL also has a gradient for rows without an advantage.
    """
    if kl == "k3_is" and method in ("gspo", "luspo"):
        pytest.skip("TRL weighs a token's KL by the ratio of its sequence, we by its own")
    if kl == "k3_is" and method == "gmpo":
        pytest.skip("TRL's GMPO has k3 alone")
    beta = 0.0 if kl == "none" else 0.5
    trainer, given = made(method, use_bias_correction_kl=kl == "k3_is"), logps(method)
    batch, rows = score_with_trl(trainer), our_batch()
    expected, by_logp = trl_step(trainer, batch, given, beta)
    found, ours_by_logp = our_step(ours(method, kl={"coef": beta, **({"use": kl} if beta else {})}), rows, given)
    assert_close(found, expected)
    assert_close(ours_by_logp, by_logp)
    if not beta and method not in (
        "cispo",
        "sapo",
        "vespo",
    ):  # the case is not trivial: some tokens are clipped, others are not
        signal = rows.mask & (batch["advantages"] != 0)[:, None]
        assert (by_logp[signal] == 0).any() and (by_logp[signal] != 0).any()


@METHOD
def test_masking_of_truncated_rows_matches_trl(made: Made, method: str) -> None:
    """TRL's `mask_truncated_completions`: truncated rows lose their tokens and stay in the row count."""
    trainer, given = made(method, mask_truncated_completions=True), logps(method)
    batch = score_with_trl(trainer)
    expected, by_logp = trl_step(trainer, batch, given)
    found, ours_by_logp = our_step(ours(method, loss={"mask_truncated": True}), our_batch(), given)
    if method == "gmpo":  # TRL's rows without tokens have ratio 1: -A in the value, and no gradient
        expected = expected + batch["advantages"][list(CUT)].sum() / ROWS
    assert_close(found, expected)
    assert_close(ours_by_logp, by_logp)
    assert (by_logp[list(CUT)] == 0).all()


@METHOD
def test_accumulation_over_micro_batches_matches_trl(made: Made, method: str) -> None:
    """Four micro-batches of four rows: TRL's accumulated loss equals ours, with TRL's denominators and with ours."""
    parts = [slice(i, i + SIZE) for i in range(0, ROWS, SIZE)]
    settings = {"gradient_accumulation_steps": 4, "steps_per_generation": 4, "per_device_train_batch_size": SIZE}
    trainer, given = made(method, **settings), logps(method)
    batch = score_with_trl(trainer)
    steps = [trl_step(trainer, part(batch, rows), part(given, rows)) for rows in parts]
    objective = ours(method)
    assigned = objective.compute_advantages(our_batch().replace(old_logp=given["old"], ref_logp=given["ref"]))
    totals = objective.totals(assigned)
    for rows, (expected, by_logp) in zip(parts, steps, strict=True):
        new = given["new"][rows].clone().requires_grad_()
        loss, _ = objective.loss(assigned.select(range(ROWS)[rows]), new, totals)
        assert_close(loss.detach(), expected)
        assert_close(torch.autograd.grad(loss, new)[0], by_logp)


def test_two_sided_clip(made: Made) -> None:
    """TRL's `delta` is our `dual_clip`."""
    trainer, given = made("grpo", delta=1.5), logps("cispo")
    expected, by_logp = trl_step(trainer, score_with_trl(trainer), given)
    found, ours_by_logp = our_step(ours("grpo", loss={"dual_clip": 1.5}), our_batch(), given)
    assert_close(found, expected)
    assert_close(ours_by_logp, by_logp)
    plain, _ = our_step(ours("grpo"), our_batch(), given)
    assert not torch.isclose(found, plain)


@pytest.mark.parametrize("method", ["grpo", "gspo", "cispo", "sapo", "luspo", "bnpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("clip_min", [None, 0.6])
def test_correction_of_the_engine_matches_trl(
    made: Made, method: str, level: str, mode: str, clip_min: float | None
) -> None:
    """TRL's `vllm_importance_sampling_*`, on rollouts whose log-probs of the engine differ from the trainer's."""
    trainer, given = made(method), logps(method)
    trainer.sampled = given["old"] + 0.4 * noise()
    trainer.use_vllm, trainer._last_loaded_step, trainer.logps = True, 0, given["old"]  # step 0: there is no vLLM
    trainer.vllm_importance_sampling_correction, trainer.vllm_importance_sampling_mode = True, f"{level}_{mode}"
    trainer.vllm_importance_sampling_clip_max, trainer.vllm_importance_sampling_clip_min = 1.5, clip_min
    batch = score_with_trl(trainer)
    weights = batch["importance_sampling_ratio"]
    assert (weights == (1.5 if mode == "truncate" else 0.0)).any() and weights.unique().numel() > 3
    expected, by_logp = trl_step(trainer, batch, given)
    entry = {"use": "tis", "level": level, "mode": mode, "clip_max": 1.5, "clip_min": clip_min}
    rows = our_batch().replace(rollout_logp=trainer.sampled)
    found, ours_by_logp = our_step(ours(method, corrections=[entry]), rows, given)
    assert_close(found, expected)
    assert_close(ours_by_logp, by_logp)


@pytest.mark.parametrize("method", ["grpo", "dapo", "gspo", "cispo", "vespo"])
def test_masks_of_rows_and_tokens_match_trl(made: Made, method: str) -> None:
    """TRL's `off_policy_mask_threshold` and `top_entropy_quantile`, with a KL term that they leave on all tokens."""
    beta = 0.0 if method == "gspo" else 0.5
    trainer, given = made(method, off_policy_mask_threshold=0.05, top_entropy_quantile=0.5), logps(method)
    given["old"] = given["new"] + 0.3 * noise()
    batch = score_with_trl(trainer)
    trainer.entropy = noise().abs().float()
    expected, by_logp = trl_step(trainer, batch, given, beta)
    objective = ours(
        method,
        corrections=[{"use": "off_policy_seq_mask", "threshold": 0.05}],
        select=[{"use": "high_entropy_tokens", "rho": 0.5}],
        kl={"coef": beta, **({"use": "k3_is"} if beta else {})},
    )
    rows = our_batch().replace(rollout_logp=given["old"], entropy=trainer.entropy)
    found, ours_by_logp = our_step(objective, rows, given)
    assert_close(found, expected)
    assert_close(ours_by_logp, by_logp)


@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_matches_trl(beta: float, normalize: bool, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    model, tokenizer = tiny.build(0)
    done, given = completions(tokenizer), logps("rloo")
    given["old"] = given["new"] + 0.05 * noise()

    class Rloo(RLOOTrainer):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, model: Any, *_: Any, **__: Any) -> Any:
            known = given["ref"] if model is self.ref_model else self.logps
            return known, torch.zeros_like(known), None

        def _generate(self, prompts: list[str]) -> Any:
            return tokenizer(prompts)["input_ids"], done, [""] * ROWS

    settings = {"per_device_train_batch_size": ROWS, "num_generations": SIZE, "max_completion_length": LIMIT}
    trainer: Any = Rloo(
        model=model,
        args=RLOOConfig(
            output_dir=str(tmp_path), report_to=[], use_cpu=True, bf16=False, beta=0.0,
            normalize_advantages=normalize, **settings,
        ),
        reward_funcs=lambda right, **_: right,
        train_dataset=Dataset.from_list([{"prompt": "1+1="}]),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.beta, trainer.ref_model, trainer.logps = beta, object(), given["old"]
    trainer.model.train()
    rewards = {"right": REWARDS["right"]}
    batch = trainer._generate_and_score_completions(rows_of_data(rewards))
    trainer.logps = given["new"].clone().requires_grad_()
    expected = trainer._compute_loss(trainer.model, batch)
    kl = {"use": "k1", "coef": beta, "where": "reward"} if beta else {"coef": 0.0}
    objective = preset_objective("rloo", rollout={"max_new_tokens": LIMIT}, kl=kl, advantage={"normalize": normalize})
    rows = our_batch().replace(
        rewards=torch.tensor([float("nan") if r is None else r for r in rewards["right"]], dtype=torch.float64)
    )
    assigned = objective.compute_advantages(rows.replace(old_logp=given["old"], ref_logp=given["ref"]))
    assert assigned.advantages is not None
    assert_close(assigned.advantages, batch["advantages"])
    found, by_logp = our_step(objective, rows, given)
    assert_close(found, expected.detach())
    assert_close(by_logp, torch.autograd.grad(expected, trainer.logps)[0])


@pytest.mark.parametrize("method", ["grpo", "gspo", "dapo"])
def test_parameter_gradients_match_trl(made: Made, method: str) -> None:
    """Only the rollouts are fixed: both sides compute log-probs from the model, on-policy; all parameters' gradients
    are compared.
    """
    trainer = made(method)
    batch, model = score_with_trl(trainer), trainer.model
    assert "old_per_token_logps" not in batch
    names, weights = zip(*model.named_parameters(), strict=True)
    expected = torch.autograd.grad(trainer._compute_loss(model, batch), weights)

    prompts, tokens = batch["prompt_ids"].tolist(), batch["completion_ids"].tolist()
    rows = [(*p, *c[:n]) for p, c, n in zip(prompts, tokens, LENGTHS, strict=True)]
    logp, _ = completion_logprobs(model, Sequences(tuple(rows), tuple(map(len, prompts))), max(LENGTHS))
    objective = ours(method)
    assigned = objective.compute_advantages(our_batch())
    found = torch.autograd.grad(objective.loss(assigned, logp, objective.totals(assigned))[0], weights)
    assert max(float(g.abs().max()) for g in expected) > 1e-3
    for name, a, b in zip(names, found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


# --- where the two differ ---


def test_dapo_drops_groups_without_a_signal(made: Made) -> None:
    """The preset filters, as the paper does: the second group's 15 tokens leave the denominator of the same sum."""
    trainer, given = made("dapo"), logps("dapo")
    expected, by_logp = trl_step(trainer, score_with_trl(trainer), given)
    found, ours_by_logp = our_step(preset_objective("dapo"), our_batch(), given)
    tokens = sum(LENGTHS)
    assert sum(LENGTHS[SIZE : 2 * SIZE]) == 15
    assert_close(found * (tokens - 15), expected * tokens)
    assert_close(ours_by_logp * (tokens - 15), by_logp * tokens)


def test_equal_rewards_have_zero_advantage(made: Made) -> None:
    """0.1 + 0.5 * 0.4 in every row: exactly 0 here; TRL's may be rounding over eps, at most some thousandths."""
    equal: dict[str, list[float | None]] = {"right": [0.1] * ROWS, "short": [0.4] * ROWS}
    found = ours("grpo").compute_advantages(our_batch(equal)).advantages
    assert found is not None and (found == 0).all()
    assert score_with_trl(made("grpo"), equal)["advantages"].abs().max() < 5e-3


@pytest.mark.parametrize("method", ["dapo", "cispo"])
def test_several_updates_have_their_own_denominators(made: Made, method: str) -> None:
    """One generation batch for two updates: TRL divides each by half of all tokens, we by the tokens of the update."""
    half = slice(0, ROWS // 2)
    settings = {"steps_per_generation": 2, "per_device_train_batch_size": ROWS // 2}
    trainer, given = made(method, **settings), logps(method)
    expected, _ = trl_step(trainer, part(score_with_trl(trainer), half), part(given, half))
    objective = ours(method)
    update = objective.compute_advantages(our_batch().replace(old_logp=given["old"])).select(range(ROWS)[half])
    found, _ = objective.loss(update, given["new"][half], objective.totals(update))
    own, mean = sum(LENGTHS[half]), sum(LENGTHS) / 2
    assert own != mean
    assert_close(found * own, expected * mean)


def test_huge_ratios_stay_finite(made: Made) -> None:
    """A token 800 nats more likely than before, in a row with a negative advantage: TRL's loss is infinite."""
    trainer, given = made("grpo"), logps("grpo")
    given["old"][1, 0] = given["new"][1, 0] - 800
    expected, _ = trl_step(trainer, score_with_trl(trainer), given)
    found, by_logp = our_step(ours("grpo"), our_batch(), given)
    assert expected.isinf() and found.isfinite() and by_logp.isfinite().all()
