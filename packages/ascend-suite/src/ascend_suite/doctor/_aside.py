"""Ask questions in another process, which may crash or hang without harm. Imports no torch.

[Note: why the machine is asked aside]
`import torch_npu` with half a CANN may end the process with a signal, wait for ever for a driver,
or raise anything. None of that may take with it what else was found out. So a forked child answers,
one question after the other, and says which it is at; where it dies or takes too long, the question
is answered with that, and another child goes on with the next one. It is forked and not started
anew, so that a simulated NPU, which is part of a process, is there too. Devices are initialised in
children alone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any

__all__ = ["Answer", "ask_aside"]

_LINGER = 5.0  # seconds: for a child that has answered, and for one that was ended
_LONGEST = 2000  # characters of a message that are kept: the reason, and not a page of C++


@dataclasses.dataclass(frozen=True)
class Answer:
    """What came of a question.

    Attributes:
        value: The answer, as JSON values; None where there is none.
        failure: Why there is none.
    """

    value: Any = None
    failure: str | None = None


def ask_aside(
    questions: Mapping[str, Callable[[], object]], *, seconds: float, first: str | None = None
) -> dict[str, Answer]:
    """Answer each question in another process.

    Args:
        questions: By name; each returns JSON values, and may raise.
        seconds: How long one of them may take.
        first: The name of one without which there is no answer to any other: where it fails, the
            others are not asked, and fail for its reason.

    Returns:
        An answer to each, in their order.
    """
    answers: dict[str, Answer] = {}
    while remaining := {name: q for name, q in questions.items() if name not in answers}:
        answers |= _ask_one_child(remaining, seconds)
        if first in answers and answers[first].failure is not None:
            return {name: answers.get(name, answers[first]) for name in questions}
    return answers


def _ask_one_child(
    questions: Mapping[str, Callable[[], object]], seconds: float
) -> dict[str, Answer]:
    """Return the answers of a child until it fails to give one, and why that one is missing."""
    names = iter(questions)
    answers: dict[str, Answer] = {}
    with tempfile.TemporaryFile() as said:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            _answer_and_leave(questions, writing, said)
        os.close(writing)
        failure = None
        try:
            for line in _lines(reading, seconds):
                answers[next(names)] = Answer(**json.loads(line))
                if len(answers) == len(questions):
                    break
        except TimeoutError:
            failure = f"it did not end within {seconds:g} seconds"
        finally:
            os.close(reading)
            os.kill(child, signal.SIGKILL)  # it has answered all, or will not
            status = _status_of(child)
        unanswered = next(names, None)
        if unanswered is not None:
            answers[unanswered] = Answer(failure=failure or _death(status, said))
    return answers


def _answer_and_leave(
    questions: Mapping[str, Callable[[], object]], writing: int, said: IO[bytes]
) -> None:
    """Answer in the child, which never returns from here. What it prints goes to `said`."""
    try:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        for question in questions.values():
            try:
                line = json.dumps({"value": question()})
            except BaseException as error:
                text = f"{type(error).__name__}: {error}"
                line = json.dumps({"failure": text[:_LONGEST]})
            os.write(writing, line.encode() + b"\n")
        time.sleep(_LINGER)  # to be ended: what libraries do at an exit is of no use, and may hang
    finally:
        os._exit(1)


def _lines(reading: int, seconds: float) -> Iterator[bytes]:
    """Yield what the child writes, line by line, until it writes no more."""
    buffer = b""
    deadline = time.monotonic() + seconds
    while True:
        ready, _, _ = select.select([reading], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError
        chunk = os.read(reading, 1 << 16)
        if not chunk:
            return
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            deadline = time.monotonic() + seconds
            yield line


def _status_of(child: int) -> int:
    """Wait for a child that was ended; not for ever, since a driver may hold it in the kernel."""
    deadline = time.monotonic() + _LINGER
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > deadline:
            return status
        time.sleep(0.01)


def _death(status: int, said: IO[bytes]) -> str:
    said.seek(0)
    lines = said.read().decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    code = os.waitstatus_to_exitcode(status)
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"it ended the process with {how}{': ' + last[:_LONGEST] if last else ''}"
