"""What a backend raises that cannot run here."""


class BackendUnavailable(RuntimeError):
    """A backend cannot run here; the message says why and what to install."""
