"""What the owner of a node allows: a message outside of it is refused before the node's data are read.

`PolicyCheck` judges the terms of a run (see `fleetfit.fleet.terms`), to which each message is held. It counts what the
node has answered by the node's log. A run that must be approved waits in the node's folder until `fleetfit flower
approve`.
"""

import json
from collections.abc import Mapping
from datetime import datetime, time
from pathlib import Path
from typing import Any

from fleetfit import files
from fleetfit.errors import ConfigError, RunError, make_printable
from fleetfit.fleet.node_log import NodeLog, format_now, is_whole_job
from fleetfit.fleet.protocol import Header
from fleetfit.fleet.settings import NodePolicy, NodePrivacy, NodeSettings, parse_hours
from fleetfit.fleet.terms import Terms, compute_fingerprint, is_current, parse_terms
from fleetfit.planner import parse_amount
from fleetfit.privacy import compute_epsilon

PASSING = ("policy.hours", "policy.jobs_a_day", "policy.bytes_a_day")
"""Keys of refusals that pass with time."""
_MAX_WAITING = 20


class PolicyCheck:
    """The owner's decision on each message."""

    def __init__(self, settings: NodeSettings, log: NodeLog) -> None:
        """Take `[policy]` and `[secure]` of a node's configuration.

        Raises:
            MissingExtra: The accountant of `[policy] privacy` is not installed.
        """
        self._policy = settings.policy or NodePolicy()
        self._is_member, self._log = settings.secure is not None, log
        self._approvals = Approvals(Path(settings.folder))
        if self._policy.privacy is not None:
            compute_epsilon(1.0, 1.0, 1, self._policy.privacy.delta)

    def check(self, header: Header, received: int) -> float | None:
        """Refuse a message that the owner does not allow.

        Args:
            header: Of the message, which keeps to its terms.
            received: Bytes of the message.

        Returns:
            The epsilon that the run has spent with this message; None where the owner does not bound it.

        Raises:
            RunError: It is refused; the key is that of the node's configuration.
        """
        policy, terms = self._policy, header["terms"]
        if self._is_member and not terms["secure"]:
            raise RunError(
                "this node has a key of a member, and takes part in runs with [secure] only.", key="secure.member"
            )
        for key, allowed in (("method", policy.methods), ("model", policy.models)):
            name = terms[key].get("name")
            if allowed is not None and name not in allowed:
                raise RunError(
                    f'the owner of this node allows the {key}s {", ".join(allowed)}, and the run has "{name}".',
                    key=f"policy.{key}s",
                )
        spent = None if policy.privacy is None else self._check_privacy(policy.privacy, header)
        if policy.hours is not None and not _is_within(*parse_hours(policy.hours), datetime.now().time()):
            raise RunError(
                f"the owner of this node allows work from {policy.hours.replace('-', ' to ')}.", key="policy.hours"
            )
        self._check_amounts(policy, header, received)
        if policy.approval:
            self._approvals.check(terms)
        return spent

    def _check_privacy(self, limits: NodePrivacy, header: Header) -> float | None:
        settings, key = header["terms"]["privacy"], "policy.privacy"
        norm = settings.get("clipping_norm")
        if not isinstance(norm, float | int) or not 0 < norm <= limits.clipping_norm:
            raise RunError(
                f"the owner of this node allows runs with [privacy] and a clipping norm of at most "
                f"{limits.clipping_norm:g}; this run has {'none' if norm is None else norm}.",
                key=f"{key}.clipping_norm",
            )
        if "job" not in header:
            return None
        noise, rate = header["privacy"].get("noise_multiplier"), header["privacy"].get("rate")
        if type(noise) is not float or type(rate) is not float or not (0 < noise < 1e6 and 0 < rate <= 1):
            raise RunError("the server does not say how much noise the run adds.", key=key)
        # a server that does not count its rounds is charged for the jobs that the node has done
        rounds = max(header["job"]["round"], self._log.count_trained(compute_fingerprint(header["terms"]))) + 1
        spent = compute_epsilon(noise, rate, rounds, limits.delta, bool(header["terms"]["secure"]))
        if spent > limits.epsilon:
            raise RunError(
                f"with this round the run would spend epsilon {spent:.2f} at delta {limits.delta:g}, and the owner "
                f"of this node allows {limits.epsilon:g}.",
                key=f"{key}.epsilon",
            )
        return spent

    def _check_amounts(self, policy: NodePolicy, header: Header, received: int) -> None:
        jobs, total = self._log.count_today()
        is_job = is_whole_job(header["what"], header.get("secure", {}).get("phase"))
        if policy.jobs_a_day is not None and is_job and jobs >= policy.jobs_a_day:
            raise RunError(f"the owner of this node allows {policy.jobs_a_day} jobs a day.", key="policy.jobs_a_day")
        limit = policy.bytes_a_day
        if limit is not None and total + received > parse_amount(limit, "memory_bytes"):
            raise RunError(f"the owner of this node allows {limit} a day, both ways.", key="policy.bytes_a_day")


