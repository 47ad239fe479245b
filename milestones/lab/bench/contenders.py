"""The engines that the bench measures: the milestones, Hugging Face, vLLM and llama.cpp."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from common.displays.workload import Workload, WorkloadResult, percentile, run_module
from common.hf.gguf_folders import embedded_gguf, hugging_face_folder, is_embedded

from ...chain import milestones, package


@dataclass
class Contender:
    """An engine, and its results: for each workload, one result per round."""

    name: str
    command: tuple[str, ...] = ()
    results: dict[str, list[WorkloadResult]] = field(default_factory=dict)

    def run(self, workload: Workload) -> WorkloadResult:
        """Serve the workload in a new process, after a warm-up."""
        return run_module(workload, *self.command)

    def summary(self, workload: str) -> Summary | None:
        """Return the medians over the rounds of a workload, or None if it was not measured."""
        results = self.results.get(workload)
        return Summary.of(results) if results else None

    def close(self) -> None:
        """End the process of this engine, if there is one."""


@dataclass(frozen=True)
class Summary:
    """The medians that a table shows. Times are in seconds."""

    tokens_per_second: float
    first_token: tuple[float, float]  # p50 and p95 over the requests
    inter_token: tuple[float, float] | None  # p50 and p95 over the tokens; None: no streaming
    gap: float | None  # time between two forwards: the cost of the host per step
    kv_waste: float | None  # share of the reserved KV memory that holds no token
    stats: dict[str, int]

    @staticmethod
    def of(results: list[WorkloadResult]) -> Summary:
        """Compute percentiles within each round, and then the median of them over the rounds."""

        def over(name: str, percent: float) -> float:
            return median(percentile(getattr(result, name), percent) for result in results)

        latest = results[-1]
        return Summary(
            tokens_per_second=median(result.tokens_per_second for result in results),
            first_token=(over("first_token_seconds", 50), over("first_token_seconds", 95)),
            inter_token=(over("inter_token_seconds", 50), over("inter_token_seconds", 95))
            if latest.inter_token_seconds
            else None,
            gap=over("gap_seconds", 50) if latest.gap_seconds else None,
            kv_waste=latest.kv_waste,
            stats=latest.stats,
        )


class Peer(Contender):
    """An engine that runs in another Python environment.

    All rounds have the same prompts, so the engine must not keep a cache from the round before.
    Its process empties the cache after each workload, or each measurement gets a new process.
    """

    def __init__(
        self, name: str, python: Path, model: Callable[[], Path | str], *, forgets: bool,
        options: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """model: returns the model for the script; called when a process starts. forgets: the cache
        is empty after each workload, so the process can stay (a start may take minutes). options:
        for the script, which has the first word of the name."""
        super().__init__(name)
        self.python, self.model, self.forgets, self.options = python, model, forgets, options
        self.script = Path(__file__).with_name(f"peer_{name.partition('-')[0]}.py")
        self._process: subprocess.Popen[str] | None = None

    def run(self, workload: Workload) -> WorkloadResult:
        """Serve the workload after a warm-up. Raises `RuntimeError` if the engine does not run."""
        if not self.forgets:
            self.close()
        self._ask(workload.warm_up())
        return self._ask(workload)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _ask(self, workload: Workload) -> WorkloadResult:
        if self._process is None:
            self._process = subprocess.Popen(
                [self.python, self.script, str(self.model()), *self.options],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                text=True, cwd="/",
            )  # fmt: skip
        pipe_in, pipe_out = self._process.stdin, self._process.stdout
        assert pipe_in is not None and pipe_out is not None
        try:
            pipe_in.write(json.dumps(asdict(workload)) + "\n")
            pipe_in.flush()
            answer = pipe_out.readline()
        except BrokenPipeError:
            answer = ""
        if not answer:
            raise RuntimeError(f"{self.name} ended; to see why: {self.python} {self.script} MODEL")
        return WorkloadResult(**json.loads(answer))


def folder_or_id(model: str) -> Path | str:
    """Return the model as vLLM reads it: a folder or an id of Hugging Face."""
    return hugging_face_folder(embedded_gguf()) if is_embedded(model) else model


def gguf_file(model: str) -> Path | str:
    """Return the model as llama.cpp reads it. Raises `ValueError` if it is not a `.gguf` file."""
    if not is_embedded(model) and not model.endswith(".gguf"):
        raise ValueError(f"llama.cpp reads .gguf files, not {model!r}")
    return embedded_gguf() if is_embedded(model) else model


def of_tree(name: str) -> Contender:
    """Return a milestone or an elective."""
    return Contender(name, ("common.displays.workload", package(name)))


def contenders(
    model: str, vllm_python: Path | None = None, llama_python: Path | None = None
) -> list[Contender]:
    """Return every milestone of the tree, and then the other engines."""
    found = [
        *map(of_tree, milestones()),
        *(
            Contender(peer, ("milestones.lab.bench.peers", peer))
            for peer in ("hf-static", "hf-batch")
        ),
    ]
    if vllm_python:
        found.append(Peer("vllm", vllm_python, lambda: folder_or_id(model), forgets=True))
    if llama_python:
        for name, options in (("llama", ("--float32",)), ("llama-stored", ())):
            found.append(
                Peer(name, llama_python, lambda: gguf_file(model), forgets=False, options=options)
            )
    return found
