"""Names in a configuration become objects: the one place where a string decides what is imported.

A built-in name is in the row of its kind in `KINDS`: `resolve("methods", "fedrolex")` is function `fedrolex` of module
`fleetfit.methods.fedrolex`. A plug-in is `package.module:function` or `file.py:function`. Nothing else is ever
imported; a run file that names a plug-in runs its code (see SECURITY.md).
"""

import ast
import contextlib
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, FleetFitError, did_you_mean, format_cause, truncate

PACKAGE_FOLDER = Path(__file__).parent


def _list_modules(kind: str, names: str, tables: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the module of each name: one of the same name, or the one that has it as a preset."""
    modules = {name: f"fleetfit.{kind}.{name}" for name in names.split()}
    for module, presets in (tables or {}).items():
        modules |= dict.fromkeys(presets.split(), f"fleetfit.{kind}.{module}")
    return modules


@dataclass(frozen=True)
class Kind:
    """A kind of component that a run file names.

    Attributes:
        keys: The dotted keys that take its names. Further keys of their sections are the component's.
        modules: The module of each built-in name, which is a function or class in it.
        context: Parameters that FleetFit passes.
        shared: Keys of its section that fit any component.
        example: A name, for messages.
        noun: The kind in messages; its name by default.
    """

    keys: tuple[str, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    context: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    example: str = ""
    noun: str = ""


KINDS: Mapping[str, Kind] = {
    "methods": Kind(("method.name",), _list_modules("methods", (
        "adaptivefl all_large decoupled depthfl exclusivefl fedavg feddf feddropout fedrolex fedsgd fjord fleetfit "
        "heterofl inclusivefl nefl reefl scalefl"
    )), shared=("options", "hooks"), example="scalefl"),
    "options": Kind(("method.options",), _list_modules("options", (
        "class_prior fedadam fedavgm feddistill feddyn fednova fedprox fedyogi in_time krum lora_product outliers "
        "scaffold trimmed_mean"
    ))),
    "hooks": Kind(("method.hooks",)),
    "selection": Kind(
        ("cohort.selection",), _list_modules("selection", "availability diversity loss rl size uniform"),
        example="loss", noun="ways of client selection",
    ),
    "attacks": Kind(("attack.kind",), _list_modules("attacks", (
        "backdoor beyond_core false_budget false_level false_samples free_rider inner_product label_flip "
        "little_is_enough min_max noise sign_flip"
    )), shared=("fraction", "among"), example="sign_flip"),
    "models": Kind(("model.name",), _list_modules("models", "bert cnn mlp msdnet resnet vgg16 vim vit", {
        "bert": "bert_base bert_small bert_tiny",
        "fedavg_images": "fedavg_cifar_cnn fedavg_cnn mlp_2nn",
        "inverted": "efficientnet_b0 efficientnet_b4 mobilenetv2",
        "lstm": "char_lstm word_lstm",
        "msdnet": "msdnet24",
        "resnet": "resnet18 resnet20 resnet32 resnet34 resnet56 resnet110",
        "vim": "vim_ti",
        "vit": "deit_b deit_s deit_ti",
    }), context=("classes", "channels", "input_shape", "vocabulary", "padding"), example="cnn"),
    "peft": Kind(
        ("peft.name",), _list_modules("peft", "frozen full lora parallel_adapter serial_adapter ssf"),
        context=("architecture",), example="lora", noun="ways of fine-tuning",
    ),
    "data": Kind(("data.name", "data.server.name"), _list_modules("data", "", {
        "files.arrays": "arrays", "files.images": "images", "files.plain_text": "plain_text", "files.sounds": "sounds",
        "files.table": "table", "files.text": "text", "sets.digits": "digits", "sets.femnist": "femnist",
        "sets.images": "cifar10 cifar100 fashion_mnist mnist", "sets.imagenet": "imagenet",
        "sets.shakespeare": "shakespeare", "sets.short_texts": "ag_news sst2",
        "sets.speech_commands": "speech_commands", "sets.widar": "widar",
    }), context=("transform",), shared=("partition", "server"), example="digits"),
    "partitions": Kind(
        ("data.partition.kind",), _list_modules("data", "", {"partition": "iid dirichlet shards natural"}),
        context=("data", "clients", "rng"), example="iid",
    ),
    "engines": Kind(
        ("engine.name",), _list_modules("engines", "flower local processes ray"), context=("simulation",),
        shared=("device", "speed", "precision", "memory_format", "compile", "feature_cache_bytes"),
        example="local",
    ),
    "callbacks": Kind(("callbacks",), _list_modules("callbacks", "mlflow tensorboard wandb"), context=("report",),
                      example="tensorboard"),
    "metrics": Kind(("evaluate.metrics",)),
}  # fmt: skip
"""The kinds of components by name: those of folders of the package, as `fleetfit list` takes them, and three more."""
_MAX_LENGTH = 200  # characters of a name
_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*", re.IGNORECASE)


def list_names(kind: str) -> list[str]:
    """Return the built-in names of a kind of `KINDS`, sorted."""
    return sorted(KINDS[kind].modules)


def match_name(kind: str, name: str) -> str:
    """Return the built-in name that a text means: `ag-news` is `ag_news`, `ResNet-20` is `resnet20`; or the text.

    Hyphens, underscores and capital letters make no difference, unless two names differ in nothing else.
    """
    return find_match(name, list_names(kind))


def find_match(name: str, names: Iterable[str]) -> str:
    """Return which of some names a text means, by the rule of `match_name`; or the text."""
    names = list(names)
    if not isinstance(name, str) or ":" in name or len(name) > _MAX_LENGTH or name in names:
        return name
    matches = [one for one in names if _simplify(one) == _simplify(name)]
    return matches[0] if len(matches) == 1 else name


def _simplify(name: str) -> str:
    return re.sub(r"[-_]", "", name).lower()


def import_home(kind: str, name: str) -> ModuleType:
    """Return the module of a built-in name."""
    return importlib.import_module(KINDS[kind].modules[name])


def describe_entry(kind: str, name: str) -> str:
    """Return the first line of a built-in's docstring: of its module, or of a preset."""
    module = import_home(kind, name)
    entry = getattr(module, name)
    documented = entry if hasattr(entry, "preset") else module
    return (documented.__doc__ or "").strip().partition("\n")[0]


def resolve(kind: str, name: str, key: str | None = None) -> Callable[..., Any]:
    """Return the function of a name.

    Args:
        kind: As in `KINDS`.
        name: `identifier`, `package.module:function` or `file.py:function`.
        key: The key that has the name, for errors; None for the usual one of the kind.

    Raises:
        ConfigError: The name is unknown, malformed, or its module fails to import.
    """
    try:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"a name in {kind} must be text, got {truncate(repr(name))}.")
        return _import_plug_in(kind, name) if ":" in name else _import_built_in(kind, name)
    except ConfigError as error:
        error.key = error.key or key or KINDS[kind].keys[0]
        raise


