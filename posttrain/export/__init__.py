"""A trained model for use elsewhere: a plain folder, a GGUF file, Ollama, the hub; each checked by loading it again."""
