"""The base of what an author signs, and its numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=0, lt=2**60)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]


class ManifestPart(BaseModel):
    """A part of the manifest. Unknown fields are ignored, so that later versions may add some."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