def _import_built_in(kind: str, name: str) -> Callable[..., Any]:
    name = match_name(kind, name)
    if name.startswith("<") and kind == "options":
        raise ConfigError(
            f"{truncate(name)} is a function, and options go by name, with their parameters: "
            'options = {"file.py:function": {"strength": 0.1}}. A name may also be "package.module:function".'
        )
    if name.startswith("<"):  # what a run's config.toml has in place of an object
        raise ConfigError(
            f"{truncate(name)} stands for an object that a script passed, which no file has. Continue the run with "
            f"ff.resume(folder, {KINDS[kind].keys[0].partition('.')[0]}=...), or write a name."
        )
    if not _IDENTIFIER.fullmatch(name.replace("-", "_")):
        raise ConfigError(
            f'"{truncate(name)}" is not a valid name in {kind}: write a built-in name, "package.module:function" or '
            '"file.py:function".'
        )
    names = list_names(kind)
    if kind == "methods" and (option := match_name("options", name)) in list_names("options"):
        raise ConfigError(
            f'"{name}" is not a method but an option for any method: method.options.{option} = {{}} beside '
            "method.name. `fleetfit list options` has all."
        )
    if name not in names:
        word = name.replace("-", "_").lower()
        key = find_other_name(word) if kind == "callbacks" else ""
        raise ConfigError(
            f'"{truncate(name)}" is not among the {KINDS[kind].noun or kind}: {", ".join(names)}.'
            f"{f' Did you mean the key {key}?' if key else did_you_mean(word, names)}"
            f"{' For a file or a folder, set data.path.' * (kind == 'data')}"
        )
    return typing.cast(Callable[..., Any], getattr(import_home(kind, name), name))


