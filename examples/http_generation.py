"""Generation by a server with OpenAI's HTTP interface, vLLM or SGLang, for the worker of
rollout_worker.py.

    VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER --logprobs-mode processed_logprobs
    python -m sglang.launch_server --model-path FOLDER

    url = "http://127.0.0.1:8000"
    generator = HttpGeneration(url, VLLM, model, board, Path(FOLDER), max_tokens=1024)
    worker = Worker(RolloutWorker.attach(config), generator, reward, size=8, max_prompt=1024)

A request is a group: the prompt's token ids, and `n` responses. The answer has token ids and their
log-probabilities, so no text is tokenized again. The server batches continuously.

A server belongs to one worker, which gives it the weights of the board between two steps: pause,
save into the folder that it serves, load, resume. Responses that are under way go on with the new
weights, and are stored with the version at which they began: no token is older than its column
says. Their earlier tokens are computed anew, so that no cached prefix outlives its weights.

At a temperature other than 1 vLLM needs its `--logprobs-mode`: else log-probabilities are of
temperature 1.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_worker import Response
from transformers import PreTrainedModel

from deepspeed_gear import PolicyBoard, RemotePolicyBoard

WAIT_S = 0.02  # of a step for an answer


@dataclass(frozen=True)
class Server:
    """What a server calls the steps of an update of its weights: each a path and the body of a
    POST.
    """

    pause: tuple[str, dict[str, Any]]
    load: Callable[
        [str], list[tuple[str, dict[str, Any]]]
    ]  # of a folder; and forget cached prefixes
    resume: tuple[str, dict[str, Any]]


def _load_vllm(folder: str) -> list[tuple[str, dict[str, Any]]]:
    del folder  # it loads the one that it was started with
    reload = ("/collective_rpc", {"method": "reload_weights"})
    return [reload, ("/reset_prefix_cache?reset_running_requests=true", {})]


VLLM = Server(("/pause?mode=keep", {}), _load_vllm, ("/resume", {}))
SGLANG = Server(
    ("/pause_generation", {"mode": "retract"}),
    lambda folder: [("/update_weights_from_disk", {"model_path": folder})],
    ("/continue_generation", {}),
)


class HttpGeneration:
    """The methods of `rollout_worker.Generation`, with the responses of a server.

    Args:
        url: Without a path.
        server: What it calls an update.
        model: On the CPU: the board is loaded into it, and saved.
        folder: The folder that the server serves.
        name: What it calls the model; None: the folder.
        places: Most responses under way.
    Raises:
        OSError: The server does not answer, or refuses (urllib's HTTPError). Leases then come back
            as the worker ends.
    """

    def __init__(
        self,
        url: str,
        server: Server,
        model: PreTrainedModel,
        board: PolicyBoard | RemotePolicyBoard,
        folder: Path,
        *,
        max_tokens: int,
        name: str | None = None,
        places: int = 256,
        temperature: float = 1.0,
        timeout_s: float = 600.0,
    ) -> None:
        self._url = url
        self._server = server
        self._timeout_s = timeout_s
        self._model = model
        self._board = board
        self._folder = folder.resolve()
        self._places = places
        self._eos = model.config.eos_token_id
        self._fixed = {
            "model": name or str(folder),
            "max_tokens": max_tokens,
            "temperature": temperature,
        }
        self._fixed |= {"logprobs": 1, "return_token_ids": True}
        self._requests: dict[Future[Any], tuple[int, int, int]] = {}  # key, responses, version
        self._pool = ThreadPoolExecutor(places)
        self.version = 0

    @property
    def free(self) -> int:
        return self._places - sum(size for _, size, _ in self._requests.values())

    def start(self, key: int, prompt: Sequence[int], size: int) -> None:
        """Begin responses to a prompt: one request."""
        body = {**self._fixed, "prompt": list(prompt), "n": size}
        request = self._pool.submit(self._post, "/v1/completions", body)
        self._requests[request] = key, size, self.version

    def cancel(self, key: int) -> None:
        """Drop the responses of a key; the server may go on with them."""
        self._requests = {request: one for request, one in self._requests.items() if one[0] != key}

    def step(self) -> list[Response]:
        """Return responses that have ended; wait for some a moment."""
        done, _ = wait(self._requests, WAIT_S, FIRST_COMPLETED)
        found = []
        for request in done:
            key, _, version = self._requests.pop(request)
            for choice in request.result()["choices"]:
                tokens = choice["token_ids"]
                logp = choice["logprobs"]["token_logprobs"]
                has_ended = choice["finish_reason"] == "stop"
                found.append(Response(key, tokens, logp, [version] * len(tokens), has_ended))
        return found

    def refresh(self) -> None:
        """Give the server the newest weights, if it does not have them."""
        if self._board.version == self.version:
            return
        version = self._board.load_into(self._model)
        self._post(*self._server.pause)
        self.send()
        self._post(*self._server.resume)
        self.version = version

    def send(self) -> None:
        """Send the weights of the model to the paused server; override it to send large ones by
        NCCL.
        """
        self._model.save_pretrained(self._folder)
        for path, body in self._server.load(str(self._folder)):
            self._post(path, body)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
            return json.loads(answer.read() or b"null")

    def close(self) -> None:
        """End without waiting for answers."""
        self._pool.shutdown(wait=False, cancel_futures=True)
