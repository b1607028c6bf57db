"""Plain values as bytes and back, to be signed, hashed and sent; two different lists never give the same bytes.

A value is a letter for its kind, its length, and itself: "i" a whole number (length in 1 byte, big-endian, signed),
"s" a text and "b" bytes (length in 4 bytes), "t" a list (the number of values in 4 bytes, then these).
"""

from fleetfit.errors import RunError

Plain = int | str | bytes | tuple["Plain", ...]
_MAX_DEPTH = 6  # lists in lists; a roster has three


def encode(*values: Plain) -> bytes:
    """Return values as bytes."""
    parts: list[bytes] = []
    for value in values:
        _encode(value, parts)
    return b"".join(parts)


def _encode(value: Plain, parts: list[bytes]) -> None:
    if isinstance(value, tuple):
        parts.append(b"t" + len(value).to_bytes(4, "big"))
        for one in value:
            _encode(one, parts)
    elif isinstance(value, int):
        body = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        parts += [b"i", len(body).to_bytes(1, "big"), body]
    else:
        body = value.encode() if isinstance(value, str) else value
        parts += [b"s" if isinstance(value, str) else b"b", len(body).to_bytes(4, "big"), body]


def decode(text: bytes) -> Plain:
    """Return the one value of untrusted bytes.

    Raises:
        RunError: They are not one value, written as `encode` writes it.
    """
    try:
        value, end = _decode(memoryview(text), 0, 0)
    except (ValueError, IndexError):
        value, end = 0, -1
    if end != len(text):
        raise RunError("a message of secure aggregation is damaged: it is not one encoded value.", key="message")
    return value


def _decode(text: memoryview, at: int, depth: int) -> tuple[Plain, int]:
    kind, width = chr(text[at]), 1 if text[at] == ord("i") else 4
    size = int.from_bytes(text[at + 1 : at + 1 + width], "big")
    at += 1 + width
    if at + size > len(text) or depth > _MAX_DEPTH or kind not in "isbt":
        raise ValueError  # each value of a list takes a byte and more
    if kind == "t":
        values = []
        for _ in range(size):
            value, at = _decode(text, at, depth + 1)
            values.append(value)
        return tuple(values), at
    body = bytes(text[at : at + size])
    if kind == "b":
        return body, at + size
    if kind == "s":
        return body.decode(), at + size
    value = int.from_bytes(body, "big", signed=True)
    if len(body) != value.bit_length() // 8 + 1:
        raise ValueError
    return value, at + size
