"""What is wrong with an option of the command."""


class BadOption(ValueError):
    """Names the option, what was given, and what would do."""

    def __init__(self, option: str, value: object, expected: str) -> None:
        super().__init__(f"{option} {str(value) or repr('')}: {expected}")
        self.option = option
        self.value = value
        self.expected = expected
