"""Claims of the papers and of this project, from `experiments/claims.toml`: what is greater than what, by how much.

A claim becomes contrasts: sums of numbers that are positive where it is true. "ScaleFL's local accuracy is above
HeteroFL's" is one, ScaleFL - HeteroFL; "Decoupled is last" is one for each other method, and all have to be positive.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
from pydantic import ConfigDict, Field

from fleetfit.config.toml import read_toml
from fleetfit.errors import ConfigError, did_you_mean, truncate

Text = Annotated[str, Field(min_length=1)]
Number = Annotated[float, Field(allow_inf_nan=False)]
Measure = Literal["difference", "ratio"]
OWN = "FleetFit"
"""The `paper` of the tables with this project's own claims."""


class _Table(pydantic.BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Side(_Table):
    """One number that is compared.

    Attributes:
        row: Label of the row in the experiment's file.
        column: A column of its table, "rounds", "level 2" or "exit last"; the claim's where there is none.
        setting: Label of the setting; the claim's where there is none.
        file: The experiment's file, below `experiments/`; the table's where there is none.
        printed: The paper's number: percent, rounds, milliseconds, millions.
    """

    row: Text
    column: Text | None = None
    setting: str | None = None
    file: Text | None = None
    printed: Number | None = None


Sides = Side | list[Side]
Pair = Annotated[list[Side], Field(min_length=2, max_length=2)]


class Claim(_Table):
    """Something that a paper says about the order or the size of its numbers.

    Attributes:
        id: A short name that stays.
        says: The claim in a sentence.
        column, setting: Those of all sides that name no other.
        measure: Whether sides are subtracted (percentage points) or divided (rounds, sizes, times).
        by: How much greater at least, in percentage points or as a ratio; by default more than zero. Below zero: how
            much may be lost.
        exact: Chance plays no part in it, as with numbers of parameters: it needs no interval, and one run is enough.
        changed: What was changed in it after the file was first written, when, and why.
        rounds_differ: The experiments that it compares have different numbers of rounds; the table's note says why.
        greater, lesser: Each of the first is greater than each of the second.
        pairs: The first of each pair is greater than its second.
        chain: Each is greater than the next.
        wider: Two pairs: the first lies further apart than the second.
    """

    id: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.-]*$")]
    says: Text
    column: Text | None = None
    setting: str | None = None
    measure: Measure = "difference"
    by: Number | None = None
    exact: bool = False
    changed: str = ""
    rounds_differ: bool = False
    greater: Sides | None = None
    lesser: Sides | None = None
    pairs: Annotated[list[Pair], Field(min_length=1)] | None = None
    chain: Annotated[list[Side], Field(min_length=2)] | None = None
    wider: Annotated[list[Pair], Field(min_length=2, max_length=2)] | None = None

    @pydantic.model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.greater is None) != (self.lesser is None):
            raise ValueError("greater and lesser stand together")
        forms = [self.greater, self.pairs, self.chain, self.wider]
        if sum(form is not None for form in forms) != 1:
            raise ValueError("needs one of: greater and lesser, pairs, chain, wider")
        if self.measure == "ratio" and self.by is not None and self.by <= 0:
            raise ValueError("by is a ratio here and must be above 0")
        return self


class ClaimTable(_Table):
    """A table or figure of a paper: its claims are corrected for one another.

    Attributes:
        paper: Whose it is; the page has a chapter for each.
        title: What it is there.
        file: The experiment that judges it, below `experiments/`.
        note: What a reader has to know about it, written before the runs.
        later: What the runs have shown that the verdicts do not say, written after them.
        claim: Its claims.
        also: Orders of the same table that were looked at after the runs: judged alike, corrected among themselves,
            and not counted.
        beside: Columns that are shown with those of the claims, and not judged.
        family: Tables with the same one are corrected together; by default each for itself.
    """

    paper: Text
    title: Text
    file: Annotated[str, Field(pattern=r"^[\w./-]+\.toml$")]
    note: str = ""
    later: str = ""
    claim: Annotated[list[Claim], Field(min_length=1)]
    also: list[Claim] = Field(default_factory=list)
    beside: list[Text] = Field(default_factory=list)
    family: str = ""

    @property
    def every(self) -> list[Claim]:
        """Its claims and what was looked at later."""
        return [*self.claim, *self.also]


