"""Name the settings of the value lane: which values of virtual tensors are computed on the CPU as well."""

from __future__ import annotations

import enum


class Values(enum.StrEnum):
    """Which values of a virtual GPU's tensors are computed.

    >>> Values.of("real") is Values.REAL
    True
    """

    NONE = "none"
    """No values are computed, and every value counts as 1."""
    KNOWN = "known"
    """Small tensors that follow from values the program has, such as indices, masks, lengths, labels, small floats."""
    REAL = "real"
    """Every op is computed on the CPU too, as training on the CPU would compute it."""

    @classmethod
    def of(cls, text: str) -> Values:
        """Return the setting of a name.

        Raises ValueError for a name that is no setting.
        """
        try:
            return cls(text)
        except ValueError:
            raise ValueError(f"values={text!r} is not a setting; write 'none', 'known' or 'real'") from None
