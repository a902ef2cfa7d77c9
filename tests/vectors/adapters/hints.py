"""Prompt variants: hints, prefixes, templates, instructions."""

from hint_modes import cuts, on_failure, shortest

from posttrain.variants import solutions

ADAPTERS = {
    "ghpo": on_failure(solutions.hint_on_failure),
    "pope": shortest(solutions.shortest_fraction, solutions.prefix_tokens),
    "prefixrl": cuts(solutions.cut_tokens, solutions.prefixed_share),
}
