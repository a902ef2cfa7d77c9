"""Log-probs and gradient norms of architecture families with sharded weights on two processes, against whole weights.

See ranked.py, test_tensor_split.py and test_vision_families.py.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from families import family

from posttrain.models import load
from posttrain.models.images import probe_image
from posttrain.recipe.sections import Model, Parallel
from posttrain.train import data_parallel, distributed, optim, sharding
from posttrain.train.collate import Sequences
from posttrain.train.logprobs import completion_logprobs
from posttrain.train.mesh import expert_mesh, weight_mesh

ROWS = Sequences(((5, 6, 7, 8, 9), (11, 12, 13), (21, 22, 23, 24, 25, 26, 27)), (2, 1, 3))


def compare(key: str, kinds: list[str]) -> None:
    """Raise AssertionError for families of `kinds` whose results with `model.parallel: {key: 2}` differ."""
    wrong = []
    with distributed.join_process_group():
        parallel = Parallel(**{key: 2})
        data_parallel.set_model_parallel_size(1, parallel.tensor)
        for kind in kinds:
            model = family(kind)
            whole = copy.deepcopy(model)
            expected = measure(whole)
            sharding.shard(model, weight_mesh(parallel, 2, "cpu"), None, set(), expert_mesh(parallel, 2, "cpu"))
            gap = float((measure(model) - expected).abs().max())
            norm = float(optim.clip_gradients(model, None))
            norm /= parallel.expert  # these ranks run the same rows here, and sum their gradients
            if gap > 1e-5 or abs(norm / float(optim.clip_gradients(whole, None)) - 1) > 2e-6:
                wrong.append(kind)
        assert not wrong, wrong


def measure(model: Any, rows: Sequences = ROWS, reader: Any = None) -> Any:
    """Return log-probs; adds the gradient of their sum to the weights' gradients."""
    logp, _ = completion_logprobs(model, rows, 4, reader=reader)
    logp.sum().backward()
    return logp.detach()


def compare_vision_families(root: str, kinds: list[str]) -> None:
    """Raise AssertionError for vision models in `root/KIND` whose halves compute something else than the whole model.
    Rank 0 has a row with an image, rank 1 one without; then neither has an image."""
    wrong = []
    with distributed.join_process_group():
        for kind in kinds:
            section = Model(path=str(Path(root) / kind), vision="all")
            whole = load.load(section, Path(root), training=True)
            assert whole.images is not None
            seen = whole.tokenizer(f"a{whole.images.read(probe_image()).text}bcd")["input_ids"]
            rows = Sequences((seen, ROWS.ids[0]), (len(seen) - 2, 2), ((probe_image(),), ()))
            half = sharding.load(section.model_copy(update={"parallel": Parallel()}), Path(root), seed=0)
            for chosen in ([0, 1], [1, 1]):
                expected = [measure(whole.model, rows.select([row]), whole.images) for row in chosen]
                norm = float(optim.clip_gradients(whole.model, None))
                logp = measure(half.model, rows.select([chosen[distributed.rank()]]), half.images)
                gap = float((logp - expected[distributed.rank()]).abs().max())
                if gap > 1e-5 or abs(float(optim.clip_gradients(half.model, None)) / norm - 1) > 1e-5:
                    wrong.append(kind)
                for model in (whole.model, half.model):
                    model.zero_grad(set_to_none=True)
        assert not wrong, wrong
