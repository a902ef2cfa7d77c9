"""What a run leaves behind and how it goes on: directory, metrics, samples, checkpoints, seeds. No tensors here."""
