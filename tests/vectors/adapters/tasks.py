"""Task generators: their rewards, and how their difficulty follows the policy."""

from mechanics import call, parts, reading
from model_modes import listed, records
from step_modes import through

from posttrain.curriculum import dials
from posttrain.data.tasks import sat as sat_task
from posttrain.verify import maze, qa, sat

SATURN = "formulas k l n responses stages val_pass threshold"  # what its parts read
SCALER = (
    "age_scale alpha batch beta cap d_max history_len k max_limit mode slope_scale target zero_limit acc_history age d "
    "d_history results"
)

ADAPTERS = {
    "ariadne": records(
        maze.maze_reward,
        {
            "path_reward": "path_reward",
            "action_format": "action_format",
            "tag_format": "tag_format",
            "rewards": "reward",
        },
        names={"responses": "completion", "answers": "answer"},
    ),
    "asearcher": through(
        "asearcher",
        params={"eps_clip": ["loss.clip_low", "loss.clip_high"], "behav_cap": "corrections.0.clip_max"},
        fields={"scores": ["rewards"], "prox_logp": ["old_logp"], "old_logp": ["rollout_logp"]},
        outputs={
            "advantages": "batch.advantages",
            "loss": "loss",
            "grad_logp": "grad_logp",
            "keep": "batch.keep",
        },
        tables=["advantages"],
        flags=["keep"],
    ),
    "asearcher_reward": call(qa.asearcher_reward, {"reward": "reward", "f1": "f1", "format": "format"}),
    "saturn": parts(
        {
            "difficulty": reading(
                "n k l", listed(sat_task.difficulty, "difficulty", names={"n": "n", "k": "k", "l": "l"}), SATURN
            ),
            "reward": reading(
                "formulas responses",
                listed(sat.assignment_reward, "rewards", names={"formulas": "formula", "responses": "completion"}),
                SATURN,
            ),
            "curriculum": reading(
                "stages val_pass threshold",
                call(dials.stage_trace, {"stage": "stage", "final_stage": "final_stage"}),
                SATURN,
            ),
        }
    ),
    "scaler": parts(
        {
            "propose": reading("d batch", call(dials.propose_levels, "levels"), SCALER),
            "update": reading("d results target k cap d_max mode", call(dials.difficulty_trace, "d"), SCALER),
            "retire": reading(
                "d_history acc_history history_len d_max zero_limit max_limit",
                call(
                    dials.retirement,
                    {"retire": "retire", "slope": "slope", "zero_run": "zero_run", "max_run": "max_run"},
                ),
                SCALER,
            ),
            "weight": reading(
                "d_history age alpha beta slope_scale age_scale history_len",
                call(dials.environment_weight, "weight"),
                SCALER,
            ),
        }
    ),
}
