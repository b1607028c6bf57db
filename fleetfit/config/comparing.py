"""`[compare]` of a run file: what is run beside what, and what the table shows."""

from typing import Annotated, Any, Literal

from pydantic import Field

from fleetfit.config.section import Fraction, Section


class CompareSection(Section):
    """`[compare]`: rows and settings of `fleetfit compare`, and what its table shows.

    Attributes:
        row: One table per row: keys of a run file that differ in it, an optional `label`, and `printed`, a paper's
            numbers in the order of the table's columns.
        setting: One table per setting: keys of a run file that differ in it, and its `label`.
        grid: Keys of a run file, each with the list of its values; all combinations are run for every row.
        tune: The same, but the best value of each row is chosen on validation data.
        tune_on: What chooses: "local", "global", or the fewest "rounds" to the first target.
        columns: What the table shows of each setting; by default local, global and, with a target, rounds.
        target: An accuracy, or several, to which rounds are counted.
        target_on: Which accuracy that is.
        differs: How the file's setting differs from the paper's; a line below the table.
    """

    row: list[dict[str, Any]] = Field(default_factory=list)
    setting: list[dict[str, Any]] = Field(default_factory=list)
    grid: dict[str, Any] = Field(default_factory=dict)
    tune: dict[str, Any] = Field(default_factory=dict)
    tune_on: Literal["local", "global", "rounds"] = "local"
    columns: Annotated[list[str], Field(min_length=1)] | None = None
    target: Fraction | list[Fraction] | None = None
    target_on: str = "global"
    differs: str = ""

    @property
    def given(self) -> list[str]:
        """The keys that say something."""
        return [key for key in type(self).model_fields if key in self.model_fields_set and getattr(self, key)]

    @property
    def is_set(self) -> bool:
        """Whether there is anything to compare."""
        return bool(self.row or self.setting or self.grid or self.tune)

    @property
    def targets(self) -> tuple[float, ...]:
        """The accuracies to reach, ascending."""
        given = self.target if isinstance(self.target, list) else [self.target]
        return tuple(sorted({t for t in given if t is not None}))
