"""Compiles many kernels in worker processes, for architectures that need not be here."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from octavo.runtime.binary_cache import BinaryCache
from octavo.runtime.compile_kernel import compile_kernel, is_usual_compiler, toolchain
from octavo.runtime.errors import ArtifactError, InvalidRequest
from octavo.runtime.kernel import Launch
from octavo.runtime.kernel_binary import Binary, Specialisation, parse_info

WORKERS = "OCTAVO_COMPILE_WORKERS"
Progress = Callable[[int, int], None]  # done, of how many
FEW = 2  # as many are compiled here: a worker takes seconds to start


def specialisations(launches: Iterable[Launch], arch: int) -> list[Specialisation]:
    """The distinct binaries that launches need on an architecture, by name."""
    found: dict[str, Specialisation] = {}
    for launch in {launch.identity: launch for launch in launches}.values():
        wanted = Specialisation.of(launch, arch)
        found.setdefault(wanted.stem, wanted)
    return [found[stem] for stem in sorted(found)]


def write_binaries(
    launches: Mapping[int, Iterable[Launch]],
    folder: Path,
    *,
    cache: BinaryCache | None = None,
    progress: Progress | None = None,
) -> int:
    """Compile what each architecture's launches need into ``<folder>/sm_90/...``.

    What ``cache`` has from this very toolchain is taken from there, and what it has not is added
    to it. Returns the number of binaries. Equal input gives equal files with one Triton. Raises
    ArtifactError, naming the kernel, its constants and the architecture.
    """
    wanted = [each for arch in launches for each in specialisations(launches[arch], arch)]
    if not is_usual_compiler():
        cache = None
    missing = []
    for each in wanted:
        found = cache.find(each, toolchain=toolchain(each.arch)) if cache is not None else None
        if found is None:
            missing.append(each)
        else:
            found.write(folder / f"sm_{each.arch}", each.stem)
    for each, binary in compile_all(missing, progress=progress):
        binary.write(folder / f"sm_{each.arch}", each.stem)
        if cache is not None:
            cache.keep(each, binary)
    return len(wanted)


def num_compile_workers() -> int:
    """How many processes compile at a time: ``$OCTAVO_COMPILE_WORKERS``, else one for each
    processor that this process may use. Raises InvalidRequest for a value that is no such number.
    """
    given = os.environ.get(WORKERS, "")
    if not given:
        return _num_processors()
    if not (given.isascii() and given.isdecimal() and int(given) > 0):
        raise InvalidRequest(f"{WORKERS}={given!r}: expected a number of processes, 1 or more")
    return int(given)


def _num_processors() -> int:
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def compile_all(
    wanted: list[Specialisation], *, progress: Progress | None = None
) -> Iterator[tuple[Specialisation, Binary]]:
    """Compile kernels in ``num_compile_workers`` processes, in the order they get done.

    Raises ArtifactError for the first that does not compile, after all the others.
    """
    if not wanted:
        return
    num_workers = min(len(wanted), num_compile_workers())
    idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
    with contextlib.ExitStack() as stack:
        for _ in range(num_workers):
            idle.put(stack.enter_context(Worker()))
        pool = stack.enter_context(ThreadPoolExecutor(num_workers))
        stack.callback(pool.shutdown, cancel_futures=True)

        def run(each: Specialisation) -> tuple[Specialisation, Binary]:
            worker = idle.get()
            try:
                return each, worker.compile(each)
            finally:
                idle.put(worker)

        done = as_completed([pool.submit(run, each) for each in wanted])
        problem: ArtifactError | None = None
        for number, future in enumerate(done, 1):
            try:
                yield future.result()
            except ArtifactError as error:
                problem = problem or error
            if progress is not None:
                progress(number, len(wanted))
        if problem is not None:
            raise problem


def compile_here_or_there(
    wanted: list[Specialisation],
) -> Iterator[tuple[Specialisation, Binary]]:
    """Compile a few kernels in this process and many in workers."""
    if len(wanted) > FEW:
        yield from compile_all(wanted)
        return
    for each in wanted:
        yield each, compile_kernel(each)


class Worker:
    """A process that compiles one kernel after the other, see ``compile_kernel``."""

    def __enter__(self) -> Worker:
        environment = {
            name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"
        }
        # Kernels are compiled side by side, and none needs threads or a GPU.
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.runtime.compile_kernel"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.communicate()

    def compile(self, wanted: Specialisation) -> Binary:
        """Compile a kernel. Raises ArtifactError, also when the process died."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        try:
            requests.write(json.dumps(wanted.to_dict()) + "\n")
            requests.flush()
            line = answers.readline()
        except OSError:
            line = ""
        if not line:
            raise ArtifactError(
                f"{wanted}: the process that compiled it ended with {self._process.wait()}; "
                "was there enough memory?"
            )
        answer = json.loads(line)
        if "error" in answer:
            raise ArtifactError(answer["error"])
        content = {suffix: base64.b64decode(text) for suffix, text in answer.items()}
        info = parse_info(content[".json"], Path(wanted.stem + ".json"))
        return Binary(info, content[".cubin"])
