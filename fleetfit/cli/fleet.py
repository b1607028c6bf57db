"""The verbs `fleetfit flower ...`: an app for `flwr run`, keys and certificates, nodes, and resuming a run."""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from fleetfit.cli.arguments import (
    Changes,
    parse_folder,
    parse_input_file,
    parse_output_file,
    path_argument,
    path_option,
)
from fleetfit.errors import ConfigError, MissingExtra, RunError

app = typer.Typer(
    no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]},
    help="Train on a real fleet over the network, with Flower. See docs/fleet.md.",
)  # fmt: skip


@app.command()
def init(
    folder: Annotated[Path, path_argument(parse_folder, "Output folder; it must be new or empty.")],
    run_file: Annotated[Path | None, path_option(parse_input_file, "Run file to copy to run.toml.", "--run")] = None,
) -> None:
    """Write an app folder for `flwr run`: pyproject.toml, run.toml, and an example of a node's configuration."""
    from fleetfit.cli import output
    from fleetfit.fleet.app_folder import write_app

    write_app(folder, run_file)
    output.print_line(f"Written: {folder}. Edit {folder / 'run.toml'}, then run: flwr run {folder} SUPERLINK --stream")


@app.command()
def certificates(
    folder: Annotated[Path, path_argument(parse_folder, "Folder for ca.crt, ca.key, server.pem and server.key.")],
    host: Annotated[list[str], typer.Option(help="Host name or address at which nodes reach the server. Repeatable.")],
    days: Annotated[int, typer.Option(min=1, help="Days until the server's certificate expires.")] = 365,
) -> None:
    """Make a certificate authority and the SuperLink's certificate. Copy ca.crt to each node; keep ca.key secret."""
    from fleetfit.cli import output
    from fleetfit.fleet.certificates import make_certificates

    make_certificates(folder, host, days)
    output.print_line(f"Written: {folder}. Copy ca.crt to each node. Keep ca.key secret.")


@app.command()
def key(
    file: Annotated[
        Path, path_argument(parse_output_file, "Private key to write. The public key is written to FILE.pub.")
    ],
) -> None:
    """Make a node's key pair. Register the public key: flwr supernode register FILE.pub SUPERLINK."""
    from fleetfit.cli import output
    from fleetfit.fleet.certificates import make_node_key

    make_node_key(file)
    output.print_line(f"Written: {file}. Keep it on the node, and register {file}.pub with the SuperLink.")


@app.command()
def member(
    file: Annotated[Path, path_argument(parse_output_file, "Key to write, for the node's secure rounds.")],
    authority: Annotated[Path, path_option(parse_folder, "Folder of the fleet's certificate authority.")],
) -> None:
    """Make a node's key for secure rounds, signed by the fleet's authority. Never run this on the server."""
    from fleetfit.cli import output
    from fleetfit.fleet.certificates import make_member

    make_member(file, authority)
    output.print_line(
        f"Written: {file}. Copy it to the node, and name it there under [secure] member. Keep "
        f"{authority / 'members.key'} away from the server: with it the server could forge members."
    )


@app.command()
def node(
    file: Annotated[Path, path_argument(parse_input_file, "The node's configuration (TOML).")],
    superlink: Annotated[
        list[str] | None,
        typer.Option(help="HOST:PORT of the SuperLink. Repeatable: others over the same database, if one fails."),
    ] = None,
    ca: Annotated[
        Path | None, path_option(parse_input_file, "Certificate authority of the SuperLink. Default: the system's.")
    ] = None,
    key: Annotated[Path | None, path_option(parse_input_file, "The node's private key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Do not use TLS; only for trials on one machine.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Load the data, print the node's report, and exit.")] = False,
) -> None:
    """Run a node on this device until Ctrl-C. It trains the server's jobs, within its configuration."""
    if check:
        from fleetfit.cli import output
        from fleetfit.fleet.node import Node
        from fleetfit.fleet.settings import read_settings

        output.print_line(Node(read_settings(file)).format_description())
        return
    from fleetfit.fleet.connection import Connection
    from fleetfit.fleet.launcher import run_node

    if not superlink:
        raise ConfigError("a node needs the SuperLink's address: --superlink HOST:PORT.", key="superlink")
    code = "from fleetfit.cli import main; main()"  # a process of its own releases the data and torch after the check
    check_process = subprocess.run([sys.executable, "-c", code, "flower", "node", str(file), "--check"], check=False)
    if check_process.returncode:
        raise typer.Exit(check_process.returncode)
    raise typer.Exit(run_node(file.resolve(), Connection(superlink[0], ca, key, insecure, tuple(superlink[1:]))))


