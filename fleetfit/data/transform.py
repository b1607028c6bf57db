"""What a model's samples were prepared by: fitted on its training data, stored as JSON, applied to other samples.

A run folder and an export have it as `data.json`, with the encoding of a table's columns and a tokeniser beside it.
"""

import contextlib
import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import torch

from fleetfit import names
from fleetfit.data.dataset import AbsentData, Data
from fleetfit.data.files.memory import Samples, TableSplits
from fleetfit.data.rows import FITTED
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, DataError
from fleetfit.factories import call_factory

FILE, COLUMNS, TOKENISER = "data.json", "columns.json", "tokenizer.json"
"""The files of a transform."""
KINDS = {
    "arrays": "prepare_array_file",
    "images": "prepare_images",
    "sounds": "prepare_sounds",
    "table": "prepare_table",
    "text": "prepare_texts",
}
"""The functions that prepare files like training data, by the modules of `data.files`. Runs start without them.

Each takes a path, the training data or their facts, their keys, and whether one half of the samples is for validation.
It returns None if the path has no new samples, or is a data set with splits of its own, and raises `DataError` where
samples or labels do not fit the training data.
"""
_PLAIN_TEXT = "plain_text"  # the only format whose test set is the end of each file
_FACTS = ("name", *FITTED)
_OF_TRAINING = ("folder", "file", "columns", "groups", "samples", "augment", "hub", "tokenizer", "test")

Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=0)]


