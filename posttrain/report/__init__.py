"""Pages and tables about runs: report.html, the live page, completions, lists and comparisons of runs. No tensors."""
