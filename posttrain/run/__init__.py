"""What a run writes and how it resumes: directory, metrics, samples, checkpoints, seeds. No tensors here."""
