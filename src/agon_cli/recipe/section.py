"""What every part of a recipe is made of."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen part of a recipe that refuses keys it does not know, numbers that are not finite, and never guesses a
    type from another."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
