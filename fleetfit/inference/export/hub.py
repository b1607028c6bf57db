"""Upload an export folder to the Hugging Face hub. Only `push` uploads files."""

import importlib
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import FleetFitError, MissingExtra, RunError


def push(folder: str | Path, repo: str, *, private: bool = True, message: str = "Upload from FleetFit") -> str:
    """Upload a folder to a model repository on the hub, creating it if necessary.

    The login is that of `hf auth login` or HF_TOKEN. Other files in the repository stay.

    Args:
        folder: Any export folder.
        repo: "owner/name", or "name" in the user's account.
        private: Whether a new repository is private. An existing one is not changed.
        message: Commit message.

    Returns:
        Its URL.

    Raises:
        RunError: The folder is empty, network or token are missing, or the hub refuses the upload.
        MissingExtra: `huggingface_hub` is not installed.
    """
    path = files.parse_path(folder)
    if not path.is_dir() or not any(path.iterdir()):
        raise RunError(f"{path} is not a folder with files. Export a level first.", path=path)
    try:
        library: Any = importlib.import_module("huggingface_hub")
    except ImportError:
        raise MissingExtra("hub", "Uploading to the hub") from None
    token = library.get_token()
    if not token:
        raise RunError(
            f"uploading to {repo} needs a token of the hub: log in with `hf auth login`, or set HF_TOKEN.", key="hub"
        )
    try:
        api = library.HfApi(token=token, library_name="fleetfit")
        repository = api.create_repo(repo, repo_type="model", private=private, exist_ok=True)
        api.upload_folder(repo_id=repository.repo_id, folder_path=path, repo_type="model", commit_message=message)
    except Exception as error:  # errors of the network, the hub or the library
        raise _make_error(repo, error, token) from None
    return str(repository)


def _make_error(repo: str, error: Exception, token: str) -> FleetFitError:
    """Return an error with the failure and a remedy, without the token."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        advice = "The token is invalid or has no write access. Create one with write access and log in again."
    elif isinstance(error, ValueError):
        advice = 'Name the repository "owner/name", or "name" for your account.'
    elif status is None:
        advice = "Check the network. The folder is complete, and can be pushed later."
    else:
        advice = "The folder is complete, and can be pushed again."
    message = " ".join(f"{type(error).__name__}: {error}".replace(token, "***").split())
    return RunError(f"uploading to {repo} on the Hugging Face hub failed: {message.rstrip('.')}. {advice}", key="hub")
