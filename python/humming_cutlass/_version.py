"""The version, read by the build and part of every key of the kernel cache."""

__all__ = ["__version__"]

__version__ = "0.1.0"
