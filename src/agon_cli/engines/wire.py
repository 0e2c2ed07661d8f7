"""HTTP to one server, with the standard library: JSON both ways, bounded waits, bounded answers, no proxies."""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import socket
import ssl
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from agon_cli.errors import ResourceError, UsageError

CONNECT_SECONDS = 10.0
_BUSY = (429, 502, 503, 504)
"""Statuses by which a server, or what stands before it, says that it may answer later."""
_NO_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST")
"""OpenSSL's reasons when the other side speaks something else."""


class Away(Exception):
    """The server gave no answer, for the reason in the message: it may have one later."""


class Refused(Exception):
    """The server answered that it will not, with a status and its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{status} {words}")
        self.status = status
        self.words = words


class Nonsense(Exception):
    """The server's answer is not what was asked for."""


class Wire:
    """Questions to the server at `url`, from any number of threads, each with a connection of its own that it keeps
    until `close`. `self.url` is the address in its plainest spelling.

    A server whose answer is not there after `silence` seconds is away. A key in $VLLM_API_KEY is sent along. Raises
    UsageError for an address, or a key, that is none.
    """

    def __init__(self, url: str, silence: float) -> None:
        try:
            parts = urlsplit(url)
            self._host, self._secure = parts.hostname or "", parts.scheme == "https"
            self._port = (443 if self._secure else 80) if parts.port is None else parts.port
            if not self._host:
                raise ValueError("it names no host")
            self._host.encode("idna")
            if any(character <= " " or character > "~" for character in self._host + parts.path):
                raise ValueError("it has a character that no address has")
            if self._port == 0:
                raise ValueError("nothing listens on port 0")
            if parts.query or parts.fragment:
                raise ValueError("it goes on after its path")
        except ValueError as error:
            raise UsageError(f"engine.urls: {url!r} is no address: {error}", "such as http://127.0.0.1:8000") from error
        self._path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        self.url = f"{parts.scheme}://{_netloc(self._host, self._port, self._secure)}{self._path}"
        self.silence = silence
        self._key = _key()
        self._tls = ssl.create_default_context() if self._secure else None
        self._own = threading.local()
        self._open: set[http.client.HTTPConnection] = set()
        self._under_way = 0
        self._asks = True
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a question is under way."""
        return self._under_way > 0

    def ask(self, path: str, body: Any = None, limit: int = 1 << 20) -> bytes:
        """The answer to a GET, or to a POST where there is a body; at most `limit` bytes.

        Raises Away, also after `hang_up`; Refused and Nonsense; ResourceError where this process may open no more
        connections; UsageError for a server that no TLS can be spoken with.
        """
        with self._lock:
            if not self._asks:
                raise Away("it is no longer asked")
            self._under_way += 1
        try:
            return self._ask(path, body, limit)
        finally:
            with self._lock:
                self._under_way -= 1

    def _ask(self, path: str, body: Any, limit: int) -> bytes:
        connection = self._connection()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            if connection.sock is None:
                connection.timeout = min(CONNECT_SECONDS, self.silence)
                connection.connect()
                self._patient(connection)
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", self._path + path, data, headers)
            response = connection.getresponse()
            content = response.read(limit + 1)
            if response.length and len(content) <= limit:
                raise http.client.IncompleteRead(content, response.length)
        except (OSError, http.client.HTTPException, ssl.SSLError) as error:
            self._drop(connection)
            if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
                raise ResourceError(
                    f"no connection to {self.url}: {error.strerror}", "allow more: ulimit -n 4096"
                ) from error
            if isinstance(error, ssl.SSLCertVerificationError):
                raise UsageError(
                    f"the certificate of {self.url} does not hold: {plain(error.verify_message)}",
                    "SSL_CERT_FILE names a file of certificates to trust; the address must be one that it is made for",
                ) from error
            if isinstance(error, ssl.SSLError) and error.reason in _NO_TLS:
                raise UsageError(
                    f"what answers at {self.url} does not speak TLS", "write http:// for a server without it"
                ) from error
            raise Away(plain(str(error)) or type(error).__name__) from error
        if len(content) > limit:
            self._drop(connection)
            raise Nonsense(f"an answer of more than {limit} bytes")
        if response.status in _BUSY:
            raise Away(f"status {response.status}")
        if response.status != 200:
            raise Refused(response.status, _words(content))
        return content

    def ask_json(self, path: str, body: Any = None, limit: int = 1 << 20) -> dict[str, Any]:
        """The answer as a JSON object."""
        content = self.ask(path, body, limit)
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            raise Nonsense("an answer that is not JSON") from None
        if not isinstance(found, dict):
            raise Nonsense("an answer that is no JSON object")
        return found

    def resume(self) -> None:
        """Ask again after `hang_up`."""
        self._asks = True

    def hang_up(self) -> None:
        """Break off every question under way, in all threads, and let none begin. One that is just connecting goes on:
        call this again while `busy`."""
        with self._lock:
            self._asks = False
            held = list(self._open)
        for connection in held:
            socket_of_it = connection.sock  # read once: its thread may be putting it down
            if socket_of_it is not None:
                with suppress(OSError):
                    # The socket's own: ssl's forgets the cipher first, and what is then sent goes out in the clear.
                    socket.socket.shutdown(socket_of_it, socket.SHUT_RDWR)

    def close(self) -> None:
        """Give up every connection, of threads that have ended too; none may have a question under way."""
        with self._lock:
            held, self._open = self._open, set()
        for connection in held:
            with suppress(OSError):
                connection.close()

    def _patient(self, connection: http.client.HTTPConnection) -> None:
        """Once connected, an answer may take far longer than the connection did."""
        if connection.sock is not None:
            connection.sock.settimeout(self.silence)

    def _connection(self) -> http.client.HTTPConnection:
        found: http.client.HTTPConnection | None = getattr(self._own, "connection", None)
        if found is None or found not in self._open:
            if self._tls is not None:
                found = http.client.HTTPSConnection(self._host, self._port, timeout=self.silence, context=self._tls)
            else:
                found = http.client.HTTPConnection(self._host, self._port, timeout=self.silence)
            found.response_class = partial(_Timely, self.silence)  # type: ignore[assignment]
            self._own.connection = found
            with self._lock:
                self._open.add(found)
        return found

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._open.discard(connection)
        with suppress(OSError):
            connection.close()


class _Timely(http.client.HTTPResponse):
    """An answer that has to be whole after so many seconds: a server that drips holds nobody up for ever."""

    def __init__(self, seconds: float, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp.close()
        self.fp = io.BufferedReader(_Until(sock, time.monotonic() + seconds))


class _Until(io.RawIOBase):
    """What a socket receives, until the clock shows `end`."""

    def __init__(self, sock: socket.socket, end: float) -> None:
        self._sock, self._end = sock, end
        self._bytes = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("timed out")
        self._sock.settimeout(left)
        return self._bytes.readinto(buffer)

    def close(self) -> None:
        self._bytes.close()
        super().close()


def _key() -> str:
    """The servers' key, which no message may show."""
    key = os.environ.get("VLLM_API_KEY", "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise UsageError(
            "VLLM_API_KEY has a character that no key has: a blank, a control character or one beyond ASCII",
            "set it to the key alone",
        )
    return key


def _netloc(host: str, port: int, secure: bool) -> str:
    """Host and port as an address has them, without the port that the scheme implies."""
    name = f"[{host}]" if ":" in host else host
    return name if port == (443 if secure else 80) else f"{name}:{port}"


def plain(text: str) -> str:
    """A server's words, fit for a terminal: one line of printable characters, not too long."""
    line = " ".join(text.split())
    kept = "".join(character for character in line if character.isprintable())
    return kept if len(kept) <= 300 else f"{kept[:300]}..."


def _words(content: bytes) -> str:
    """What an error answer says."""
    text = content.decode("utf-8", "replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return plain(text)
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    if isinstance(found, dict) and "message" in found:
        found = found["message"]
    return plain(found if isinstance(found, str) else text)
