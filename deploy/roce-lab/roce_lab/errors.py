"""What the lab raises."""


class LabError(Exception):
    """The lab cannot do what was asked; the text says what is missing or went wrong, and what would mend it."""


class LabTimeout(LabError):
    """A deadline has passed; what was waited for is named."""
