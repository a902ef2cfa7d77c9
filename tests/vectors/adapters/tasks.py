"""Task generators: their rewards, and how their difficulty follows the policy."""

from mechanics import call
from model_modes import records
from step_modes import through

from posttrain.verify import maze, qa

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
}