@app.command()
def approve(
    file: Annotated[Path, path_argument(parse_input_file, "The node's configuration (TOML).")],
    fingerprint: Annotated[str, typer.Argument(help="Of a run; its first digits are enough. Default: list runs.")] = "",
    yes: Annotated[bool, typer.Option("--yes", help="Approve the run; it needs the whole fingerprint.")] = False,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Withdraw the approval of the run.")] = False,
) -> None:
    """Show the runs that wait for the owner of this node, or the terms of one; with --yes, approve it."""
    import tomli_w

    from fleetfit.cli import output
    from fleetfit.config.dump import make_plain
    from fleetfit.fleet.policy import Approvals
    from fleetfit.fleet.settings import read_settings

    settings = read_settings(file)
    approvals = Approvals(Path(settings.folder))
    if withdraw:
        output.print_line(f"Withdrawn: {approvals.withdraw(fingerprint)}.")
    elif fingerprint:
        whole, terms = approvals.find_waiting(fingerprint)
        if yes and whole != fingerprint:
            raise ConfigError(
                f"--yes takes the whole fingerprint of the terms that you have read: {whole}.", key="fingerprint"
            )
        if yes:
            approvals.approve(whole, terms)
            output.print_line(f"Approved: {whole}.")
        else:
            output.print_line(tomli_w.dumps(make_plain(terms)))
            output.print_line(f"To approve it: fleetfit flower approve {file} {whole} --yes")
    else:
        for line in approvals.format_lines():
            output.print_line(line)
        if settings.policy is None or not settings.policy.approval:
            output.print_line("This node takes part in any run: [policy] approval is not set.")


@app.command()
def log(
    file: Annotated[Path, path_argument(parse_input_file, "The node's configuration (TOML).")],
    heads: Annotated[
        Path | None, path_option(parse_input_file, "node_logs.jsonl of the server's run folder, to compare with.")
    ] = None,
    last: Annotated[int, typer.Option(min=0, help="Lines to show.")] = 20,
) -> None:
    """Show a node's log, and verify its chain of hashes: requests, decisions, and what left the node."""
    from fleetfit.cli import output
    from fleetfit.fleet.node_log import FILE, find_wrong_heads, format_entry, read_heads, read_log
    from fleetfit.fleet.settings import read_settings

    settings = read_settings(file)
    path = Path(settings.folder) / FILE
    entries, hashes = read_log(path)
    for entry in entries[-last:] if last else ():
        output.print_line(format_entry(entry))
    output.print_line(f"{len(entries)} lines, each follows from the one before. Hash of the last: {hashes[-1]}.")
    if heads is not None:
        by_node = read_heads(heads, settings.name)  # several, if nodes share a name: one of them is this one
        wrong = min((find_wrong_heads(hashes, kept) for kept in by_node), key=len)
        if wrong:
            raise RunError(f"{path} is not the log that the server knows. {' '.join(wrong[:3])}", path=path)
        output.print_line("The heads that the server kept agree.")


@app.command()
def revoke(
    node: Annotated[int, typer.Argument(help="Id of the node: nodes.json of a run, or flwr supernode list.")],
    superlink: Annotated[
        str, typer.Argument(help="Name of the SuperLink in Flower's configuration. Default: Flower's default.")
    ] = "",
    authority: Annotated[
        Path | None, path_option(parse_folder, "Folder of the fleet's authority, if the node has a member's key.")
    ] = None,
) -> None:
    """Revoke a node's key at the SuperLink, and with --authority the keys of all members."""
    from fleetfit.cli import output
    from fleetfit.fleet.certificates import replace_members_authority

    if authority is not None and not (key := authority / "members.key").is_file():
        raise ConfigError(f"{key} does not exist; name the folder of the authority of members.", path=key)
    code = subprocess.call(
        [find_flwr("Revoking a key"), "supernode", "unregister", str(node), *([superlink] if superlink else [])]
    )
    if code:
        raise typer.Exit(code)
    output.print_line(f"The SuperLink refuses node {node} from now on.")
    if authority is not None:
        old = replace_members_authority(authority)
        output.print_line(
            f"The members' keys of {old} count no more. Make a new one for each node that remains: fleetfit flower "
            f"member FILE --authority {authority}. Until then no secure round has enough members."
        )


@app.command()
def resume(
    folder: Annotated[Path, path_argument(parse_folder, "Run folder on the SuperLink's machine.")],
    superlink: Annotated[
        str, typer.Argument(help="Name of the SuperLink in Flower's configuration. Default: Flower's default.")
    ] = "",
    overrides: Changes = None,
) -> None:
    """Continue a stopped run of a fleet from its last checkpoint. Run this on the SuperLink's machine.

    With --set, it continues with other rounds, fleet.levels, evaluate.patience, or engine.nodes, wait_s and deadline_s.
    """
    from fleetfit.api.change import change_run
    from fleetfit.cli import output
    from fleetfit.config.load import parse_overrides
    from fleetfit.fleet.app_folder import write_app
    from fleetfit.runs.folder import RunFolder

    path = RunFolder.open_fleet(folder).path.resolve()
    flwr = find_flwr("Resuming a fleet's run")
    if overrides:
        change_run(RunFolder(path), parse_overrides(overrides), {})
    with tempfile.TemporaryDirectory(prefix="fleetfit-") as scratch:
        app_folder = Path(scratch) / "app"
        write_app(app_folder, None, {"run-file": "", "resume": str(path)}, name="fleetfit-resume")
        output.print_line(f"Continuing {path}.")
        code = subprocess.call([flwr, "run", str(app_folder), *([superlink] if superlink else []), "--stream"])
    raise typer.Exit(code)


def find_flwr(what: str) -> str:
    """Return the path of Flower's command.

    Raises:
        MissingExtra: Flower is not installed.
    """
    flwr = Path(sys.executable).parent / "flwr"
    if not flwr.is_file():
        raise MissingExtra("flower", what)
    return str(flwr)
