"""Task generators: their rewards, and how their difficulty follows the policy."""

from mechanics import call
from model_modes import records

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
    "asearcher_reward": call(qa.asearcher_reward, {"reward": "reward", "f1": "f1", "format": "format"}),
}
