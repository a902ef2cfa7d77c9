"""mergekit's two dtypes: the model is written in `out_dtype`, or in `dtype` if only that is given."""

from __future__ import annotations

from typing import Any

import pytest

from posttrain.recipe.load import load_dict
from posttrain.recipe.merging import rename_out_dtype


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ({"dtype": "float32", "out_dtype": "bfloat16"}, "bfloat16"),
        ({"out_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "out_dtype": None}, "float32"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "torch.bfloat16"}, "bfloat16"),
    ],
)
def test_model_is_written_in_out_dtype(tmp_path: Any, values: dict[str, Any], dtype: str) -> None:
    assert rename_out_dtype(values) == {"dtype": dtype}
    models = [{"model": "tiny"}, {"model": "other"}]
    recipe = {"stage": "merge", "merge_method": "linear", "models": models, **values}
    assert load_dict(recipe, base_dir=tmp_path, where="test").recipe.dtype == dtype
