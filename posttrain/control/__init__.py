"""Controllers: change a number of the recipe over a run, by step or by metrics. Do not import torch.

A controller is a frozen dataclass with keyword-only fields (its recipe keys) and three pure methods on a JSON state:

    @register("controller", "adaptive_kl", paper="1909.08593")
    @dataclass(frozen=True, kw_only=True)
    class AdaptiveKl:
        target: float = 6.0
        def start(self, initial: float) -> dict: ...  # state before step 0; initial: the recipe's number
        def value(self, state: dict, step: int) -> float: ...  # the number to use in step 0, 1, ...
        def update(self, state: dict, metrics: Mapping, step: int) -> dict: ...  # state after that step's metrics

A field `total_steps` of None means the length of the run.
"""
