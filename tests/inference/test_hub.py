"""Uploading a folder: what the hub's library is asked for, and every way in which it fails as one sentence."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support import raises

from fleetfit.errors import MissingExtra, RunError
from fleetfit.inference.export.hub import push

hub: Any = pytest.importorskip("huggingface_hub", reason="the extra `hub` is not installed")
TOKEN = "hf_secretsecretsecret"


class Hub:
    """The hub: keeps what it was asked for, and refuses if told to."""

    def __init__(self, refusal: Exception | None = None) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.refusal = refusal

    def __call__(self, **arguments: Any) -> "Hub":
        self.asked.append(("api", arguments))
        return self

    def create_repo(self, repo_id: str, **arguments: Any) -> Any:
        self.asked.append(("create", {"repo_id": repo_id, **arguments}))
        full = repo_id if "/" in repo_id else f"me/{repo_id}"
        return hub.RepoUrl(f"https://huggingface.co/{full}", endpoint="https://huggingface.co")

    def upload_folder(self, **arguments: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.asked.append(
            ("upload", {**arguments, "files": sorted(p.name for p in Path(arguments["folder_path"]).iterdir())})
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "out" / "deep").mkdir(parents=True)
    (tmp_path / "out" / "model.onnx").write_bytes(b"1")
    return tmp_path / "out"


def refused_by(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(hub, "HfApi", Hub(error))
    with pytest.raises(RunError) as raised:
        push(folder, "me/level2")
    assert TOKEN not in str(raised.value) and raised.value.__suppress_context__ and "\n" not in str(raised.value)
    return str(raised.value)


def test_a_repository_is_made_and_the_folder_uploaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Hub()
    monkeypatch.setattr(hub, "HfApi", fake)
    assert push(folder, "level2") == "https://huggingface.co/me/level2"
    (_, api), (first, repository), (second, sent) = fake.asked
    assert (api["token"], first, second) == (TOKEN, "create", "upload")
    assert repository == {"repo_id": "level2", "repo_type": "model", "private": True, "exist_ok": True}
    assert sent["repo_id"] == "me/level2" and sent["repo_type"] == "model" and "delete_patterns" not in sent
    assert sent["files"] == ["deep", "model.onnx"] and sent["commit_message"] == "Upload from FleetFit"
    push(str(folder), "me/open", private=False, message="Level 2")
    assert fake.asked[4][1]["private"] is False and fake.asked[5][1]["commit_message"] == "Level 2"


def test_the_library_gets_its_arguments() -> None:
    """The names and arguments of the real library, which the fake one above does not check."""
    import inspect

    api = hub.HfApi(token=TOKEN, library_name="fleetfit")
    assert {"repo_type", "private", "exist_ok"} <= set(inspect.signature(api.create_repo).parameters)
    sent = set(inspect.signature(api.upload_folder).parameters)
    assert {"repo_id", "folder_path", "repo_type", "commit_message"} <= sent and callable(hub.get_token)


def test_nothing_to_upload(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path in (tmp_path / "empty", tmp_path / "nowhere"):
        with raises(RunError, path=path):
            push(path, "me/level2")


def test_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with raises(RunError, "`hf auth login`", "HF_TOKEN", key="hub"):
        push(folder, "me/level2")


def test_no_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (hub.errors.OfflineModeIsEnabled(f"offline,\nwith {TOKEN}"), ConnectionError("refused."), OSError()):
        message = refused_by(error, folder, monkeypatch)
        assert type(error).__name__ in message and ".." not in message


@pytest.mark.parametrize(
    ("status", "advice"), [(401, "with write access"), (403, "with write access"), (500, "can be pushed again")]
)
def test_the_hub_refuses(folder: Path, monkeypatch: pytest.MonkeyPatch, status: int, advice: str) -> None:
    class Refusal(Exception):
        response = SimpleNamespace(status_code=status)

    assert advice in refused_by(Refusal("no"), folder, monkeypatch)


def test_a_name_that_is_none(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the real library, which looks at the name before it asks anybody."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with raises(RunError, '"owner/name"', key="hub"):
        push(folder, "not a/name/at all")


def test_without_the_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with raises(MissingExtra, extra="hub"):
        push(folder, "me/level2")
