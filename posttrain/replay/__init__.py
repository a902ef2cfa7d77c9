"""Replay: stored rollouts of earlier steps that a step of rl trains on beside its fresh ones. No torch.

A kind is a frozen dataclass with keyword-only fields (its recipe keys) and pure methods on rows, fresh and stored:

    @register("replay", "success")
    @dataclass(frozen=True, kw_only=True)
    class Success(Replay):
        def replace(self, fresh, stored, request) -> dict[int, int]: ...  # fresh rows that give way to stored ones
        def store(self, fresh, stored, request) -> Stock: ...  # what is stored after the step

`protocol` has the types, the other modules the kinds. `train/replay.py` calls them and keeps the rollouts.
"""
