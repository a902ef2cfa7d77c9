"""Terms of other tools on the command line get a hint with the right form."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from posttrain.cli.app import PANELS, app
from posttrain.cli.option_hints import no_such_command

pytestmark = pytest.mark.usefixtures("forked_workers")

TYPED = [
    ("rl debug/rl --set model.path=x", "write model.path=x, without --set"),
    ("rl debug/rl --learning_rate 1e-5", "write optim.lr=1e-5, without --"),
    ("rl debug/rl --learning-rate=1e-5", "write optim.lr=1e-5, without --"),
    ("rl debug/rl --optim.lr=1e-5", "write optim.lr=1e-5, without --"),
    ("rl debug/rl --optim-lr 1e-5", "write optim.lr=1e-5, without --"),
    ("rl debug/rl --optm.lr 1e-5", "did you mean optim.lr=1e-5?"),
    ("rl debug/rl --loss.clip_high 0.2", "write loss.clip_high=0.2, without --"),
    ("rl debug/rl --seed=3", "write run.seed=3 or data.seed=3, without --"),
    ("rl debug/rl model.path x", "write model.path=x, without a space"),
    ("rl debug/rl optim.lr = 1e-5", "write optim.lr=1e-5, without a space"),
    ("rl debug/rl optim.lr= 1e-5", "write optim.lr=1e-5, without a space"),
    ("rl debug/rl optim.lr:1e-5", "write optim.lr=1e-5"),
    ("rl debug/rl +optim.lr=1e-5", "write optim.lr=1e-5, without +"),
    ("rl debug/rl ~kl", "write kl=null, where the key may be empty"),
    ("rl debug/rl optim.betas=[0.9, 0.99]", "write 'optim.betas=[0.9, 0.99]', in quotes"),
    ("rl debug/rl actor_rollout_ref.actor.optim.lr=1e-6", "write optim.lr=1e-6"),
    ("rl debug/rl trainer.total_epochs=2", "write run.epochs=2"),
    ("rl debug/rl -o out", "write --output out"),
    ("rl debug/rl --output_dir=out", "write --output out"),
    ("rl debug/rl --num-gpus 2", "write --gpus 2"),
    ("rl debug/rl --dry_run", "write --dry-run"),
    ("rl debug/rl --resume_from_checkpoint true", "write --resume"),
    ("rl --config mine.yaml", "the recipe comes first: posttrain rl mine.yaml"),
    ("sft debug/sft --per_device_train_batch_size 4", "write `batch.size`"),
    ("dpo debug/dpo --beta 0.1", "write loss.beta=0.1, without --"),
    ("eval debug/eval --model x", "write model.path=x, without --"),
    ("merge debug/merge --out-dir x", "write --output x"),
    ("plan debug/dpo --loss.beta=3", "write loss.beta=3, without --"),
    ("reward test debug/rl --scoring.workers 3", "write scoring.workers=3, without --"),
    ("data inspect debug/rl --data.source=x", "write data.source=x, without --"),
    ("train debug/rl", "write posttrain sft, dpo or rl"),
    ("plot runs/x", "write posttrain report RUN --serve"),
    ("resume runs/x", "repeat the command of the run with --output DIRECTORY --resume"),
    ("evl debug/eval", "did you mean `posttrain eval`?"),
]


@pytest.mark.parametrize(("typed", "hint"), TYPED, ids=[typed for typed, _ in TYPED])
def test_hint_has_the_right_form(typed: str, hint: str) -> None:
    ended = CliRunner().invoke(app, typed.split(" "))
    assert ended.exit_code == 2
    assert f"\n  hint: {hint}" in ended.stderr
    assert "problems" not in ended.stderr, "one slip is told as one"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("trian", "write posttrain sft, dpo or rl"),
        ("evla", "did you mean `posttrain eval`?"),
        ("status", "write posttrain runs"),
        ("convert", "write posttrain recipe import FILE"),
        ("upload", ""),
        ("foo", ""),
    ],
)
def test_unknown_command_gets_a_sensible_hint_or_none(typed: str, hint: str) -> None:
    commands = [name for names in PANELS.values() for name in names]
    assert no_such_command(typed, commands).problems[0].hint == hint