def _is_within(begin: time, end: time, now: time) -> bool:
    return begin <= now < end if begin < end else now >= begin or now < end


class Approvals:
    """The runs that a node's owner has approved, and those that wait for it, in the node's folder."""

    def __init__(self, folder: Path) -> None:
        self._approved, self._waiting = folder / "approved.json", folder / "waiting.json"

    def check(self, terms: Terms) -> None:
        """Refuse a run that is not approved, and let it wait.

        Raises:
            RunError: It is not.
        """
        fingerprint = compute_fingerprint(terms)
        if fingerprint in self.read_approved():
            return
        waiting = {key: table for key, table in self.read_waiting().items() if key != fingerprint}
        newest = dict([*waiting.items(), (fingerprint, dict(terms))][-_MAX_WAITING:])
        _write_json(self._waiting, newest)
        raise RunError(
            f"its owner has not approved this run, whose fingerprint is {fingerprint}. On the node: fleetfit flower "
            f"approve NODE.toml {fingerprint[:12]}.",
            key="policy.approval",
        )

    def find_waiting(self, start: str) -> tuple[str, Terms]:
        """Return fingerprint and terms of the waiting run whose fingerprint begins so.

        Raises:
            ConfigError: None does, or several do.
        """
        waiting = self.read_waiting()
        fingerprint = _find_one(waiting, start, "waits for approval")
        return fingerprint, waiting[fingerprint]

    def approve(self, fingerprint: str, terms: Terms) -> None:
        """Approve a run."""
        _write_json(self._approved, {**self.read_approved(), fingerprint: {"time": format_now(), "terms": terms}})

    def withdraw(self, start: str) -> str:
        """Withdraw an approval; return its fingerprint.

        Raises:
            ConfigError: No approved run, or several, begin so.
        """
        approved = self.read_approved()
        fingerprint = _find_one(approved, start, "is approved")
        _write_json(self._approved, {key: entry for key, entry in approved.items() if key != fingerprint})
        return fingerprint

    def read_approved(self) -> dict[str, Any]:
        """Return the approved runs by fingerprint: when, and their terms."""
        return _read_json(self._approved)

    def read_waiting(self) -> dict[str, Terms]:
        """Return the terms of the runs that wait, by fingerprint."""
        tables = _read_json(self._waiting)
        waiting = {key: terms for key, terms in tables.items() if is_current(terms)}  # others are of another version
        for fingerprint, terms in waiting.items():
            if compute_fingerprint(parse_terms(terms)) != fingerprint:
                raise ConfigError(f"{self._waiting} is damaged; remove it.", path=self._waiting)
        return waiting

    def format_lines(self) -> list[str]:
        """Return a line for each run that waits, and for each that is approved."""
        approved = self.read_approved()
        runs = [("waiting", key, terms) for key, terms in self.read_waiting().items() if key not in approved]
        runs += [("approved", key, entry["terms"]) for key, entry in approved.items()]
        lines = [
            f"{state:9} {key[:12]}  {terms['name'] or 'without a name'}: {terms['method'].get('name')}, model "
            f"{terms['model'].get('name')}, {terms['rounds']} rounds"
            f"{', secure' * bool(terms['secure'])}{', private' * bool(terms['privacy'])}"
            for state, key, terms in runs
        ]
        return [make_printable(line) for line in lines] or ["No run waits for approval, and none is approved."]


def _find_one(table: Mapping[str, Any], start: str, what: str) -> str:
    found = [key for key in table if key.startswith(start)]
    if len(found) != 1 or len(start) < 8:
        raise ConfigError(
            f'"{start}" begins the fingerprint of {len(found) or "no"} run{"s" * (len(found) > 1)} that {what}. Give '
            f"at least 8 of its digits: {', '.join(key[:12] for key in table) or 'there is none'}.",
            key="fingerprint",
        )
    return found[0]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        table = files.parse_json(files.read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", path=path) from None
    if not isinstance(table, dict):
        raise ConfigError(f"{path} is damaged; remove it.", path=path)
    return table


def _write_json(path: Path, table: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with files.atomic_write(path, 0o600) as file:
        file.write(json.dumps(table, indent=1).encode())
