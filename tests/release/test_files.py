"""Workflows, CITATION.cff and the like say the same as the rest of the repository, and ask for no more than they need.

`make check-files` holds them against their schemas.
"""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import fleetfit

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


def _allowed(job: dict[str, Any]) -> set[str]:
    """Return what a job may do beside reading: speak to PyPI, or make a release, of whose code it runs nothing."""
    if job.get("environment") == "pypi":
        return {"id-token"}
    runs = [step.get("run", "") for step in job["steps"] if "run" in step]
    checked_out = any("checkout" in step.get("uses", "") for step in job["steps"])
    alone = len(runs) == 1 and runs[0].startswith("gh release create ") and not checked_out
    return {"contents"} if alone else set()


def complaints(text: str) -> list[str]:
    """Return what is wrong with a workflow."""
    workflow = yaml.safe_load(text)
    problems = [f"not by its hash: {line.strip()}" for line in re.findall(r"^.*\buses:.*$", text, re.MULTILINE)
             if not re.fullmatch(r"\s*- uses: [\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)]  # fmt: skip
    if workflow.get("permissions") != {"contents": "read"}:
        problems.append("it may do more than read")
    for name, job in workflow["jobs"].items():
        if set(job.get("permissions", {})) - _allowed(job):
            problems.append(f"{name} may do more than read")
        if "timeout-minutes" not in job:
            problems.append(f"{name} may run for hours")
    if "secrets." in text:
        problems.append("a secret")
    for step in steps(workflow):
        if "checkout" in step.get("uses", "") and step.get("with", {}).get("persist-credentials") is not False:
            problems.append("checkout leaves its credentials behind")
        if "${{" in step.get("run", ""):
            problems.append(f"text of others may become a command: {step['run']}")
    return problems


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_keeps_the_rules(path: Path) -> None:
    assert not complaints(path.read_text())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", "@v4"),
        ("contents: read", "contents: write"),
        ("environment: pypi", "environment: other"),
        ("id-token: write", "packages: write"),
        ("timeout-minutes: 10", "continue-on-error: true"),
        ("persist-credentials: false", "fetch-depth: 0"),
        ('"$GITHUB_REF_NAME"', '"${{ github.ref_name }}"'),
        ("gh release create", "make test-package; gh release create"),
        ("path: dist\n", "path: dist\n          token: ${{ secrets.PYPI }}\n"),
    ],
)
def test_a_workflow_that_breaks_a_rule_is_seen(old: str, new: str) -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert old in text
    assert complaints(text.replace(old, new))


def test_workflows_run_existing_targets() -> None:
    """Each target of make exists, and each Python that the package names is tried."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    runs = "\n".join(step.get("run", "") for path in WORKFLOWS for step in steps(yaml.safe_load(path.read_text())))
    called = {
        word for line in re.findall(r"^make (.+)$", runs, re.MULTILINE) for word in line.split() if "=" not in word
    }
    assert {"test", "test-fleet", "test-package", "docs", "sbom"} <= called <= targets
    tried = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    named = [re.fullmatch(r"Programming Language :: Python :: (3\.\d+)", line) for line in PROJECT["classifiers"]]
    assert tried["linux"]["strategy"]["matrix"]["python"] == [match[1] for match in named if match]
    for machine in ("macos", "windows"):
        assert any(machine in row["os"] for row in tried["elsewhere"]["strategy"]["matrix"]["include"])


def test_a_release_has_packages_and_bill_of_materials() -> None:
    """Every file that one job keeps, another one downloads and attaches, once PyPI has the packages."""
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())["jobs"]
    artifacts = {line.strip() for step in jobs["build"]["steps"] if "upload-artifact" in step.get("uses", "")
            for line in step["with"]["path"].splitlines()}  # fmt: skip
    fetched, deploy = jobs["page"]["steps"]
    assert "download-artifact" in fetched["uses"] and fetched["with"] == {"path": "dist", "merge-multiple": True}
    assert {word for word in deploy["run"].split() if word.startswith("dist/")} == artifacts
    assert "publish" in jobs["page"]["needs"] and jobs["page"]["permissions"] == {"contents": "write"}
    assert [name for name, job in jobs.items() if "contents" in job.get("permissions", {})] == ["page"]


def test_the_citation_matches_the_package() -> None:
    assert CITATION["version"] == fleetfit.__version__
    assert CITATION["license"] == PROJECT["license"]
    assert [author["name"] for author in CITATION["authors"]] == [author["name"] for author in PROJECT["authors"]]
    assert f"\n## {fleetfit.__version__} (" in (ROOT / "CHANGELOG.md").read_text()
    assert CITATION.get("repository-code") == PROJECT.get("urls", {}).get("Repository")


def test_tools_of_releases_are_pinned() -> None:
    lines = [line for line in (ROOT / "release" / "requirements.txt").read_text().splitlines() if line[:1] != "#"]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert {"build", "twine", "spdx-tools", "check-jsonschema"} <= {line.split("==")[0] for line in lines}
