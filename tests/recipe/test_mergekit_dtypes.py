"""mergekit's two dtypes: `out_dtype` is the one that is written, `dtype` where it stands alone."""

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
def test_out_dtype_is_what_is_written(tmp_path: Any, values: dict[str, Any], dtype: str) -> None:
    assert rename_out_dtype(values) == {"dtype": dtype}
    models = [{"model": "tiny"}, {"model": "other"}]
    recipe = {"stage": "merge", "merge_method": "linear", "models": models, **values}
    assert load_dict(recipe, base_dir=tmp_path, where="test").recipe.dtype == dtype
