"""The same mutations, led by coverage: `PYTHONPATH=tests python -m fuzz.atheris_messages -runs=20000`.

It needs `atheris`, which is in no extra: there are wheels for Linux only. All options are libFuzzer's.
"""

import sys

try:
    import atheris
except ImportError:
    raise SystemExit("atheris is not installed: pip install atheris (Linux, Python 3.11 to 3.13)") from None

with atheris.instrument_imports(include=["fleetfit.guard", "fleetfit.wire", "fleetfit.engines.flower.protocol"]):
    from fuzz.checking import lives, one


def test_one_input(data: bytes) -> None:
    """Make a message of a fuzzer's bytes, and deliver it."""
    given = atheris.FuzzedDataProvider(data)
    one(lambda most: given.ConsumeIntInRange(0, most))


if __name__ == "__main__":
    lives()
    atheris.Setup(sys.argv, test_one_input)
    atheris.Fuzz()
