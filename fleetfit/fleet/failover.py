"""Several SuperLinks over one database: a request goes to one that answers.

`Failover` is an interceptor of Flower's clients, for a node and for a server app. Where a SuperLink does not answer,
the same request goes to the next one, which has all messages, since they are in the database.
"""

import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from fleetfit.errors import one_line
from fleetfit.fleet.connection import GATEWAY, check_superlink

_LOG = logging.getLogger("fleetfit")

VARIABLE = "FLEETFIT_SUPERLINKS"
"""Environment variable of a server app: addresses of all SuperLinks over its database, separated by commas."""


class Failover:
    """Sends each request to the SuperLink that answered the last one, or to the next one that answers."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """Begin with the first address, `host:port` as all of them."""
        self._addresses, self._current = addresses, 0

    @property
    def address(self) -> str:
        """Address of the SuperLink that answered last."""
        return self._addresses[self._current]

    def intercept(self, context: Any, call_next: Callable[[Any], httpx.Response]) -> httpx.Response:
        """Return the response to a request, Flower's `ProtobufRequestContext`.

        Raises:
            httpx.TransportError: No SuperLink answers.
        """
        request, first, count = context.request, self._current, len(self._addresses)
        headers = request.headers.copy()  # inner interceptors sign the time, and refuse what is signed already
        for step in range(count):
            current, is_last = (first + step) % count, step == count - 1
            url = f"{request.url.scheme}://{self._addresses[current]}{request.url.raw_path.decode('ascii')}"
            request.url, request.headers = httpx.URL(url), headers.copy()
            request.headers["host"] = request.url.netloc.decode("ascii")
            try:
                response = call_next(context)
            except httpx.TransportError as error:
                if is_last:
                    raise
                reason = one_line(f"{type(error).__name__}: {error}", 200)
                continue
            if response.status_code not in GATEWAY:
                break
            reason = f"HTTP {response.status_code}"
        is_answered = response.status_code not in GATEWAY
        if is_answered and current != first and self._current == first:  # another thread may have changed it
            self._current = current
            _LOG.warning(
                "The SuperLink at %s does not answer (%s): from now on the one at %s.",
                self._addresses[first], reason, self._addresses[current],
            )  # fmt: skip
        return response


def list_superlinks(address: str) -> list[str]:
    """Return the addresses of a server app's SuperLinks: the one that started it, and those of the environment.

    Raises:
        ConfigError: The environment variable `FLEETFIT_SUPERLINKS` has something else than addresses.
    """
    others = [each.strip() for each in os.environ.get(VARIABLE, "").split(",") if each.strip()]
    for each in others:
        check_superlink(each, VARIABLE)
    return [address, *(each for each in others if each != address)]


def use_superlinks(grid: Any) -> None:
    """Have all requests of a server app go to another SuperLink of `list_superlinks` where one does not answer.

    Args:
        grid: Flower's grid, whose client also sends the heartbeats, the log and the result of the server app.

    Raises:
        ConfigError: See `list_superlinks`.
    """
    addresses = list_superlinks(grid._addr)
    if len(addresses) > 1:
        client = grid._runtime_client
        client._interceptors = (Failover(addresses), *client._interceptors)
