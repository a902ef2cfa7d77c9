"""Text rewards, and what agents earn by call, step and turn."""

from agent_modes import by_rows, episodes, masked_rollouts
from mechanics import call, on_batch
from step_modes import each

from posttrain.advantage import meta, thinking_modes
from posttrain.control import stages
from posttrain.data import tool_loop
from posttrain.loss import reinforce
from posttrain.verify import agents, bleu, boxes, code, efficiency, language, qa, reasoning, sql, structured

ADAPTERS = {
    "otc_reward": on_batch(
        thinking_modes.tool_ledger,
        {
            "rewards": "rewards",
            "r_tool": "tool_reward",
            "optimal_calls": "optimal_calls",
            "productivity": "productivity",
        },
        fields={
            "tool_calls": "components.tool_calls",
            "base_reward": "rewards",
            "best_so_far": "columns.fewest_calls",
        },
        start={"best": "fewest_calls"},
        by_prompt=["best_so_far"],
        tables=["rewards", "r_tool"],
    ),
    "reasoning_sql": call(
        sql.sql_reward,
        {
            "reward": "reward",
            "execution": "execution",
            "judge": "judge",
            "syntax": "syntax",
            "schema": "schema",
            "ngram": "ngram",
        },
    ),
    "rl_struct": call(
        structured.json_reward,
        {
            "reward": "reward",
            "validity": "validity",
            "format": "format",
            "structure": "structure",
            "content": "content",
        },
    ),
    "bleuberi": call(bleu.reference_bleu, "reward"),
    "bleuberi_select": call(bleu.choose, "kept"),
    "ansf1": call(qa.answer_f1, {"reward": "reward", "precision": "precision", "recall": "recall"}),
    "cm2_checklist": by_rows(
        meta.turn_terms,
        {"advantages": "advantages", "turn_advantages": "turns"},
        tables=["turn_scores", "reached", "failed"],
        back=["turn_advantages"],
        names={"turn_scores": "scores", "turn_id": "turn_ids"},
    ),
    "cm2_turn_score": call(agents.turn_score, "score"),
    "craft_qa": call(
        qa.traced_answer,
        {"reward": "reward", "format": "format", "answer": "answer", "citation": "citation", "judge": "judge"},
    ),
    "acre": call(
        reasoning.shuffled_consistency,
        {"reward": "reward", "second_original": "second_original", "consistent": "consistent"},
    ),
    "taco_tac": call(
        reasoning.think_answer_consistency,
        {"reward": "reward", "conclusion": "conclusion", "consistent": "consistent"},
    ),
    "reseek": call(qa.reseek, {"reward": "reward", "outcome": "outcome", "judge": "judge"}),
    "search_r1": call(qa.search_r1, {"reward": "reward", "score": "score", "valid": "valid", "retrieved": "retrieved"}),
    "search_r2": each({"rewards": qa.density_reward, "process": qa.usefulness}, depth="cell", over="outcome", names={}),
    "srpo_reflection": call(
        reasoning.reflection, {"reward": "reward", "format": "format", "accuracy": "accuracy", "length": "length"}
    ),
    "rlvmr": episodes(
        agents.episode_steps,
        agents.meta_rewards,
        agents.tag_numbers,
        meta.meta_terms,
        params={"w": "weight", "norm_std": "norm_std", "eps": "eps"},
    ),
    "dianjin": call(reasoning.format_and_accuracy, {"reward": "reward", "format": "format", "accuracy": "accuracy"}),
    "code_exec": call(code.code_reward, {"reward": "reward", "passed": "passed"}),
    "mle_partial_credit": call(agents.submission_reward, {"reward": "reward", "matched": "matched"}),
    "partial_credit": each(
        {"rewards": agents.partial_credit},
        depth="row",
        over="valid",
        names={},
    ),
    "visual_rft_iou": call(
        boxes.box_reward,
        {"reward": "reward", "iou": "iou", "confidence": "confidence", "format": "format"},
    ),
    "apc": call(agents.persona_faithfulness, {"reward": "reward", "per_statement": "per_statement"}),
    "critique_rl": call(reasoning.critique, {"reward": "reward", "judged_right": "judged_right"}),
    "repetition_penalty": call(efficiency.repetition_penalty, "reward"),
    "language_consistency": call(language.language_share, "reward"),
    "tool_loop_mask": masked_rollouts(tool_loop.layout, reinforce.reinforce, "token_mean"),
    "scaling_inter": each({"max_turns": stages.equal_stage}, depth="row", over="steps", names={"steps": "number"}),
}