class Transform(pydantic.BaseModel):
    """How samples become those of a trained model.

    Attributes:
        kind: The reader of the training data, such as "images"; "" if they are on the nodes of a fleet.
        settings: Its keys that hold for other samples, too.
        name: The data set.
        shape: Of a sample as stored.
        columns: The encoding of a table's columns, the text of `columns.json`; "" for other data.
        tokenizer: The tokeniser's file; "" if there is none.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")

    kind: str = ""
    settings: dict[str, Any] = {}
    name: str
    task: str
    shape: tuple[Count, ...]
    dtype: Literal["uint8", "int64", "float16", "bfloat16", "float32", "float64"]
    classes: Count
    class_names: tuple[str, ...] = ()
    mean: tuple[Finite, ...] = ()
    std: tuple[Finite, ...] = ()
    channels_last: bool = False
    vocabulary: Count = 0
    padding: int = -1
    resize: tuple[Count, Count] | None = None
    targets: tuple[tuple[Finite, ...], ...] = ()
    columns: str = pydantic.Field(default="", exclude=True)
    tokenizer: str = pydantic.Field(default="", exclude=True)

    @classmethod
    def fit(cls, data: Data, kind: str, settings: Mapping[str, Any]) -> "Transform":
        """Return the transform of training data.

        Args:
            data: The data.
            kind: Their reader: a name of `[data]`, or "" for data in memory.
            settings: The keys of `[data]`.
        """
        kind = "table" if data.columns else "text" if data.tokenizer else kind or "arrays"
        return cls(
            kind=kind,
            settings={key: value for key, value in settings.items() if kind in KINDS and key not in _OF_TRAINING},
            shape=tuple(data.x.shape[1:]),
            dtype=str(data.x.dtype).removeprefix("torch."),
            targets=tuple(tuple(moment.tolist()) for moment in data.target_scale) if data.task == "regression" else (),
            **{name: getattr(data, name) for name in _FACTS},
        )

    def to_files(self) -> dict[str, str]:
        """Return the texts of its files, by name."""
        texts = {FILE: json.dumps(self.model_dump(exclude_defaults=True), default=str) + "\n"}  # ASCII
        if self.columns:
            texts[COLUMNS] = self.columns
        with contextlib.suppress(OSError, UnicodeDecodeError):
            if self.tokenizer:
                texts[TOKENISER] = Path(self.tokenizer).read_text(encoding="utf-8")
        return texts

    @classmethod
    def from_json(cls, content: Any, columns: str = "", tokenizer: str = "") -> "Transform":
        """Return the transform of a `data.json`.

        Args:
            content: Its content.
            columns: The text of the `columns.json` beside it, or "".
            tokenizer: The path of the `tokenizer.json` beside it, or "".

        Raises:
            DataError: The content is wrong.
        """
        try:
            transform = cls.model_validate({**content, "columns": columns, "tokenizer": tokenizer})
            transform.describe("")
        except pydantic.ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise DataError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}.") from None
        except (DataError, IndexError, RuntimeError, TypeError) as error:
            raise DataError(str(error)) from None
        return transform

    def describe(self, reason: str) -> AbsentData:
        """Return the facts of the training data, without samples.

        Args:
            reason: Why the samples cannot be read, as a sentence.
        """
        labels = {"next_token": (0, *self.shape), "classification": (0,)}.get(self.task, (0, self.classes))
        return AbsentData(
            x=torch.empty(0, *self.shape, dtype=getattr(torch, self.dtype)),
            y=torch.empty(labels, dtype=torch.float32 if self.task == "regression" else torch.int64),
            splits={},
            targets=self.targets,
            reason=reason,
            **{name: getattr(self, name) for name in _FACTS},
        )

    def apply(self, source: "Path | Samples | TableSplits", halves: bool = False) -> Data:
        """Return other samples as the model takes them, all for testing unless they have a test set.

        Args:
            source: A file or a folder, or data in memory.
            halves: Whether to use one half for validation if there are no splits, as calibration needs.

        Raises:
            FleetFitError: The samples have another format than the training data, or do not fit them.
        """
        facts = self.describe("")
        if isinstance(source, Samples):
            from fleetfit.data.files.arrays import prepare_arrays

            return prepare_arrays(*(source.test or source.train), facts)
        if isinstance(source, TableSplits):
            if not self.columns:
                raise ConfigError(
                    f"data=frame: the run has no {COLUMNS}, as it was not trained on a table. Pass a fleetfit.Data.",
                    key="data",
                )
            from fleetfit.data.files.table import prepare_rows

            return prepare_rows(source.splits.get("test", source.splits["train"]), facts)
        data: Data | None = None
        if self.kind in KINDS:
            module = importlib.import_module(f"fleetfit.data.files.{self.kind}")
            data = getattr(module, KINDS[self.kind])(source, facts, self.settings, halves)
        return self._read(source, halves) if data is None else data

    def _read(self, path: Path, halves: bool) -> Data:
        """Read a data set with splits of its own by the reader and the keys of the training data."""
        from fleetfit.data.files.detect import detect_format

        label = {"label": self.settings["label"]} if "label" in self.settings else {}  # tells texts from a table
        try:
            section = {key: value for key, value in detect_format(str(path), label).items() if key != "partition"}
        except DataError as error:
            raise DataError(f"--data: {error}", key="data", path=error.path) from None
        kind, settings = section.pop("name"), section
        if not self.kind and kind == "table":
            raise ConfigError(
                f"the run's folder lacks the encoding of the nodes' tables. Copy their {COLUMNS} there, and repeat the "
                "command.",
                path=COLUMNS,
            )
        if self.kind:
            self._check_kind(path, kind)
            settings = {**self.settings, **{key: section[key] for key in ("folder", "file") if key in section}}
            settings |= {"tokenizer": self.tokenizer} if self.tokenizer else {}
        if kind != _PLAIN_TEXT:
            settings["test"] = 0.0  # so that the reader returns test samples only if there is a test set
        data: Data = call_factory(names.resolve("data", kind), kind, "--data", settings)
        if self.class_names and data.class_names and data.class_names != self.class_names:
            raise ConfigError(
                f"{path} has classes {', '.join(data.class_names[:10])}, but the run was trained on "
                f"{', '.join(self.class_names[:10])}.",
                key="data",
                path=path,
            )
        if kind != _PLAIN_TEXT and len(data.split("test")):
            return data
        rows = torch.cat([data.split(split) for split in SPLITS]).sort().values
        return data.share({"validation": rows[::2], "test": rows[1::2]} if halves else {"test": rows})

    def _check_kind(self, path: Path, kind: str) -> None:
        if kind != self.kind:
            raise ConfigError(
                f"{path} was detected as {kind}, but this run was trained on {self.kind.rpartition(':')[2]}. Name data "
                "of the same format.",
                key="data",
                path=path,
            )
        if kind == _PLAIN_TEXT:
            raise ConfigError(
                "the tokens of a plain text are its characters, so another text has other tokens.",
                key="data",
                path=path,
            )
