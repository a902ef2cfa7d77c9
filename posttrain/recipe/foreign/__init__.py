"""Import of other tools' recipes: their vocabulary (tables/*.yaml, one file per tool) and its conversion to our
recipes."""
