"""Single options of a ``PYTORCH_CUDA_ALLOC_CONF`` string: read one, change one."""

from __future__ import annotations

import re

_OPTION = re.compile(r"([^,\[:]+):([^,\[]+|\[[^\]]*\])")


def setting_of(settings: str | None, name: str) -> str:
    """Return one option of a ``PYTORCH_CUDA_ALLOC_CONF`` string as text; empty if the string does not set it.

    >>> setting_of("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb")
    '64'
    """
    return dict(_OPTION.findall((settings or "").replace(" ", ""))).get(name, "")


def with_setting(settings: str | None, name: str, value: str) -> str | None:
    """Return a ``PYTORCH_CUDA_ALLOC_CONF`` string with one option changed, or removed if the value is empty.

    >>> with_setting("expandable_segments:True", "max_split_size_mb", "64")
    'expandable_segments:True,max_split_size_mb:64'
    >>> with_setting("max_split_size_mb:64", "max_split_size_mb", "") is None
    True
    """
    options = dict(_OPTION.findall((settings or "").replace(" ", ""))) | {name: value}
    return ",".join(f"{name}:{value}" for name, value in options.items() if value) or None