def make_absolute(name: str, folder: Path) -> str:
    """Return a name with a relative `file.py` made absolute, seen from the folder of the run file."""
    file, colon, attribute = name.rpartition(":")
    if not colon or not file.endswith(".py"):
        return name
    path = files.parse_path(file, f'"{name}"')
    return f"{path if path.is_absolute() else (folder / path).resolve()}:{attribute}"


def drop_folders(text: str) -> str:
    """Return a name, or JSON with names, in which a `file.py` has no folder: as on every device."""
    return re.sub(r'(?:^|(?<="))[^"]*[/\\](?=[^"/\\]+\.py:)', "", text)


# ---- the code of a user ----------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=256)
def _list_imports(source: bytes) -> tuple[str, ...]:
    """Return the dotted names that a file may import as modules; those of a relative import begin with dots."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # importing the file raises it
        return ()
    imports: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            imports += [base, *(f"{base}.{alias.name}" if node.module else base + alias.name for alias in node.names)]
    return tuple(imports)


def get_short_name(name: Any) -> str:
    """Return a name of a run file without the path of its function, or the type of an object."""
    text = name if isinstance(name, str) else type(name).__name__
    return text.rpartition(":")[2]


def compute_code_digests(file: Path, root: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of a file of Python and of the files beside it that it imports, by path.

    Args:
        file: The file. Installed ones and those of FleetFit have no digest.
        root: The folder of what it imports; its own by default.
    """
    digests: dict[str, str] = {}
    stack, root = [file], root or file.parent
    while stack:
        path = stack.pop()
        is_installed = str(path).startswith((*_INSTALLED, _OWN_CODE)) or "site-packages" in path.parts
        if str(path) in digests or is_installed:
            continue
        try:
            source = files.read_bytes(path)
        except OSError:
            continue
        digests[str(path)] = hashlib.sha256(source).hexdigest()
        for name in _list_imports(source):
            level = len(name) - len(name.lstrip("."))
            folder = path.parents[min(level, len(path.parents)) - 1] if level else root
            parts = [part for part in name.split(".") if part]
            for count in range(1, len(parts) + 1):
                target = folder.joinpath(*parts[:count])
                stack += [
                    one for one in (target.with_name(f"{target.name}.py"), target / "__init__.py") if one.exists()
                ]
    return digests


def find_code(name: str) -> Path | None:
    """Return the file of a plug-in's name; None for another name, and for a module that is not imported."""
    source, colon, _ = name.rpartition(":")
    if not colon or source.endswith(".py"):
        return Path(source) if colon else None
    file = getattr(sys.modules.get(source), "__file__", None)
    return Path(file) if isinstance(file, str) else None


def compute_file_digest(name: str) -> tuple[Path | None, str]:
    """Return the file of a plug-in's name, which need not be imported yet, and its SHA-256; None and "" without one."""
    source = name.rpartition(":")[0]
    file = find_code(name)
    if file is None and source:
        _see_working_folder()
        with contextlib.suppress(Exception):  # it imports the package, which may raise anything
            origin = getattr(importlib.util.find_spec(source), "origin", None)
            file = Path(origin) if isinstance(origin, str) else None
    with contextlib.suppress(OSError):
        return (None, "") if file is None else (file, hashlib.sha256(files.read_bytes(file)).hexdigest())
    return None, ""


_digests: dict[str, str] = {}
"""Digest of each file of plug-ins, as it was when it was imported."""
_code: dict[str, dict[str, str]] = {}
"""The digests of each plug-in's module and of what it imports, when it was imported."""


