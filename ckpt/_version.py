"""The version, as a literal so that asking for it imports nothing."""

__version__ = "0.1.0"
