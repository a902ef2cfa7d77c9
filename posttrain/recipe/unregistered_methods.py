"""Methods of the literature that nothing registered is named after: the key, command or function for them."""

from __future__ import annotations

# Name -> (what it is, recipe lines or a command).
KEYS = {
    "accel_po": (
        "Nesterov's extrapolation between rounds",
        "reference: extrapolated  # of `rounds`",
    ),
    "accuracy_capability": ("where gains of accuracy come from, by difficulty", "eval: {baseline: runs/before}"),
    "a_parl": (
        "bilevel alignment, which is not offered: what carries over is a reward model that is trained again on new "
        "comparisons between rounds of rl",
        "rounds: {count: 3}  # stages reward-model and rl; docs/self_improvement.md",
    ),
    "agent_r": (
        "paths spliced where they went wrong, with a reflection between",
        "posttrain sft sft/agent_r  # a shipped recipe",
    ),
    "arm_consensus": (
        "cheap formats of an answer, the long one only where these disagree",
        'eval: {consensus: {direct: "<ANSWER>", short: "<COT>", code: "<CODE>", long: "<LONG_COT>"}}',
    ),
    "avg_at_k": ("mean accuracy over k samples a problem", "eval: {samples: 16}  # `accuracy`"),
    "bootstrap_ci": ("intervals over problems", "eval: {bootstrap: 10000, level: 0.95}"),
    "cft": ("critiques as targets", "posttrain sft sft/critiques  # a shipped recipe"),
    "cons_at_k": ("majority vote", "eval: {samples: 16, k: [1, 16]}  # `cons@16`"),
    "contamination_check": ("were the problems seen in training?", "eval: {contamination: {}}"),
    "dereason": (
        "rows that take little reasoning for SFT, those that take much for RL",
        "data: {select: {reasoning: {part: rl}}}  # posttrain run dereason_tiny",
    ),
    "drive": (
        "RL on ever harder subsets, by pass rates that are measured again before each",
        "data: {select: {pass_rate: [{run: runs/rates, lowest: 72}]}}  # posttrain run drive_tiny",
    ),
    "drqa": (
        "chains to judge: right and concise, right and verbose, or wrong",
        "data: {source: recipes/data/concise.py:chains, size: 3000, params: {alone: runs/one, together: runs/several}}",
    ),
    "efficiency_metrics": ("accuracy for tokens, against a baseline", "eval: {baseline: runs/before, aes: [1, 3, 5]}"),
    "light_r1": (
        "a pipeline: SFT without what benchmarks have, SFT on the hardest rows, DPO, the average of checkpoints, RL on "
        "a band of pass rates",
        "posttrain run light_r1_tiny  # data.select; the DPO is `algorithm: light_r1_dpo`; docs/samplers.md",
    ),
    "lora_merge": ("fold an adapter into its model", "posttrain merge adapter.yaml  # docs/merging.md"),
    "lspo": (
        "the last step of iterated self-play in a game: the text of the best cluster over that of the worst; the game, "
        "its clusters and CFR are not offered",
        "builder: best_worst  # stage pairs, the value of a cluster as reward",
    ),
    "meds3": (
        "trees whose steps are valued by completions that go on from them: SFT on right paths, and a verifier of steps",
        "posttrain run meds3_tiny  # rollout.shape step_values; docs/rollout_shapes.md",
    ),
    "moderation_rl": (
        "label tasks: rewards that add up, label probabilities by sampling, and where returns saturate",
        'eval: {samples: 16, labels: ["yes", "no"]}  # and: posttrain report RUN --fit eval/accuracy',
    ),
    "neftune": ("noise on the input embeddings", "objective: {neftune: 5}"),
    "octothinker": ("a constant learning rate, then down", "optim: {schedule: stable_decay}"),
    "packing": ("many examples in one row", "batch: {packing: true}"),
    "pass_at_k": ("unbiased pass@k", "eval: {samples: 16, k: [1, 16]}"),
    "policy_cliff": (
        "how many problems have ties or another best answer when a reward weighs a little more",
        "eval: {samples: 8, stability: 0.1}",
    ),
    "preference_separability": (
        "does style alone tell the sides of pairs apart?",
        "separability: 0.9  # stage pairs",
    ),
    "rejection_sampling_ft": ("SFT on the right completions of an evaluation", "data: {source: accepted:runs/eval}"),
    "rm_ensemble": ("several reward models as one reward", "rewards: [{use: reward_model}]  # docs/reward_models.md"),
    "self_rewarding": ("the best judged answer over the worst", "builder: best_worst  # stage pairs"),
    "temporal_self_rewarding": (
        "the best of now over the worst of the past",
        "builder: temporal  # stage pairs",
    ),
    "thought_dropout": ("some thoughts of the demonstrations are emptied", "data: {thought_dropout: 0.5}"),
    "tool_loop_mask": ("what a tool wrote is no target", "tools: [{use: calculator}]  # always so"),
    "veripo": (
        "pairs of good answers over lucky and repetitive ones",
        "builder: after_verification  # stage pairs",
    ),
}

# Formulas that no recipe key reaches: name -> (what it is, its function).
FORMULAS = {
    "coda_advantage": ("a planner's advantage for its executors", "advantage.segments:planner_and_executors"),
    "coda_peco": ("the reward of a planner and its executors", "verify.agents:planner_executor_reward"),
    "complementary_rl": ("what experience that an extractor wrote earns", "advantage.experience:memory_rewards"),
    "dpo_token_credit": ("implicit token rewards of DPO", "loss.offline_rl:token_credit"),
    "model_soup": ("greedy and uniform soups", "merge.blends:greedy_soup"),
    "pra": ("labels of search steps", "evaluate.search:step_labels"),
    "rlac": ("a generator against a critic that names its failure", "verify.self_play:adversarial_rewards"),
    "search_self_play": ("what a proposer of tasks earns", "verify.self_play:score_proposals"),
    "t_ppo": ("advantages of unfinished rollouts", "advantage.truncated:extended_gae"),
    "urpo": ("one model as player and referee", "loss.reward_model:urpo"),
}


def lines(name: str) -> list[str]:
    """What `posttrain methods show` says of such a name, [] if it is none."""
    if name in KEYS:
        what, written = KEYS[name]
        return [f"{name}  ({what})", "", "in a recipe or on the command line:", f"  {written}"]
    if name in FORMULAS:
        what, function = FORMULAS[name]
        return [f"{name}  ({what})", "", f"a formula: posttrain.{function}; no recipe key reaches it"]
    return []
