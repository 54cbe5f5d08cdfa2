"""DataParallel."""


class DataParallel:
    """To do."""
