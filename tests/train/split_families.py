"""In two processes: log-probs and gradient norms of families whose layers or experts are divided, against whole ones.

See ranked.py and test_tensor_split.py.
"""

from __future__ import annotations

import copy
from typing import Any

from families import family

from posttrain.recipe.sections import Parallel
from posttrain.train import distributed, optim, sharding
from posttrain.train.logprobs import Sequences, completion_logprobs
from posttrain.train.mesh import expert_mesh, weight_mesh

ROWS = Sequences(((5, 6, 7, 8, 9), (11, 12, 13), (21, 22, 23, 24, 25, 26, 27)), (2, 1, 3))


def compare(key: str, kinds: list[str]) -> None:
    """Raises AssertionError for families of `kinds` that do not agree with `model.parallel: {key: 2}`."""
    wrong = []
    with distributed.join_process_group():
        parallel = Parallel(**{key: 2})
        distributed.run_same_rows(1, parallel.tensor)
        for kind in kinds:
            model = family(kind)
            whole = measure(copy.deepcopy(model))
            sharding.shard(model, weight_mesh(parallel, 2, "cpu"), None, set(), expert_mesh(parallel, 2, "cpu"))
            logp, norm = measure(model)
            norm /= parallel.expert  # these ranks run the same rows here, and add up their gradients
            if float((logp - whole[0]).abs().max()) > 1e-5 or abs(norm / whole[1] - 1) > 2e-6:
                wrong.append(kind)
        assert not wrong, wrong


def measure(model: Any) -> tuple[Any, float]:
    """(log-probs, norm of their sum's gradient)."""
    logp, _ = completion_logprobs(model, ROWS, 4)
    logp.sum().backward()
    return logp.detach(), float(optim.clip_gradients(model, None))
