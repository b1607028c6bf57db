"""What a model's samples were prepared by: fitted on its training data, stored as JSON, applied to other samples.

A run folder and an export have it as `data.json`, with the encoding of a table's columns and a tokenizer beside it.
"""

import contextlib
import dataclasses
import importlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import pydantic
import torch

from fleetfit import files, names
from fleetfit.data.dataset import AbsentData, Data
from fleetfit.data.files.memory import Samples, TableSplits
from fleetfit.data.rows import FITTED
from fleetfit.data.splits import SPLITS
from fleetfit.errors import ConfigError, DataError, quote_some, truncate
from fleetfit.factories import call_factory

FILE, COLUMNS, TOKENIZER = "data.json", "columns.json", "tokenizer.json"
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
_OF_TRAINING = ("folder", "file", "transform", "groups", "samples", "augment", "hub", "tokenizer", "test")
_OF_SPLITS = ("validation", "seed")

Finite = Annotated[float, pydantic.Field(allow_inf_nan=False)]
Count = Annotated[int, pydantic.Field(ge=0)]


class Transform(pydantic.BaseModel):
    """How samples become those of a trained model.

    Attributes:
        kind: The reader of the training data, such as "images"; "" if nodes of a fleet prepared theirs by themselves.
        settings: Its keys that hold for other samples, too.
        name: The data set.
        shape: Of a sample as stored.
        columns: The encoding of a table's columns, the text of `columns.json`; "" for other data.
        tokenizer: The tokenizer's file; "" if there is none.
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
            kind=PurePath(kind).name,  # without the folder of a plug-in
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
                texts[TOKENIZER] = Path(self.tokenizer).read_text(encoding="utf-8")
        return texts

    @classmethod
    def load(cls, folder: str | Path) -> "Transform":
        """Return the transform in the folder of a run or an export.

        Raises:
            DataError: A file is missing or damaged.
        """
        folder = Path(folder)
        columns, tokenizer = folder / COLUMNS, folder / TOKENIZER
        text = files.read_text(folder / FILE, DataError)
        try:
            return cls.from_json(
                files.parse_json(text),
                files.read_text(columns, DataError) if files.is_file(columns) else "",
                str(tokenizer) if files.is_file(tokenizer) else "",
            )
        except (ValueError, DataError) as error:
            raise DataError(f"{folder / FILE} is damaged: {error}", path=folder / FILE) from None

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

    def select_keys(self, kind: str, written: Mapping[str, Any], path: Path | None = None) -> dict[str, Any]:
        """Return the keys of `[data]` by which other files are read as those of the training data were.

        Args:
            kind: Their reader. One that reads no files of the user keeps the keys that are set.
            written: The keys that a user set. They stay, and must not contradict what was fitted.
            path: Their place, for messages.

        Raises:
            ConfigError: They do, the training data were of another kind, or they are a plain text.
        """
        place = "[data]" if path is None else path
        if self.kind != kind and (path is not None or {self.kind, kind} <= KINDS.keys()):
            raise ConfigError(
                f"{place} was detected as {kind}, but the training data are {self.kind.rpartition(':')[2]}. Name data "
                "of the same format.",
                key="data",
                path=path,
            )
        if kind == _PLAIN_TEXT:
            raise ConfigError(
                "the tokens of a plain text are its own, so another text has other tokens. Use labeled texts.",
                key="data",
                path=path,
            )
        if kind not in KINDS:
            return dict(written)
        keys = {key: value for key, value in self.settings.items() if key not in (*_OF_TRAINING, *_OF_SPLITS)}
        keys = {**keys, **written}
        for key, value in self._list_fitted_keys(kind, keys).items():
            if written.get(key, value) != value:
                raise ConfigError(
                    f"{place} {key}: got {truncate(str(written[key]))}, but the transform has {truncate(str(value))}. "
                    f"Leave {key} out.",
                    key=f"data.{key}",
                )
            keys[key] = value
        return keys

    def _list_fitted_keys(self, kind: str, keys: Mapping[str, Any]) -> dict[str, Any]:
        if kind == "text" and self.tokenizer and len(self.shape) == 1:
            return {"tokenizer": self.tokenizer, "length": self.shape[0]}
        if kind == "images" and len(self.shape) == 3:
            channels, height, width = self.shape
            return {"channels": channels} | ({"size": height} if height == width else {})
        if kind == "sounds" and len(self.shape) == 3:
            from fleetfit.data.files.sounds import compute_seconds

            return {"n_mels": self.shape[1], "seconds": compute_seconds(self.shape[2], keys)}
        return {}

    def convert(self, data: Data) -> Data:
        """Return the training data of another party with the transform's classes, normalization and scale of targets.

        Raises:
            DataError: Their samples, task or classes do not fit.
        """
        facts = self.describe("")
        for what, ours, theirs in (
            ("the task", self.task, data.task),
            ("samples", list(self.shape), list(data.x.shape[1:])),
            ("samples of type", facts.x.dtype, data.x.dtype),
            ("tokens", self.vocabulary, data.vocabulary),
            ("padding", self.padding, data.padding),
            ("an encoding of columns", self.columns, data.columns),
            ("a tokenizer", _read_tokenizer(self), _read_tokenizer(data) or _read_tokenizer(self)),
            ("targets or labels", self.classes, self.classes if data.task == "classification" else data.classes),
        ):
            if ours != theirs:
                raise DataError(
                    f"{data.name} has {what} {truncate(str(theirs))}, but the training data have "
                    f"{truncate(str(ours))}. Name data like them.",
                    key="data",
                )
        fitted = {name: getattr(self, name) for name in (*FITTED, "targets")}
        return dataclasses.replace(data, y=self.convert_classes(data), **fitted)

    def has_prepared(self, data: Data) -> bool:
        """Return whether samples are stored and normalized as the transform's."""
        fields = [name for name in FITTED if name not in ("columns", "tokenizer", "class_names")]
        shapes = data.x.shape[1:] == self.shape and f"torch.{self.dtype}" == str(data.x.dtype)
        return shapes and all(getattr(data, name) == getattr(self, name) for name in fields)

    def convert_classes(self, data: Data) -> torch.Tensor:
        """Return labels with the transform's numbers of classes.

        Raises:
            DataError: A class has no number there.
        """
        if data.task != "classification" or data.class_names == self.class_names:
            return data.y
        ours = self.class_names or tuple(map(str, range(self.classes)))
        theirs = data.class_names or tuple(map(str, range(data.classes)))
        if not data.class_names and not any(map(str.isdecimal, ours)):  # numbers mean the classes in their order
            theirs = (*ours, *theirs[len(ours) :])[: data.classes]
        numbers = {name: number for number, name in enumerate(ours)}
        present = set(data.y.tolist())
        if unknown := [name for label, name in enumerate(theirs) if name not in numbers and label in present]:
            raise DataError(
                f"{data.name} has classes that the training data lack: {quote_some(unknown)}. Their classes are "
                f"{quote_some(ours)}.",
                key="data",
            )
        return torch.tensor([numbers.get(name, -1) for name in theirs], device=data.y.device)[data.y]

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
        facts, data = self.describe(""), None
        if isinstance(source, Samples | TableSplits):
            return self._apply_in_memory(source, facts, halves)
        if self.kind in KINDS:
            is_array = source.is_file() and source.suffix.lower() in (".npy", ".npz") and not self.columns
            kind = "arrays" if is_array else self.kind  # stored samples, as in memory
            module = importlib.import_module(f"fleetfit.data.files.{kind}")
            data = getattr(module, KINDS[kind])(source, facts, self.settings if kind == self.kind else {}, halves)
        return self._read(source, halves) if data is None else data

    def _apply_in_memory(self, source: "Samples | TableSplits", facts: Data, halves: bool) -> Data:
        settings = self.settings
        if self.kind == "text" and isinstance(source, Samples) and (table := source.make_text_table()) is not None:
            source, settings = table, {}  # its columns have the usual names
        rows = None if isinstance(source, Samples) else source.splits.get("test", source.splits["train"])
        if self.kind == "text" and rows is not None:
            from fleetfit.data.files.text import prepare_text_cells

            cells = {name: rows.column(name).to_pylist() for name in rows.column_names}
            return prepare_text_cells(cells, facts, settings, halves)
        if isinstance(source, Samples):
            if self.columns:
                raise ConfigError(
                    "data: the run was trained on a table, and arrays have no columns. Pass a DataFrame, a dict of "
                    "columns or a file.",
                    key="data",
                )
            from fleetfit.data.files.arrays import prepare_arrays

            return prepare_arrays(*(source.test or source.train), facts, halves=halves)
        if not self.columns:
            raise ConfigError(
                f"data=frame: the run has no {COLUMNS}, as it was not trained on a table. Pass arrays, or a "
                "fleetfit.Data.",
                key="data",
            )
        from fleetfit.data.files.table import prepare_table

        return prepare_table(rows, facts, halves=halves)

    def _read(self, path: Path, halves: bool) -> Data:
        """Read a data set with splits of its own by the reader and the keys of the training data."""
        from fleetfit.data.files.detect import detect_format

        label = {"label": self.settings["label"]} if "label" in self.settings else {}  # tells texts from a table
        try:
            detected = {key: value for key, value in detect_format(str(path), label).items() if key != "partition"}
        except DataError as error:
            raise DataError(f"--data: {error}", key="data", path=error.path) from None
        kind, keys = detected.pop("name"), detected
        if not self.kind and kind == "table":
            raise ConfigError(
                f"the run has no {FILE}: it has no transform, which tables need. Set transform under [data] in the run "
                "file of a fleet.",
                path=FILE,
            )
        if self.kind:
            own = {key: value for key, value in detected.items() if key in ("folder", "file")}
            splits = {key: self.settings[key] for key in _OF_SPLITS if key in self.settings}
            keys = self.select_keys(kind, {**splits, **own}, path)
        if kind != _PLAIN_TEXT:
            keys["test"] = 0.0  # so that the reader returns test samples only if there is a test set
        data: Data = call_factory(names.resolve("data", kind), kind, "--data", keys)
        if self.kind:
            data = self.convert(data)
        if kind != _PLAIN_TEXT and len(data.split("test")):
            return data
        rows = torch.cat([data.split(split) for split in SPLITS]).sort().values
        return data.share({"validation": rows[::2], "test": rows[1::2]} if halves else {"test": rows})


def _read_tokenizer(data: Data | Transform) -> str:
    return files.read_text(data.tokenizer, DataError) if data.tokenizer else ""
