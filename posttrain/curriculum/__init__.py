"""Prompt samplers: which prompts a step of rl draws and how many rollouts each gets, from what was seen so far. No
torch.

A sampler is a frozen dataclass with keyword-only fields (its recipe keys) and pure methods on a JSON state:

    @register("sampler", "easiest_first")
    @dataclass(frozen=True, kw_only=True)
    class EasiestFirst(Sampler):
        def propose(self, state: State, request: Request, pool: Pool) -> Plan: ...  # the prompts of a step
        def update(self, state, groups, pool, *, step, planned) -> State: ...  # the state after a step

`protocol` has the types, `difficulty`, `allocation` and `selection` the formulas, the other modules the samplers.
`train/prompt_sampler.py` is who calls them.
"""
