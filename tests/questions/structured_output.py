"""The questions of structured_output: queues of grammars, and runs with masks."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from tests.exercises.by_hand import make_request
from tests.exercises.test_structured_output_1 import added, make_manager, taken
from tests.exercises.test_structured_output_2 import add, made
from tests.helpers.fake_grammars import END, allowed_tokens
from tests.helpers.oracle import drain, greedy

Asked = Iterator[tuple[str, str, Any]]


def queues(chance: Random) -> Asked:
    for _ in range(20):
        manager, compiler = make_manager()
        queue, grammars, abandoned, about = list[Any](), list[Any](), list[int](), list[str]()
        for number in range(chance.randint(2, 8)):
            manager.timeout = chance.choice([0.0, 1000.0, 1000.0])
            added(manager, f"r{number}", chance.randrange(3))
            about.append(f"add with timeout {manager.timeout}")
            while compiler.pending and chance.random() < 0.4:
                place, is_bad = chance.randrange(len(compiler.pending)), chance.random() < 0.3
                compiler.finish(place, ValueError("bad") if is_bad else None)
                about.append(f"end compilation {place}, {'bad' if is_bad else 'good'}")
            if chance.random() < 0.5:
                about.append("take")
                queue.append([taken(manager), [r.request_id for r in manager.queue]])
                grammars.append([begin(manager, request) for request in manager.grammars])
                abandoned.append(len(compiler.abandoned))
        yield "the queue", ", ".join(about), queue
        yield "grammars of requests", ", ".join(about), grammars
        yield "abandoned grammars", ", ".join(about), abandoned


def begin(manager: Any, request: Any) -> list[Any]:
    """Let a request take its first token, if it has not. Return its name, and what it has taken."""
    grammar = manager.grammars[request]
    before = list(grammar.accepted)
    if not before:
        grammar.accept(allowed_tokens(grammar.salt, [], grammar.length)[0])
    return [request.request_id, before, list(grammar.accepted)]


def reasons(chance: Random) -> Asked:
    """Ask which tokens a request must not take."""
    manager, compiler = make_manager()
    request, plain = added(manager, "a", chance.randrange(5)), make_request("plain", [1])
    compiler.finish()
    taken(manager)
    tokens = [chance.choice([None, *range(END), *range(END + 1, 50)]) for _ in range(30)]
    found = [manager.accept(request, token) is None for token in tokens]
    others = [manager.accept(plain, token) for token in tokens]
    yield "tokens of a grammar", f"accept {tokens}", found
    yield "requests without a grammar", f"accept {tokens}", [others, manager.accept(plain, None)]


def runs(chance: Random) -> Asked:
    yield from reasons(chance)
    for _ in range(6):
        budget = chance.choice([2, 5, 64])
        engine = made(late=chance.random() < 0.5, max_num_batched_tokens=budget)
        about = [f"budget {budget}"]
        for number in range(chance.randint(1, 5)):
            prompt = [chance.randrange(50) for _ in range(chance.randint(1, 9))]
            length = chance.choice([0, 2, 5, 30])
            if length:
                add(engine, f"r{number}", number, length, prompt)
            else:
                engine.add_request(prompt, greedy(8, ignore_eos=True), f"r{number}")
            about.append(f"{prompt} with {length} tokens" if length else f"{prompt}")
        outputs = {name: found[-1].outputs[0] for name, found in drain(engine).items()}
        answer = {name: [o.token_ids, o.finish_reason] for name, o in sorted(outputs.items())}
        yield "outputs", "; ".join(about), answer
        yield "the order of masks and steps", "; ".join(about), engine.events


QUESTIONS = {"structured_output.1": (queues, 24), "structured_output.2": (runs, 24)}
