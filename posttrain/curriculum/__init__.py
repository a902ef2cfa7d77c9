"""Prompt samplers: choose the prompts of an RL step and the number of rollouts of each, from the results so far. Does
not import torch.

A sampler is a frozen dataclass with keyword-only fields (its recipe keys) and pure methods on a JSON state:

    @register("sampler", "easiest_first")
    @dataclass(frozen=True, kw_only=True)
    class EasiestFirst(Sampler):
        def propose(self, state: State, request: Request, pool: Pool) -> Plan: ...  # the prompts of a step
        def update(self, state, groups, pool, *, step, planned) -> State: ...  # the state after a step

`protocol` has the types; `difficulty`, `allocation` and `selection` have the formulas; the other modules have the
samplers. They are called by `train/prompt_sampler.py`.
"""
