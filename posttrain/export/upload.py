"""Upload of an exported folder to the model hub, with huggingface_hub and its login."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from posttrain import hub
from posttrain.errors import PosttrainError, RunError, UserError
from posttrain.export.run import REPORT


def check_name(repo: str) -> None:
    """Raise UserError if `repo` is not an `OWNER/NAME` of the hub."""
    if repo.count("/") != 1 or not hub.looks_like_id(repo):
        raise UserError(f"`{repo}` is not a model name of the hub", allowed="hub:OWNER/NAME")


def check_login() -> None:
    """Raise UserError if nothing can be uploaded: offline mode or not signed in."""
    from huggingface_hub import get_token

    if setting := hub.offline_setting():
        raise UserError(f"{setting} is set, so uploads are disabled", hint=f"unset {setting.partition('=')[0]}")
    if get_token() is None:
        raise UserError("not signed in to the hub", hint="`hf auth login`, or HF_TOKEN with a token that may write")


def upload(folder: Path, repo: str, *, public: bool) -> dict[str, Any]:
    """Upload a folder as the newest commit of `repo`; a missing repository is created, private unless `public`.

    Returns `url`, `commit` and `private`. Raises UserError if the hub refuses the upload, RunError if it cannot be
    reached; the folder is kept.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    api = HfApi()
    try:
        made = _create_repo(api, repo, public)
        done = api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Export by posttrain", ignore_patterns=[REPORT]
        )
        private = (not public) if made else bool(api.repo_info(repo).private)
    except HfHubHTTPError as error:
        raise _upload_error(error, repo, folder) from None
    except Exception as error:
        raise RunError(
            f"the hub cannot be reached: {type(error).__name__}: {_first_line(error)}", hint=_upload_hint(repo, folder)
        ) from None
    return {"url": f"{api.endpoint}/{repo}", "commit": done.oid, "private": private}


def _create_repo(api: Any, repo: str, public: bool) -> bool:
    """Create the repository and return True; return False if it exists, with its visibility unchanged."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        api.create_repo(repo, private=not public)
    except HfHubHTTPError as error:
        if error.response.status_code != 409:
            raise
        return False
    return True


def _upload_error(error: Any, repo: str, folder: Path) -> PosttrainError:
    """Return the error for a refused upload, with a hint for the HTTP status."""
    status = error.response.status_code
    what = f"the hub refuses {repo} ({status}): {_first_line(getattr(error, 'server_message', None) or error)}"
    if status in (401, 403):
        return UserError(what, hint="the token must be allowed to write there: `hf auth login`, or another HF_TOKEN")
    if status < 500:
        return UserError(what, hint=_upload_hint(repo, folder))
    return RunError(what, hint=_upload_hint(repo, folder))


def _upload_hint(repo: str, folder: Path) -> str:
    return f"the export is kept; upload it with: hf upload {repo} {folder}"


def _first_line(text: Any) -> str:
    """Return the first line of an error, with the token masked if it occurs there."""
    from huggingface_hub import get_token

    line = next((line for line in str(text).splitlines() if line.strip()), type(text).__name__)
    token = get_token()
    return line.replace(token, "***") if token else line
