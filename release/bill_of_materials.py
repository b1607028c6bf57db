"""The bill of materials of a release in SPDX 2.3: FleetFit, what it needs, and what the tests ran with.

Versions are those of constraints.txt, names, licenses and requirements what the packages installed in an environment
say of themselves. Two runs with the same versions write the same bytes, apart from the time, which is
`SOURCE_DATE_EPOCH` where that is set. Runs in `.venv-release`, and reads the environment that is named.
"""

import argparse
import os
import re
import sys
import uuid
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path

from license_expression import ExpressionError, get_spdx_licensing
from packaging.requirements import Requirement
from spdx_tools.spdx.model import (
    Actor,
    ActorType,
    CreationInfo,
    Document,
    ExternalPackageRef,
    ExternalPackageRefCategory,
    Package,
    Relationship,
    RelationshipType,
    SpdxNoAssertion,
)
from spdx_tools.spdx.validation.document_validator import validate_full_spdx_document
from spdx_tools.spdx.writer.write_anything import write_file

ROOT = Path(__file__).parents[1]
OWN = "fleetfit"
SPDX = get_spdx_licensing()


def normal(name: str) -> str:
    """Return a package's name as indexes write it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned() -> dict[str, str]:
    """Return the versions of constraints.txt, by name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {normal(name): version for name, _, version in (x.partition("==") for x in lines if x[:1] not in ("", "#"))}


def license(found: Distribution) -> object:
    """Return the SPDX expression that a package gives as its license; NOASSERTION where it gives none."""
    given = found.metadata.get("License-Expression") or ""
    if not given and len(found.metadata.get("License") or "") < 60:  # otherwise it is the license's whole text
        given = found.metadata.get("License") or ""
    try:
        return SPDX.parse(given, validate=True) if given else SpdxNoAssertion()
    except ExpressionError:
        return SpdxNoAssertion()


def requirements(found: Distribution) -> Iterator[tuple[str, bool]]:
    """Yield the names of what a package needs in this environment, and whether only an extra needs it."""
    extras = found.metadata.get_all("Provides-Extra") or []
    for text in found.requires or ():
        one = Requirement(text)
        if one.marker is None or one.marker.evaluate({"extra": ""}):
            yield normal(one.name), False
        elif any(one.marker.evaluate({"extra": extra}) for extra in extras):
            yield normal(one.name), True


def described(name: str, version: str, found: Distribution) -> Package:
    """Return what SPDX says of a package."""
    return Package(
        spdx_id=f"SPDXRef-{name}", name=name, version=version, files_analyzed=False,
        download_location=SpdxNoAssertion() if name == OWN else f"https://pypi.org/project/{name}/{version}/",
        license_declared=license(found), license_concluded=SpdxNoAssertion(), copyright_text=SpdxNoAssertion(),
        summary=found.metadata.get("Summary"),
        external_references=[ExternalPackageRef(
            ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", f"pkg:pypi/{name}@{version}"
        )],
    )  # fmt: skip


def document(installed: Iterable[Distribution], created: datetime) -> Document:
    """Return the bill.

    Raises:
        LookupError: A pinned package is not installed, or in another version.
    """
    there = {normal(one.metadata["Name"]): one for one in installed}
    versions = {OWN: there[OWN].version, **pinned()}
    wrong = {n: v for n, v in versions.items() if n not in there or there[n].version.partition("+")[0] != v}
    if wrong:
        raise LookupError(
            "not in the environment as constraints.txt has them: " + ", ".join(map("==".join, wrong.items()))
        )
    relations = [Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, f"SPDXRef-{OWN}")]
    for name in versions:
        needs = dict(sorted(requirements(there[name]), reverse=True))  # needed outright wins over needed by an extra
        for other, optional in sorted(needs.items()):
            if other not in versions or other == name or (optional and name != OWN):
                continue
            relations.append(
                Relationship(f"SPDXRef-{other}", RelationshipType.OPTIONAL_DEPENDENCY_OF, f"SPDXRef-{name}")
                if optional
                else Relationship(f"SPDXRef-{name}", RelationshipType.DEPENDS_ON, f"SPDXRef-{other}")
            )
    told = "\n".join(f"{name}=={version}" for name, version in versions.items())
    title = f"{OWN}-{versions[OWN]}"
    info = CreationInfo(
        spdx_version="SPDX-2.3", spdx_id="SPDXRef-DOCUMENT", name=title, created=created,
        document_namespace=f"https://spdx.org/spdxdocs/{title}-{uuid.uuid5(uuid.NAMESPACE_OID, told)}",
        creators=[Actor(ActorType.ORGANIZATION, "The FleetFit authors"), Actor(ActorType.TOOL, "spdx-tools")],
    )  # fmt: skip
    return Document(info, [described(name, versions[name], there[name]) for name in versions], relationships=relations)


def main() -> int:
    """Write the bill, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("site_packages", help="of the environment that `make env` made")
    parser.add_argument("out", type=Path, help="the file; its name ends in .spdx.json")
    asked = parser.parse_args()
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    created = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    try:
        found = document(distributions(path=[asked.site_packages]), created.replace(microsecond=0, tzinfo=None))
    except LookupError as error:
        print(f"sbom: {error}. `make env` installs them.", file=sys.stderr)
        return 1
    wrong = validate_full_spdx_document(found)
    for one in wrong:
        print(f"sbom: {one.validation_message}", file=sys.stderr)
    if wrong:
        return 1
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    write_file(found, str(asked.out), validate=False)
    unknown = [p.name for p in found.packages if isinstance(p.license_declared, SpdxNoAssertion)]
    print(f"{asked.out}: {len(found.packages)} packages, {len(found.relationships)} relations; "
          f"{len(unknown)} packages give no license as an SPDX expression.")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
