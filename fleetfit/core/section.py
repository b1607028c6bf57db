"""Base classes and number types of the sections of a run file."""

from typing import Annotated, Any, Literal

import pydantic
from pydantic import ConfigDict, Field

Fraction = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Below1 = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Unit = Annotated[str, Field(pattern=r"[0-9]\s*[A-Za-z]+\s*$")]
Norm = Literal["static", "batch"]


class Section(pydantic.BaseModel):
    """A table of declared keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, arbitrary_types_allowed=True)


class OpenSection(Section):
    """A section that names a function. Further keys are the function's, checked against its signature."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, arbitrary_types_allowed=True)

    @property
    def settings(self) -> dict[str, Any]:
        """The keys that belong to the function."""
        return dict(self.model_extra or {})
