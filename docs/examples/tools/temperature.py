"""A tool: a typed function with a docstring, which the model reads."""


def fahrenheit(celsius: float, digits: int = 1, *, offset: float = 32.0) -> float:
    """Convert a temperature to Fahrenheit.

    Args:
        celsius: the temperature in degrees Celsius
        digits: of the result after the point
    """
    return round(celsius * 9 / 5 + offset, digits)


EXAMPLES = [({"celsius": 100}, 212.0), ({"celsius": 36.6, "digits": 0}, 98.0)]
