"""Tools and environments: what a model can call or act in while it answers, and how calls are read from its text."""
