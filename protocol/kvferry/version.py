"""`__version__`, of the installed distribution; `kvferry` itself is a namespace and has no attributes."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("kvferry")
except PackageNotFoundError:  # imported from a folder that is not installed
    __version__ = "(not installed)"
