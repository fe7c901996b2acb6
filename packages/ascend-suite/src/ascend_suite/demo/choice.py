"""The choice of features that a demo shows. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ascend_core.errors import FeatureNotFoundError
from ascend_core.feature import Feature, discover

__all__ = ["choose_features"]


def choose_features(
    names: Sequence[str] | None = None, installed: Mapping[str, Feature] | None = None
) -> dict[str, Feature]:
    """Choose the features that the demo shows.

    Args:
        names: Their names, in the order of the table; every installed one when left out.
        installed: The features to choose from, by name; those that installed packages offer when
            left out.

    Returns:
        The chosen features by name.

    Raises:
        FeatureNotFoundError: When a name is not among the installed features.
    """
    offered = discover() if installed is None else installed
    if names is None:
        return dict(offered)
    for name in names:
        if name not in offered:
            raise FeatureNotFoundError(
                f"there is no feature called {name!r}.",
                why=f"the installed packages offer: {', '.join(offered) or 'none'}.",
                instead="check the spelling, or install the package that offers it.",
            )
    return {name: offered[name] for name in names}
