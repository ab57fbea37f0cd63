"""What every DistServe service shares. No service is imported from here."""

__version__ = "0.1.0"
