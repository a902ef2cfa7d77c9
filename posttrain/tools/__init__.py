"""Tools and environments that a model calls or acts in while it answers, and parsers of tool calls in its text."""