class LeftOut(_Table):
    """What of a paper is not judged.

    Attributes:
        paper: Whose it is.
        what: The tables or figures.
        why: The reason.
    """

    paper: Text
    what: Text
    why: Text


class Claims(_Table):
    """All of the file.

    Attributes:
        about: What a reader has to know of a paper's claims as a whole, by paper.
        table: The papers' tables and figures.
        left_out: What is not judged, and why.
    """

    about: dict[Text, Text] = Field(default_factory=dict)
    table: Annotated[list[ClaimTable], Field(min_length=1)]
    left_out: list[LeftOut] = Field(default_factory=list)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path) -> Claims:
    """Return the claims of a file.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, missing or of a wrong kind, two claims have one id, or a
            number is left open.
    """
    table = read_toml(path)
    try:
        found = Claims.model_validate(table)
    except pydantic.ValidationError as error:
        first = max(error.errors(), key=lambda e: (e["type"] == "extra_forbidden", len(e["loc"])))
        raise ConfigError(f"{path}: {_sentence(first, table)}") from None
    lost = set(found.about) - {one.paper for one in found.table}
    if lost:
        raise ConfigError(f'{path}: about: no table is of "{min(lost)}".')
    counts = Counter(claim.id for table in found.table for claim in table.every)
    twice = [name for name, count in counts.items() if count > 1]
    if twice:
        raise ConfigError(f'{path}: two claims have the id "{twice[0]}"; each needs one of its own.')
    for one in found.table:
        for claim in one.every:
            _check_complete(path, one, claim)
    return found


def _check_complete(path: Path, table: ClaimTable, claim: Claim) -> None:
    for side in sides(claim):
        if not (side.column or claim.column):
            raise ConfigError(
                f'{path}: claim "{claim.id}", row "{side.row}": no column. Give the claim one, or each of its sides.'
            )
    for contrast in contrasts(table, claim):
        if len(set(contrast.plus)) != len(contrast.plus) or set(contrast.plus) & set(contrast.minus):
            raise ConfigError(
                f'{path}: claim "{claim.id}": a number of row "{contrast.plus[0].row}" is compared with itself.'
            )
        if claim.measure == "ratio" and any((side.printed or 1.0) <= 0 for side in sides(claim)):
            raise ConfigError(f'{path}: claim "{claim.id}": printed numbers of a ratio must be above 0.')


def _sentence(error: Any, table: Any) -> str:
    """Say what is wrong and where, by the id of the claim if it has one."""
    place, found = [], table
    for part in error["loc"]:
        inside = range(len(found)) if isinstance(found, list) else found if isinstance(found, dict) else ()
        if part in inside:
            found = found[part]
        elif part != error["loc"][-1]:  # the name of a kind that pydantic tried
            continue
        named = found.get("id") if isinstance(found, dict) and "says" in found else None
        if named is not None:
            place = [f'claim "{truncate(named)}"']
        elif isinstance(part, int):
            place[-1:] = [f"{place[-1]} #{part + 1}"] if place else [f"#{part + 1}"]
        elif part not in ("Side", "list[Side]"):
            place.append(truncate(part))
    where = ", ".join(place)
    if error["type"] == "extra_forbidden":
        known = _keys_beside(error["loc"])
        hint = did_you_mean(str(error["loc"][-1]), known) or f" Known here: {', '.join(known)}."
        return f"{where}: unknown key.{hint}"
    if error["type"] == "missing":
        return f"{where}: this key is needed."
    message = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    return f"{where}: {message}, got {truncate(repr(error['input']))}."


