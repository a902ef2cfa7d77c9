"""posttrain: post-train reasoning LLMs from YAML recipes. Heavy libraries are imported only where they are used."""

__version__ = "0.1.0"
