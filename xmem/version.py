"""The one home of xmem's version number."""

__version__ = "0.1.0"
