"""Pages and tables about runs: report.html, the live page, completions, run lists and comparisons. No tensors."""