def _forget_edited(module: str, file: Path, root: Path) -> None:
    """Remove the modules of a plug-in whose files have changed since their import, so that they are imported again."""
    now = compute_code_digests(file, root)
    if module not in _code or now == _code[module]:
        return
    stale = {str(file)}
    for path in now:
        digests = compute_code_digests(Path(path), root)
        stale |= {path} if any(_digests.get(one, digest) != digest for one, digest in digests.items()) else set()
    for name, loaded in list(sys.modules.items()):
        if getattr(loaded, "__file__", None) in stale:
            del sys.modules[name]
    for path in stale:  # Python takes bytecode for new if seconds and size are those of the file
        with contextlib.suppress(OSError, NotImplementedError):
            Path(importlib.util.cache_from_source(path)).unlink()
    importlib.invalidate_caches()


def _record_code(module: str, file: Path, root: Path) -> None:
    _code[module] = compute_code_digests(file, root)
    _digests.update(_code[module])


# ---- plug-ins --------------------------------------------------------------------------------------------------------

_plug_ins: dict[str, str] = {}
"""File of a plug-in's module -> its name in the configuration."""
_OWN_CODE = f"{PACKAGE_FOLDER}{os.sep}"
_INSTALLED = tuple(sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib"))


_imported: ContextVar[str] = ContextVar("_imported", default="")
"""The name of the plug-in that is being imported."""


def check_not_importing() -> None:
    """Check that no plug-in is being imported. A file that starts a run would start one in each worker that imports it.

    Raises:
        ConfigError: One is.
    """
    if name := _imported.get():
        source = name.rpartition(":")[0]
        raise ConfigError(
            f'{source} starts a run while it is imported for "{name}", and workers import it, too: move the lines that '
            'start runs below `if __name__ == "__main__":`, or into another file.',
            path=source,
        )


def _import_plug_in(kind: str, name: str) -> Callable[..., Any]:
    source, _, attribute = name.rpartition(":")
    from fleetfit.machine import tensor_defaults  # PyTorch, which other names do not need

    with tensor_defaults():  # a plug-in that sets PyTorch's default type does so for itself
        outer = _imported.set(name)
        try:
            module = _import_file(source, name) if source.endswith(".py") else _import_module(source, name)
        except (FleetFitError, KeyboardInterrupt):
            raise
        except BaseException as error:  # also sys.exit, which would end this process without a word
            raise ConfigError(f'"{name}": importing {source} failed: {format_cause(error, typed=True)}') from error
        finally:
            _imported.reset(outer)
    if isinstance(getattr(module, "__file__", None), str):
        _plug_ins.setdefault(str(module.__file__), name)
    function = getattr(module, attribute, None)
    if function is None:
        public = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f'"{name}": {source} has no "{attribute}".{did_you_mean(attribute, public)}')
    if not callable(function):
        raise ConfigError(f'"{name}" in {kind} must be a function or a class, got {type(function).__name__}.')
    return typing.cast(Callable[..., Any], function)


def _import_module(module_name: str, name: str) -> ModuleType:
    if not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f'"{name}": "{module_name}" is not a module name; write "package.module:function".')
    _see_working_folder()
    depth = module_name.count(".")
    if module_name in _code:  # a module that the user's own program imports stays as it is there
        file = find_code(f"{module_name}:")
        if file is not None:
            _forget_edited(module_name, file, file.parents[depth])
    is_new = module_name not in sys.modules
    module = importlib.import_module(module_name)
    file = find_code(f"{module_name}:")
    if is_new and file is not None and file.name != "__init__.py":
        _record_code(module_name, file, file.parents[depth])
    return module


def _see_working_folder() -> None:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # an installed script does not see it
        sys.path.append(str(Path.cwd()))


