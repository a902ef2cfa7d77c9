"""Estimators of evaluation."""

from mechanics import call

from posttrain.evaluate import estimators

ADAPTERS = {
    "pass_at_k": call(estimators.pass_at_k, outputs="pass_at_k"),
    "avg_at_k": call(estimators.avg_at_k, outputs={"avg": "avg", "per_problem": "per_problem"}),
    "cons_at_k": call(
        estimators.cons_at_k, outputs={"majority": "majority", "per_problem": "per_problem", "cons": "cons"}
    ),
    "bootstrap_ci": call(estimators.bootstrap_ci, outputs={"mean": "mean", "low": "low", "high": "high"}),
}
