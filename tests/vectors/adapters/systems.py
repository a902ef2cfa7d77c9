"""Formulas of systems whose rollouts are chunks, cuts, trees or roles."""

from agent_modes import over_rollouts, scalar_loss
from mechanics import call, on_tensors, parts, reading
from replay_modes import into_groups, without_ages
from shape_modes import chunked_loss

from posttrain.advantage import anytime, experience, segments, truncated
from posttrain.replay import buffer, success
from posttrain.rollout import tree
from posttrain.shapes import chunks
from posttrain.verify import agents, self_play

DELETHINK = (  # what its parts read
    "query chunks keep_head keep_tail logp old_logp rollout_logp mask trajectory advantages eps_low eps_high clip_c "
    "tis_cap"
)
DEEPSEARCH = (
    "c parent depth value visits terminal nll lambda1 lambda2 lambda3 max_depth use_uncertainty paths floor status "
    "node_value group final temp q_max"
)
MEDS3 = "base c rule unvisited child_values child_visits closed depth own_value parent_visits value visits"
REPLAY = "alpha capacity mean_max std_max success_min advantages buffer pick rewards uids"
COMPLEMENTARY = "cooldown diversity_lambda power guided last_step memory recent retrieve_count rewards step train_count"


ADAPTERS = {
    "brpo": on_tensors(
        anytime.budget_relative,
        {"cot_advantages": "thought", "summary_advantages": "answers"},
        names={"summary_scores": "scores"},
    ),
    "s_grpo": call(anytime.exit_decay, {"rewards": "rewards", "advantages": "advantages"}),
    "t_ppo": on_tensors(
        truncated.extended_gae,
        {
            "advantages": "advantages",
            "policy_mask": "policy_mask",
            "value_targets": "value_targets",
            "value_mask": "value_mask",
        },
    ),
    "supo": over_rollouts(
        segments.shared_advantages,
        {"rollout_advantages": "rollouts", "weight": "weight", "segment_advantages": "rows"},
        tables={"rewards": "rewards", "segments": "row_counts", "finished": "finished"},
        counts="segments",
        back=["rollout_advantages", "weight"],
    ),
    "coda_advantage": over_rollouts(
        segments.planner_and_executors,
        {"planner_advantages": "rollouts", "executor_advantages": "rows"},
        tables={"rewards": "rewards", "executors": "executors"},
        counts="executors",
        back=["planner_advantages"],
    ),
    "coda_peco": call(
        agents.planner_executor_reward,
        {
            "reward": "reward",
            "f1": "f1",
            "planner_format": "planner_format",
            "executor_format": "executor_format",
            "refine": "refine",
        },
    ),
    "delethink": parts(
        {
            "carryover": reading(
                "query chunks keep_head keep_tail", call(chunks.chunk_prompts, "next_prompts"), DELETHINK
            ),
            "loss": reading(
                "logp old_logp rollout_logp mask trajectory advantages eps_low eps_high clip_c tis_cap",
                scalar_loss(chunked_loss),
                DELETHINK,
            ),
        }
    ),
    "deepsearch": parts(
        {
            "uct": reading("c parent value visits terminal", call(tree.uct_scores, "score"), DEEPSEARCH),
            "frontier": reading(
                "parent depth value visits terminal nll lambda1 lambda2 lambda3 max_depth use_uncertainty",
                call(tree.frontier, {"score": "score", "best": "best"}),
                DEEPSEARCH,
            ),
            "backup": reading(
                "parent depth value visits paths floor",
                call(tree.back_up, {"value": "value", "visits": "visits"}),
                DEEPSEARCH,
            ),
            "pick_terminal": reading("status nll", call(tree.pick_terminal, "picked"), DEEPSEARCH),
            "advantages": reading(
                "node_value group final temp q_max", call(tree.step_advantages, "advantages"), DEEPSEARCH
            ),
        }
    ),
    "meds3": parts(
        {
            "num_simulations": reading("depth base", call(tree.simulation_counts, "num_simulations"), MEDS3),
            "ucb": reading("parent_visits value visits closed c unvisited", call(tree.child_scores, "score"), MEDS3),
            "backup": reading("own_value child_values child_visits rule", call(tree.node_value, "value"), MEDS3),
        }
    ),
    "replay_success": parts(
        {
            "inject": reading(
                "rewards uids buffer pick capacity std_max mean_max success_min",
                into_groups(success.Success, success.choose_successes),
                REPLAY,
            ),
            "ssb": reading("advantages alpha", without_ages(buffer.selective_buffer, "probs"), REPLAY),
        }
    ),
    "complementary_rl": parts(
        {
            "advantages": reading("rewards guided", call(experience.subgroup_advantages, "advantages"), COMPLEMENTARY),
            "memory_reward": reading(
                "rewards guided memory", call(experience.memory_rewards, "memory_reward"), COMPLEMENTARY
            ),
            "weight": reading(
                "train_count last_step step cooldown power",
                call(experience.extractor_weights, "weight"),
                COMPLEMENTARY,
            ),
            "rerank": reading(
                "retrieve_count recent diversity_lambda",
                call(experience.rerank, {"order": "order", "scores": "scores"}),
                COMPLEMENTARY,
            ),
        }
    ),
    "rlac": call(self_play.adversarial_rewards, {"generator": "generator", "critic": "critic"}),
    "search_self_play": call(
        self_play.score_proposals,
        {"success_rate": "success_rate", "proposer_rewards": "proposer_rewards"},
    ),
}
