"""Libraries that only the populator needs, imported when a source asks for one: `pip install 'neuroshard[genesis]'`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from neuroshard.errors import UsageError

# Their types are not declared to us: what they give is checked where it comes in.


def zstandard() -> Any:
    """The module. Raises UsageError when it is not installed."""
    return _extra("zstandard", "zstandard")


def parquet() -> Any:
    """pyarrow.parquet. Raises UsageError when it is not installed."""
    return _extra("pyarrow.parquet", "pyarrow")


def arrow_error() -> type[Exception]:
    """What pyarrow raises for files it cannot read. Raises UsageError when it is not installed."""
    return _extra("pyarrow", "pyarrow").ArrowException


def datasets() -> Any:
    """Hugging Face's datasets. Raises UsageError when it is not installed."""
    return _extra("datasets", "datasets")


def _extra(module: str, package: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise UsageError(
            f"This source needs {package}, which is not installed.", "Install it: pip install 'neuroshard[genesis]'"
        ) from error