def _import_file(file_name: str, name: str) -> ModuleType:
    try:
        path = files.parse_path(file_name).resolve()
        files.check_file(path, ConfigError)
    except (ConfigError, OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise ConfigError(f'"{name}": {error}', path=file_name) from None
    module_name = f"_fleetfit_file_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    _forget_edited(module_name, path, path.parent)
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f'"{name}": {path} cannot be read as Python.', path=path)
    if str(path.parent) not in sys.path:  # last, so that the file's neighbors can be imported and shadow nothing
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # before running it: dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(module_name, None)
        raise
    _record_code(module_name, path, path.parent)
    return module


@contextlib.contextmanager
def explain_plug_ins() -> Iterator[None]:
    """Turn an exception of a plug-in into a `ConfigError` that names it; others stay as they are.

    Raises:
        ConfigError: A plug-in raised another error than FleetFit's.
    """
    try:
        yield
    except FleetFitError:
        raise
    except Exception as error:
        plug_in = find_plug_in(error)
        if plug_in is None or isinstance(error, OSError | MemoryError):
            raise
        raise ConfigError(f"{plug_in} {describe_failure(error)}.") from error


def find_plug_in(error: BaseException) -> str | None:
    """Return the plug-in that raised an error, with file and line; None if FleetFit raised it.

    An error that a library raises belongs to the library's caller. A plug-in's code is the module that a configuration
    names, and every module that is neither FleetFit's nor installed.
    """
    culprit = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        file = frame.f_code.co_filename
        if file in _plug_ins:
            culprit = f'"{_plug_ins[file]}" ({Path(file).name}, line {line})'
        elif file.startswith(_OWN_CODE):
            culprit = None
        elif culprit is not None and not file.startswith((*_INSTALLED, "<")):
            culprit = f"{culprit.partition(' (')[0]} ({Path(file).name}, line {line})"
    return culprit


def describe_failure(error: BaseException) -> str:
    """Return how a plug-in failed, as the end of a sentence."""
    if isinstance(error, SystemExit):
        return f"called sys.exit({error.code!r}), which would end the whole program; raise an error instead"
    return f"raised {format_cause(error, typed=True)}"


# ---- keys that other libraries name otherwise ------------------------------------------------------------------------

_NAMES_ELSEWHERE = {
    "rounds": "num_rounds num_server_rounds communication_rounds comm_round global_rounds global_epochs",
    "seed": "random_state random_seed manual_seed",
    "init_from": "initial_parameters resume_from_checkpoint",
    "callbacks": "loggers logger trackers report_to",
    "data.name": "dataset dataset_name",
    "data.path": "data_dir data_path dataset_path",
    "data.validation": "val_split validation_split validation_size val_size",
    "data.test": "test_size test_split",
    "data.label": ":label :target :y :labels data.y label_column target_column labels_column",
    "data.length": "max_length max_seq_length block_size sequence_length",
    "data.size": "image_size img_size input_size",
    "data.sample_rate": "sampling_rate",
    "data.n_mels": "num_mels",
    "data.partition.clients": "clients num_clients n_clients num_partitions num_supernodes client_num_in_total",
    "data.partition.kind": "partitioner partition_method",
    "data.partition.alpha": ":alpha data.alpha dirichlet_alpha partition_alpha",
    "data.partition.min_samples": "min_partition_size",
    "data.partition.balance": "self_balancing",
    "data.partition.shards_per_client": "num_shards_per_partition",
    "model.name": "model_name arch architecture",
    "model.checkpoint": "pretrained from_pretrained",
    "peft.rank": "r lora_r lora_rank",
    "peft.alpha": "lora_alpha",
    "peft.targets": "target_modules",
    "fleet.groups": "budgets devices device_budgets",
    "method.name": "algorithm strategy federated_optimizer aggregation",
    "method.options.fedprox.mu": ":mu method.mu local.mu proximal_mu prox_mu",
    "method.options.fedavgm.momentum": "server_momentum",
    "method.options.fedavgm.lr": "server_learning_rate server_lr",
    "local.optimizer": "optim client_optimizer",
    "local.lr": "learning_rate eta client_lr",
    "local.epochs": "num_epochs local_epochs max_epochs num_train_epochs",
    "local.batch_size": "per_device_train_batch_size train_batch_size client_batch_size",
    "local.weight_decay": "l2 wd",
    "local.betas": "adam_beta1 adam_beta2",
    "local.eps": "adam_epsilon",
    "local.clip_norm": "max_grad_norm gradient_clip_val grad_clip",
    "local.schedule": "lr_scheduler lr_scheduler_type scheduler lr_schedule",
    "evaluate.patience": ":patience early_stopping early_stopping_patience early_stopping_rounds n_iter_no_change",
    "cohort.fraction": "fraction_fit fraction_train client_fraction participation sample_fraction",
    "cohort.count": "clients_per_round client_num_per_round min_fit_clients min_train_nodes num_clients_per_round "
    "cohort.clients",
    "cohort.selection": "client_selection client_sampler",
    "privacy.clipping_norm": "l2_norm_clip privacy.max_grad_norm",
    "privacy.noise_multiplier": "sigma noise_scale",
    "privacy.epsilon": "target_epsilon",
    "privacy.delta": "target_delta",
    "engine.device": ":device accelerator",
    "engine.workers": "num_workers n_workers n_jobs num_processes",
    "engine.precision": "fp16 bf16 mixed_precision amp",
    "engine.compile": "torch_compile",
    "evaluate.every": "eval_every eval_steps test_every eval_interval frequency_of_the_test",
    "evaluate.batch_size": "per_device_eval_batch_size eval_batch_size test_batch_size",
    "evaluate.clients": "fraction_evaluate",
    "compare.row": ":methods",
    "out": "output_dir output out_dir save_dir logging_dir",
    "progress": "verbose quiet silent show_progress",
    "checkpoint.every": "save_steps save_every checkpoint_every",
    "checkpoint.keep": "save_total_limit save_top_k",
}
OTHER_NAMES = {word: key for key, words in _NAMES_ELSEWHERE.items() for word in words.split()}
"""Keys of run files, by what Flower, Opacus, PyTorch, Lightning, Hugging Face and FedML call them.

A name has its section if it means this only there, and a colon if it means this only outside of all sections.
"""


