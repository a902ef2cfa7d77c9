"""Merge rules."""

from mechanics import merged

from posttrain.merge import rules

ADAPTERS = {
    "linear_merge": merged(rules.linear, names={}),
    "task_arithmetic": merged(rules.task_arithmetic, names={}),
}
