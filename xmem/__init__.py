"""xmem: will this deep-learning job fit on that GPU, where does its memory go, and what would make it fit?"""

from xmem.version import __version__

__all__ = ["__version__"]