def find_other_name(key: str) -> str:
    """Return the key that a dotted key of another library means, or its last part; "" for none."""
    return OTHER_NAMES.get(key) or OTHER_NAMES.get(key.rpartition(".")[2]) or OTHER_NAMES.get(f":{key}", "")


# ---- attributes that other libraries name otherwise ------------------------------------------------------------------

_ATTRIBUTES_ELSEWHERE = {
    "Run": {
        "run.accuracy(), or run.evaluate(data) for other data": "score test validate",
        "run.predict(data)": "transform predict_proba decision_function",
        "fleetfit.run(...), which trains, or fleetfit.resume(run.folder)": "fit train partial_fit",
        "run.to_frame(), a line for each round": "history logs df to_pandas cv_results_",
        'run.to_frame()[["local", "global"]].dropna().plot()': "plot",
        "run.model()": "module state_dict best_estimator_",
        "run.folder, which fleetfit.load opens, or run.export(out)": "save save_pretrained save_model to_onnx",
    },
    "Comparison": {
        "comparison.to_frame(), a line for each run": "df to_pandas cv_results_",
        "comparison.folder, which has plots and a page": "plot",
        "comparison.table, or comparison.differences": "summary best best_run",
    },
}
OTHER_ATTRIBUTES = {
    owner: {word: use for use, words in uses.items() for word in words.split()}
    for owner, uses in _ATTRIBUTES_ELSEWHERE.items()
}
"""What to use, by class and by what scikit-learn, pandas, Lightning and Hugging Face call it."""


def find_attribute(owner: object, name: str) -> Any:
    """Refuse an attribute that an object lacks, as the `__getattr__` of its class.

    Raises:
        AttributeError: Always, with what to use; without a hint the usual one, or that of a property.
    """
    kind = type(owner).__name__
    if use := OTHER_ATTRIBUTES.get(kind, {}).get(name):
        raise AttributeError(f"{kind!r} object has no attribute {name!r}. Use {use}.", name=name, obj=owner)
    return object.__getattribute__(owner, name)
