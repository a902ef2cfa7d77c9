"""Replay: trains on stored rollouts of earlier steps in addition to fresh ones. Does not import torch.

A kind is a frozen dataclass with keyword-only fields (its recipe keys) and pure methods on rows, fresh and stored:

    @register("replay", "success")
    @dataclass(frozen=True, kw_only=True)
    class Success(Replay):
        def replace(self, fresh, stored, request) -> dict[int, int]: ...  # fresh rows to replace with stored ones
        def store(self, fresh, stored, request) -> Stock: ...  # the store after the step

`protocol` has the types, the other modules the kinds. `train/replay.py` calls them and stores the rollouts.
"""