def _keys_beside(place: Sequence[str | int]) -> list[str]:
    """Return the keys that are known where an unknown one stands."""
    names = [part for part in place if isinstance(part, str)]
    schema: type[_Table] = Claims
    if "left_out" in names[:1]:
        schema = LeftOut
    elif "claim" in names[:-1] or "also" in names[:-1]:
        schema = Side if len(names) > 3 else Claim
    elif "table" in names[:-1]:
        schema = ClaimTable
    return list(schema.model_fields)


# ---- contrasts -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Where a number stands: an experiment's file, below `experiments/`, and what of it."""

    file: str
    setting: str
    row: str
    column: str

    def __str__(self) -> str:
        return ", ".join(filter(None, [self.row, self.setting, self.column]))


@dataclass(frozen=True)
class Contrast:
    """A sum that is above a threshold where a claim is true.

    Attributes:
        plus, minus: The numbers that are added, and taken away; of ratios their logarithms are.
        printed: The paper's own sum, in percentage points or as a ratio; None where it prints no numbers.
    """

    plus: tuple[Place, ...]
    minus: tuple[Place, ...]
    printed: float | None

    def named(self) -> str:
        """Say in which the two sides differ: "ScaleFL over HeteroFL"."""
        if len(self.plus) > 1:
            return f"{_against(self.plus[0], self.minus[0])}, more than {_against(self.minus[1], self.plus[1])}"
        return _against(self.plus[0], self.minus[0])


def _against(greater: Place, lesser: Place) -> str:
    """Name two places by what they differ in, and what they share only where it is needed."""
    differing = [(a, b) for a, b in zip(_words(greater), _words(lesser), strict=True) if a != b]
    left, right = (", ".join(filter(None, part)) for part in zip(*differing, strict=True)) if differing else ("", "")
    shared = [a for a, b in zip(_words(greater), _words(lesser), strict=True) if a == b and a]
    return f"{left or 'all'} over {right or 'all'} ({', '.join(shared)})" if shared else f"{left} over {right}"


def _words(place: Place) -> tuple[str, str, str]:
    return place.row, place.setting, place.column


def sides(claim: Claim) -> Iterator[Side]:
    """Yield all numbers that a claim compares."""
    yield from [*listed(claim.greater), *listed(claim.lesser), *(claim.chain or [])]
    for pair in [*(claim.pairs or []), *(claim.wider or [])]:
        yield from pair


def listed(given: Sides | None) -> list[Side]:
    """Return sides as a list."""
    return [] if given is None else given if isinstance(given, list) else [given]


def contrasts(table: ClaimTable, claim: Claim) -> list[Contrast]:
    """Return the sums that have to be above the claim's threshold, all of them."""

    def made(plus: Sequence[Side], minus: Sequence[Side]) -> Contrast:
        def placed(chosen: Sequence[Side]) -> tuple[Place, ...]:
            return tuple(_place(table, claim, side) for side in chosen)

        return Contrast(placed(plus), placed(minus), _printed(claim.measure, plus, minus))

    if claim.wider is not None:
        (high, low), (other_high, other_low) = claim.wider
        return [made([high, other_low], [low, other_high])]
    pairs = [(g, s) for g in listed(claim.greater) for s in listed(claim.lesser)]
    pairs += [(pair[0], pair[1]) for pair in claim.pairs or []]
    pairs += list(zip(claim.chain or [], (claim.chain or [])[1:], strict=False))
    return [made([high], [low]) for high, low in pairs]


def _place(table: ClaimTable, claim: Claim, side: Side) -> Place:
    setting = side.setting if side.setting is not None else claim.setting
    return Place(side.file or table.file, setting or "", side.row, side.column or claim.column or "")


def _printed(measure: Measure, plus: Sequence[Side], minus: Sequence[Side]) -> float | None:
    numbers = [side.printed for side in [*plus, *minus]]
    known = [number for number in numbers if number is not None]
    if len(known) < len(numbers):
        return None
    scale: Callable[[float], float] = math.log if measure == "ratio" else float
    total = sum(map(scale, known[: len(plus)])) - sum(map(scale, known[len(plus) :]))
    return math.exp(total) if measure == "ratio" else total
